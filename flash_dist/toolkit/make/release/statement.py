"""Statement on one file of a release: in-toto with SLSA provenance v1.

A statement depends only on the file, `_build.json` and the commit. The signer of a statement
vouches for it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ...audit.signatures import PREDICATE_TYPE
from ...product import SCRIPT

if TYPE_CHECKING:
    from ...builds.manifest import Manifest, Part
    from ...targets.archs import Arch
    from ..wheels.artefacts import Artefact
    from ..wheels.source import Source

_URN: Final = f"urn:{SCRIPT}"
WHEELS: Final = "build-wheels"
BUILDER: Final = f"{_URN}:builder:unattested"


@dataclass(frozen=True)
class Subject:
    """The file that a statement is about."""

    name: str
    sha256: str


def state_wheel(one: Artefact, source: Source | None) -> dict[str, Any]:
    """Return the statement of a wheel.

    Args:
        one: The wheel.
        source: The sources of the wheel; None if unknown.
    """
    parameters, compilers = _describe_build(one.manifest)
    made_of = [*_describe_source(source), *map(_describe_part, one.manifest.parts)]
    return _state(Subject(one.file_name, one.sha256), WHEELS, parameters, compilers, made_of)


def state_file(
    subject: Subject, kind: str, one: Artefact | None, source: Source | None
) -> dict[str, Any]:
    """Return the statement of a channel's file, made from a wheel or from the sources.

    Args:
        subject: The file.
        kind: The name of the channel.
        one: The wheel; None for a file made from the sources alone.
        source: The sources; None if unknown.
    """
    if one is None:
        return _state(subject, kind, {}, {}, _describe_source(source))
    parameters, _ = _describe_build(one.manifest)
    wheel = {"name": one.file_name, "digest": {"sha256": one.sha256}}
    return _state(subject, kind, parameters, {}, [*_describe_source(source), wheel])


def _state(
    subject: Subject,
    kind: str,
    external: dict[str, Any],
    internal: dict[str, Any],
    made_of: list[dict[str, Any]],
) -> dict[str, Any]:
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": subject.name, "digest": {"sha256": subject.sha256}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": f"{_URN}:{kind}:v1",
                "externalParameters": external,
                "internalParameters": internal,
                "resolvedDependencies": made_of,
            },
            "runDetails": {"builder": {"id": BUILDER}},
        },
    }


def _describe_source(source: Source | None) -> list[dict[str, Any]]:
    return [{"name": "source", "digest": {"gitCommit": source.commit}}] if source else []


def _describe_build(manifest: Manifest) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the requested arch set, and the compilers and objects of the build."""
    asked = {"arch_set": manifest.arch_set.name, "archs": str(manifest.arch_set)}
    compilers = {
        "nvcc": manifest.toolkit.nvcc,
        "ptxas": manifest.toolkit.ptxas,
        "host": manifest.host.compiler,
        "glibc": manifest.host.glibc,
    }
    return asked, {"compilers": compilers, "objects": describe_objects(manifest)}


def describe_objects(manifest: Manifest) -> list[dict[str, Any]]:
    """List the object files of GPU code: source, target, nvcc flags and kernels."""
    common = [flag for flag in manifest.flags if not flag.startswith("-gencode")]
    kernels: defaultdict[tuple[str, Arch], list[str]] = defaultdict(list)
    for kernel in manifest.kernels:
        kernels[kernel.source, kernel.target].append(kernel.symbol)
    return [
        {
            "source": source,
            "target": str(target),
            "flags": [*common, target.gencode],
            "kernels": sorted(symbols),
        }
        for (source, target), symbols in sorted(kernels.items())
    ]


def _describe_part(part: Part) -> dict[str, Any]:
    described: dict[str, Any] = {"name": part.name, "annotations": {"version": part.version}}
    if part.package:
        described["uri"] = f"pkg:pypi/{part.package}@{part.version}"
    if part.sha256:
        described["digest"] = {"sha256": part.sha256}
    if not part.package and not part.sha256:
        described["uri"] = f"pkg:generic/{part.name.replace('+', '%2B')}@{part.version}"
    return described
