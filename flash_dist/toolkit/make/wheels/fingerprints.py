"""Check that recorded fingerprints are of the built kernels; choose the fingerprints of a wheel.

python -m PACKAGE.toolkit.make.wheels.fingerprints [--partial] WHEEL ...
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from ...binaries.wheel import open_wheel
from ...builds.contents import LIBRARIES, read_manifest
from ...gpucode.fatbin import open_fatbin
from ...gpucode.kernel_code import hash_kernels
from ...product import NAME
from ...selftest.fingerprints import FILE_NAME, read_references, render_references
from ...targets.compatibility import choose_arch
from ...targets.devices import Device
from ..command import command
from ..project import PACKAGE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from collections.abc import Set as AbstractSet

    from ...builds.manifest import Manifest
    from ...selftest.fingerprints import Reference

RECORDED = PACKAGE / FILE_NAME
REMEDY = "`nox -s fingerprints -- WHEEL` on a machine with such a GPU records them again"


def recordings_of(manifest: Manifest, recorded: Path = RECORDED) -> dict[str, bytes]:
    """Return name and content of a wheel's fingerprint file; empty if the package has none.

    Args:
        manifest: The wheel's manifest.
        recorded: The file with all recordings.
    """
    if not recorded.is_file():
        return {}
    kept = (one for one in read_references(recorded) if _may_fit(one, manifest))
    return {recorded.name: render_references(kept).encode()}


def _may_fit(reference: Reference, manifest: Manifest) -> bool:
    """Tell if a GPU like the recorded one may run the recorded kernels from this wheel.

    A recording of PTX alone is from a wheel without machine code for the GPU.
    """
    targets = {kernel.symbol: kernel.target for kernel in manifest.kernels}
    names = {name.partition(" ")[0] for name in reference.kernels}
    if reference.toolkit != manifest.toolkit.cuda or not targets.keys() >= names:
        return False
    device = Device.parse(reference.setting.compute_capability)
    chosen = choose_arch(manifest.arch_set.archs, device)
    has_machine_code = chosen is not None and not chosen[0].ptx
    return not (has_machine_code and all(targets[name].ptx for name in names))


def find_targets(reference: Reference) -> set[str]:
    """Return the ends of the recorded kernels' names: identifiers of targets, such as `sm90a`."""
    return {name.partition(" ")[0].rpartition("_")[2] for name in reference.kernels}


def find_stale(
    references: Iterable[Reference], kernels: Mapping[str, AbstractSet[str]]
) -> list[str]:
    """Describe the recordings with kernels that are not built, or have other code."""
    problems = []
    for reference in references:
        where = f"{reference.gpu}, recorded {reference.recorded}"
        recorded = reference.kernels.items()
        stale = [name for name, code in recorded if code not in kernels.get(name, ())]
        if stale:
            problems.append(
                f"{where}: {len(stale)} of {len(reference.kernels)} kernels are not built, or "
                f"have other code, such as {stale[0]}"
            )
    return problems


def read_wheels(paths: Iterable[Path]) -> dict[str, set[str]]:
    """Map kernels to the hashes of their code in all wheels; the code differs between toolkits."""
    kernels: defaultdict[str, set[str]] = defaultdict(set)
    for path in paths:
        with open_wheel(path) as wheel:
            for member in LIBRARIES:
                with (
                    wheel.unpacked(member) as file,
                    open_fatbin(member, file, archive=wheel.path) as fatbin,
                ):
                    for name, code in hash_kernels(fatbin).items():
                        kernels[name].add(code)
    return dict(kernels)


def keep_built(
    references: Iterable[Reference], manifests: Iterable[Manifest]
) -> tuple[Reference, ...]:
    """Return the recordings of the CUDA versions and targets in the wheels.

    Print which others are not checked.

    Args:
        references: The recordings.
        manifests: The manifests of the wheels.
    """
    built: defaultdict[str, set[str]] = defaultdict(set)
    published: set[str] = set()
    for manifest in manifests:
        built[manifest.toolkit.cuda].update(arch.identifier for arch in manifest.arch_set.archs)
        published.update(arch.identifier for each in manifest.archsets for arch in each.archs)
    kept = []
    for one in references:
        targets = find_targets(one) & published
        if one.toolkit in built and targets <= built[one.toolkit]:
            kept.append(one)
        else:
            print(
                f"{len(one.fingerprints)} fingerprints not checked: no wheel has "
                f"{', '.join(sorted(targets))} of CUDA {one.toolkit} "
                f"({one.gpu}, recorded {one.recorded})"
            )
    return tuple(kept)


@command
def main() -> int:
    """Check the wheels that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.replace("PACKAGE", NAME))
    parser.add_argument("wheels", type=Path, nargs="+")
    parser.add_argument(
        "--partial", action="store_true", help="skip recordings of code that no wheel has"
    )
    args = parser.parse_args()
    wheels = args.wheels
    references = read_references(RECORDED)
    if args.partial:
        references = keep_built(references, [read_manifest(one) for one in wheels])
    problems = find_stale(references, read_wheels(wheels))
    for problem in problems:
        print(f"stale fingerprints: {problem}; {REMEDY}")
    if not problems:
        count = sum(len(reference.fingerprints) for reference in references)
        print(f"{count} fingerprints of {len(references)} recordings are of the kernels built")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
