"""What is stated of one wheel: an in-toto statement with SLSA provenance v1, unsigned.

Everything in it is from `_build.json` and the source; who signs it vouches for it.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ci.artefacts import Artefact
    from ci.source import Source
    from flash_dist.archs import Arch
    from flash_dist.manifest import Manifest, Part

BUILD_TYPE: Final = "urn:flash-dist:build-wheels:v1"
BUILDER: Final = "urn:flash-dist:builder:unattested"


def make_statement(one: Artefact, source: Source | None) -> dict[str, Any]:
    """Return the statement of a wheel.

    Args:
        one: The wheel.
        source: What it was built from; None where that is not known.
    """
    manifest = one.manifest
    commit = [{"name": "source", "digest": {"gitCommit": source.commit}}] if source else []
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": one.file_name, "digest": {"sha256": one.sha256}}],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {
                    "arch_set": manifest.arch_set.name,
                    "archs": str(manifest.arch_set),
                },
                "internalParameters": {
                    "compilers": {
                        "nvcc": manifest.toolkit.nvcc,
                        "ptxas": manifest.toolkit.ptxas,
                        "host": manifest.host.compiler,
                        "glibc": manifest.host.glibc,
                    },
                    "objects": describe_objects(manifest),
                },
                "resolvedDependencies": [*commit, *map(_describe_part, manifest.parts)],
            },
            "runDetails": {"builder": {"id": BUILDER}},
        },
    }


def describe_objects(manifest: Manifest) -> list[dict[str, Any]]:
    """List the object files of GPU code: source, target, nvcc flags and the kernels in it."""
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
