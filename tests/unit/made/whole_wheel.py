"""A small wheel of this package that passes every check, made byte by byte."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from typing import TYPE_CHECKING

from flash_dist.toolkit.builds.contents import MANIFEST
from flash_dist.toolkit.builds.linkage import EXTRAS, extra_requirements, requirements_of
from flash_dist.toolkit.builds.manifest import Part as OthersPart
from flash_dist.toolkit.make.compile.sbom import make_sbom
from flash_dist.toolkit.make.project import load_project
from flash_dist.toolkit.targets.archs import Arch
from tests.unit.made.dynamic_builder import make_linked
from tests.unit.made.fatbin_builder import (
    SASS,
    Kernel,
    Part,
    container,
    cubin,
    entry,
)
from tests.unit.made.names import BINDING, BINDING_NEEDS, ENTRY_POINTS, KERNELS
from tests.unit.toolkit.builds.test_manifest import make_kernel, make_manifest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from flash_dist.toolkit.builds.manifest import Manifest

VERSION = "0.1.0+cu130.hopper"
PLATFORM = "manylinux_2_34_x86_64"
NAME = f"flash_dist-{VERSION}-py3-none-{PLATFORM}.whl"
INFO = f"flash_dist-{VERSION}.dist-info"
SBOM = f"{INFO}/sboms/flash_dist.cdx.json"
RECORD = f"{INFO}/RECORD"
METADATA = f"{INFO}/METADATA"
WHEEL = f"{INFO}/WHEEL"
LICENSE = f"{INFO}/licenses/LICENSE"
SCRIPTS = f"{INFO}/entry_points.txt"
EMPTY = hashlib.sha1(b"blob 0\0", usedforsecurity=False).hexdigest()  # git's hash of an empty file
FILES = ("__init__.py", "archsets.json", "py.typed")
BLOBS = dict.fromkeys((*(f"flash_dist/{name}" for name in FILES), "LICENSE"), EMPTY)
PARTS = (
    OthersPart(
        "cudart_static", "13.0.96", "static", "NVIDIA EULA", "nvidia-cuda-runtime", "a" * 64
    ),
    OthersPart("torch-headers", "2.13.0", "header-only", "BSD-3-Clause", "torch"),
)


def make_declared() -> Manifest:
    """Return the wheel's declaration: one kernel for one target."""
    kernel = make_kernel("sm_90a", source="targets/sm_90a/fwd_d64.cu")
    flags = ("-O3", "--compress-mode=size", "-gencode=arch=compute_90a,code=sm_90a")
    project = load_project()
    told = {
        "scripts": project.scripts,
        "entry_points": project.entry_points,
        "licenses": project.licenses,
    }
    return make_manifest("9.0a", kernels=(kernel,), parts=PARTS, flags=flags, files=FILES, **told)


def make_files(
    manifest: Manifest | None = None,
    embedded: Sequence[str] = ("sm_90a",),
    *,
    platform: str = PLATFORM,
) -> dict[str, bytes]:
    """Return the files of the wheel without RECORD; its code may differ from its declaration."""
    manifest = manifest or make_declared()
    images = map(_make_image, map(Arch.parse, embedded))
    needs = ("libc.so.6",)
    files = {
        KERNELS: _library(needs, (), "flash_dist_variants_json", container(*images)),
        BINDING: _library((*needs, *sorted(BINDING_NEEDS)), ("$ORIGIN",)),
        MANIFEST: manifest.to_text().encode(),
        **{f"flash_dist/{name}": b"" for name in manifest.files},
        LICENSE: b"",
        SCRIPTS: ENTRY_POINTS.encode(),
        WHEEL: make_wheel_file(platform),
        METADATA: make_metadata(manifest),
    }
    hashes = {name: hashlib.sha256(files[name]).hexdigest() for name in (KERNELS, BINDING)}
    return {**files, SBOM: make_sbom(manifest, hashes).encode()}


def make_wheel_file(platform: str = PLATFORM) -> bytes:
    """Return the file WHEEL."""
    told = f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-{platform}\n"
    return told.encode()


def make_metadata(manifest: Manifest, *more: str) -> bytes:
    """Return METADATA with additional lines at its end."""
    lines = [
        "Metadata-Version: 2.4",
        "Name: flash_dist",
        f"Version: {VERSION}",
        "Requires-Python: >=3.10",
        *(f"Requires-Dist: {one}" for one in requirements_of(manifest)),
        *(f"Provides-Extra: {one}" for one in EXTRAS),
        *(f"Requires-Dist: {one}" for one in extra_requirements()),
        *more,
    ]
    return "".join(f"{line}\n" for line in lines).encode()


def _make_image(arch: Arch) -> bytes:
    kernel = Kernel(make_kernel(str(arch)).symbol, registers=168, max_threads=(128, 1, 1))
    return entry(SASS, arch.number, cubin(kernel), suffix=arch.suffix, codec="zstd")


def _library(
    needed: tuple[str, ...], path: tuple[str, ...], export: str = "", fatbin: bytes | None = None
) -> bytes:
    parts = (Part(".nv_fatbin", fatbin),) if fatbin else ()
    return make_linked(needed=needed, path=path, exports=(export,) if export else (), parts=parts)


def make_record(files: dict[str, bytes]) -> bytes:
    """Return a RECORD of these files."""
    lines = []
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}\n")
    return "".join([*lines, f"{RECORD},,\n"]).encode()


def write_whole_wheel(
    folder: Path,
    files: dict[str, bytes] | None = None,
    record: bytes | None = None,
    name: str = NAME,
) -> Path:
    """Write the wheel, or one with other files or another RECORD; the same bytes each time."""
    files = make_files() if files is None else files
    record = make_record(files) if record is None else record
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in {**files, RECORD: record}.items():
            archive.writestr(zipfile.ZipInfo(member), data)
    return path
