"""Which fatbins of a library lack a required target: a fatbin is what one source file became.

A driver takes from each fatbin by itself, so that a library with a target may still have kernels
without it. What is linked on the device is one fatbin; its PTX is in those of its objects. Among
those that nothing registers the library chooses itself: together they count as one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ..binaries.demangle import demangle
from ..targets.compatibility import judge
from ..targets.wording import list_few

if TYPE_CHECKING:
    import re
    from collections.abc import Iterable, Iterator, Sequence

    from ..gpucode.images import FatbinReport
    from ..gpucode.inspection import Inspection
    from ..targets.archs import Arch

_NAMED: Final = 3  # fatbins that one sentence names
_AS_GOOD: Final = ("native", "family")


def serves(arch: Arch, required: Arch) -> bool:
    """Whether code for one target is as good as that for another: sm_100f for 10.0, sm_90a for 9.0.

    SASS of an older minor and PTX are not: they run there, and were not compiled for it.
    """
    if arch == required:
        return True
    if required.suffix or required.ptx or arch.ptx:
        return False
    return judge(arch, required.device).how in _AS_GOOD


def find_missing(
    archs: Iterable[Arch], inspection: Inspection, *, allowed: re.Pattern[str] | None = None
) -> Iterator[str]:
    """Say which required targets are missing, in how many fatbins, and in which.

    Args:
        archs: The required targets.
        inspection: The library.
        allowed: Fatbins of kernels with such names may lack targets.
    """
    groups = _group(inspection.report)
    linked = {number: group for (relocatable, number), group in groups.items() if not relocatable}
    objects = {number: group for (relocatable, number), group in groups.items() if relocatable}
    names = _name_fatbins(inspection)
    for required in archs:
        judged = linked or objects
        lacking = [number for number, group in judged.items() if not _has(group, required)]
        complete = bool(objects) and all(_has(group, required) for group in objects.values())
        if required.ptx and linked and complete:
            continue  # the driver links it anew
        if allowed is not None:
            lacking = [one for one in lacking if not _is_called(names[one], allowed)]
        if lacking and len(lacking) == len(judged):
            yield f"no code for {required}, which is required"
        elif lacking:
            called = [names[one][0] for one in lacking]
            yield (
                f"no code for {required}, which is required, in {len(lacking)} of {len(judged)} "
                f"fatbins: {list_few(called, _NAMED)}"
            )


def _group(report: FatbinReport) -> dict[tuple[bool, int], list[Arch]]:
    """Return the targets of each fatbin that holds code."""
    groups = {
        place: [entry.arch for entry in images if entry.arch is not None]
        for place, images in report.groups().items()
    }
    return {place: archs for place, archs in groups.items() if archs}


def _has(archs: Sequence[Arch], required: Arch) -> bool:
    return any(serves(arch, required) for arch in archs)


def _is_called(names: Iterable[str], pattern: re.Pattern[str]) -> bool:
    return any(pattern.search(name) or pattern.search(demangle(name)) for name in names)


def _name_fatbins(inspection: Inspection) -> dict[int, tuple[str, ...]]:
    """Return what each fatbin can be called by: its source file, its kernels, else its number."""
    names: dict[int, dict[str, None]] = {}
    for entry in inspection.report.entries:
        names.setdefault(entry.container, {})
        if entry.identifier:
            names.setdefault(entry.container, {})[entry.identifier] = None
    for kernel in inspection.kernels or ():
        if kernel.container is not None:
            names.setdefault(kernel.container, {})[kernel.name] = None
    for number in inspection.report.unregistered:
        names[number] = {"those that nothing registers": None}
    return {number: tuple(found) or (f"number {number}",) for number, found in names.items()}
