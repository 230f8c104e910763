"""Check that recorded fingerprints belong to the current plans of the host code.

python -m ci.dry_run.check

The check needs torch and g++, but no GPU: a dry run computes the plans.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from ci.dry_run.plans import find_plans
from flash_dist.toolkit.builds.published import load_archsets
from flash_dist.toolkit.make.command import command
from flash_dist.toolkit.make.project import ARCHSETS
from flash_dist.toolkit.make.wheels.fingerprints import RECORDED, REMEDY, find_targets
from flash_dist.toolkit.selftest.fingerprints import hash_code, read_references
from flash_dist.toolkit.targets.wording import list_few

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from flash_dist.toolkit.selftest.fingerprints import Reference, Setting
    from flash_dist.toolkit.selftest.report import CasePlan
    from flash_dist.toolkit.targets.archs import Arch

    Plans = Mapping[str, CasePlan]

SHOWN: Final = 5


def find_changed(reference: Reference, plans: Plans) -> list[str]:
    """List the cases whose recorded plan or kernels differ from the current ones."""
    return [
        one.case
        for one in reference.fingerprints
        if (plan := plans.get(one.case)) is None
        or (one.plan, one.code) != (plan.digest, hash_code(plan.kernels, reference.kernels))
    ]


def find_unrecorded(reference: Reference, plans: Plans) -> list[str]:
    """List the selftest cases without a recorded fingerprint, which the selftest cannot compare."""
    return sorted(plans.keys() - {one.case for one in reference.fingerprints})


def find_archs(reference: Reference) -> tuple[Arch, ...]:
    """Return the targets of the recorded kernels."""
    known = {arch for one in load_archsets(ARCHSETS).values() for arch in one.archs}
    targets = find_targets(reference)
    return tuple(sorted(arch for arch in known if arch.identifier in targets))


def describe(reference: Reference) -> str:
    """Return the GPU, the compiler and the date of a recording."""
    drivers = sorted({one.driver for one in reference.fingerprints} - {""})
    compiled = f"driver {drivers[0]}" if drivers else f"CUDA {reference.toolkit}"
    return f"{reference.gpu}, {compiled}, recorded {reference.recorded}"


def check(references: Iterable[Reference]) -> Iterator[str]:
    """Yield a sentence for each recording whose cases now have other plans.

    Print the recordings that lack a case.
    """
    known: dict[tuple[Setting, tuple[Arch, ...]], Plans] = {}
    for reference in references:
        asked = reference.setting, find_archs(reference)
        if asked not in known:
            known[asked] = find_plans(*asked)
        changed = find_changed(reference, known[asked])
        if changed:
            yield f"{describe(reference)}: {len(changed)} cases have another plan: {_few(changed)}"
        missing = find_unrecorded(reference, known[asked])
        if missing:
            print(f"{describe(reference)}: {len(missing)} cases not recorded: {_few(missing)}")


def _few(cases: list[str]) -> str:
    return list_few([f"`{case}`" for case in cases], SHOWN)


@command
def main() -> int:
    """Check the recordings in the package."""
    references = read_references(RECORDED)
    problems = list(check(references))
    for problem in problems:
        print(f"stale fingerprints: {problem}; {REMEDY}")
    if not problems:
        count = sum(len(reference.fingerprints) for reference in references)
        print(f"{count} fingerprints of {len(references)} recordings have the plans of this source")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
