"""The bill of materials inside a wheel: `dist-info/sboms/PACKAGE.cdx.json` (PEP 770).

Its format is CycloneDX 1.6. It depends only on `_build.json`, the bytes of the libraries and
SOURCE_DATE_EPOCH.
"""

from __future__ import annotations

import hashlib
import uuid
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from ...builds.contents import LIBRARIES
from ...builds.sbom import bill_name
from ...indexes.index import PROJECT
from ...product import NAME
from ..project import load_project

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ...builds.manifest import Manifest, Part

_NAMESPACE: Final = uuid.uuid5(uuid.NAMESPACE_DNS, NAME)
_LICENSES: Final = LicenseFactory()


def write_sbom(dist_info: Path, manifest: Manifest) -> None:
    """Add the bill of materials to a wheel before it is packed.

    Args:
        dist_info: The wheel's folder `.dist-info`; the package is next to it.
        manifest: The package's manifest.
    """
    root = dist_info.parent
    files = {name: hashlib.sha256((root / name).read_bytes()).hexdigest() for name in LIBRARIES}
    folder = dist_info / "sboms"
    folder.mkdir()
    (folder / bill_name(NAME)).write_text(make_sbom(manifest, files), encoding="utf-8")


def make_sbom(manifest: Manifest, files: Mapping[str, str]) -> str:
    """Return the bill of materials.

    Args:
        manifest: The package's manifest.
        files: SHA-256 of the libraries, by their names in the wheel.
    """
    root = _describe_package(manifest)
    parts = [_describe_part(part) for part in manifest.parts]
    libraries = [_describe_file(name, sha256) for name, sha256 in files.items()]
    seconds = int(load_project().epoch)
    bom = Bom(
        components=[*parts, *libraries],
        serial_number=uuid.uuid5(_NAMESPACE, "\n".join([*files.values(), manifest.to_text()])),
        metadata=BomMetaData(
            component=root, timestamp=datetime.fromtimestamp(seconds, timezone.utc)
        ),
    )
    bom.register_dependency(root, [*parts, *libraries])
    return f"{JsonV1Dot6(bom).output_as_string(indent=1)}\n"


def _describe_package(manifest: Manifest) -> Component:
    version = manifest.package_version
    told = {
        "targets": " ".join(map(str, manifest.arch_set.archs)),
        "toolkit": f"CUDA {manifest.toolkit.cuda}",
        "nvcc": manifest.toolkit.nvcc,
        "ptxas": manifest.toolkit.ptxas,
        "host compiler": manifest.host.compiler,
    }
    return Component(
        name=NAME,
        version=version,
        type=ComponentType.LIBRARY,
        bom_ref=NAME,
        purl=PackageURL("pypi", name=PROJECT, version=version),
        licenses=[_LICENSES.make_from_string("BSD-3-Clause")],
        properties=_properties(told),
    )


def _describe_part(part: Part) -> Component:
    is_spdx = " " not in part.license or " WITH " in part.license
    make = _LICENSES.make_from_string if is_spdx else _LICENSES.make_with_name
    purl = PackageURL("pypi", name=part.package, version=part.version) if part.package else None
    return Component(
        name=part.name,
        version=part.version,
        type=ComponentType.LIBRARY,
        bom_ref=part.name,
        scope=ComponentScope.REQUIRED,
        purl=purl,
        licenses=[make(part.license)],
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=part.sha256)] if part.sha256 else (),
        properties=_properties({"how": part.how}),
    )


def _describe_file(name: str, sha256: str) -> Component:
    return Component(
        name=name,
        type=ComponentType.FILE,
        bom_ref=quote(name),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=sha256)],
    )


def _properties(told: Mapping[str, str]) -> list[Property]:
    return [Property(name=f"{NAME}:{name}", value=value) for name, value in told.items()]
