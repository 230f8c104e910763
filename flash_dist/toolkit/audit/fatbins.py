"""Finds the fatbins of a library that lack a required target. One source file gives one fatbin.

A driver chooses code from each fatbin separately, so a library that has a target may contain
kernels without code for this target. A fatbin without kernels lacks nothing. Device linking makes
one fatbin; the PTX stays in the fatbins of the linked objects. Some libraries choose among their
fatbins themselves. Then several fatbins count as one: fatbins that nothing registers, and fatbins
of one target each whose kernel names differ only in the target. A kernel whose compiled name
contains its target twice is meant for that target alone: `fwd_sm90_bf16_sm90a`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Final

from ..binaries.demangle import demangle
from ..targets.compatibility import judge
from ..targets.devices import KNOWN_DEVICES
from ..targets.wording import count, list_few

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from ..gpucode.images import FatbinReport
    from ..gpucode.inspection import Inspection
    from ..targets.archs import Arch
    from ..targets.devices import Device

BY_NAME: Final = (
    "{} one target, which their kernels are named after: those of one kernel count as one, as the "
    "library must choose among them by itself"
)

ALLOWED: Final = "no code for {} in {} of {}, as --allow-missing allows"

_NAMED: Final = 3  # maximum number of fatbins, or of GPUs, named in one message
_AS_GOOD: Final = ("native", "family")


def serves(arch: Arch, required: Arch) -> bool:
    """Return True if code for `arch` can replace code for `required`: sm_90a replaces sm_90.

    `arch` must be compiled for the required compute capability, and run on every GPU that runs code
    for `required`: sm_100a does not replace sm_100, which also runs on 10.3. SASS of an older minor
    version and PTX never replace another target. PTX and suffixed targets cannot be replaced.
    """
    if arch == required:
        return True
    if required.suffix or required.ptx or not _is_compiled_for(arch, required):
        return False
    return not _unserved(arch, required)


def _is_compiled_for(arch: Arch, required: Arch) -> bool:
    return not arch.ptx and judge(arch, required.device).how in _AS_GOOD


def _unserved(arch: Arch, required: Arch) -> tuple[Device, ...]:
    """Return the known GPUs that run code for `required`, but not code for `arch`."""
    served = (device for device in KNOWN_DEVICES if judge(required, device))
    return tuple(device for device in served if not judge(arch, device))


def _describe_narrower(archs: Iterable[Arch], required: Arch) -> str:
    """Say why code that almost matches a requirement does not count; empty without such code."""
    if required.suffix or required.ptx:
        return ""
    for arch in sorted(set(archs)):
        if arch != required and _is_compiled_for(arch, required):
            gpus = list_few([str(device) for device in _unserved(arch, required)], _NAMED)
            return f" ({arch} does not run on compute capability {gpus}, {required} does)"
    return ""


def find_missing(
    archs: Iterable[Arch], inspection: Inspection, *, allowed: re.Pattern[str] | None = None
) -> Iterator[str]:
    """Describe each required target that some or all fatbins lack, and name some of these fatbins.

    Args:
        archs: The required targets.
        inspection: The library.
        allowed: A fatbin may lack targets if one of its names matches this pattern.
    """
    fatbins = _Fatbins.read(inspection)
    names = _name_fatbins(inspection)
    for required in archs:
        lacking = fatbins.lacking(required, fatbins.together)
        if allowed is not None:
            lacking = [one for one in lacking if not _is_called(names[one], allowed)]
        if not fatbins.judged or (lacking and len(lacking) == len(fatbins.with_kernels)):
            why = _describe_narrower(chain.from_iterable(fatbins.judged.values()), required)
            yield f"no code for {required}, which is required{why}"
        elif lacking:
            called = [names[one][0] for one in lacking]
            yield (
                f"no code for {required}, which is required, in {len(lacking)} of "
                f"{len(fatbins.judged)} fatbins: {list_few(called, _NAMED)}"
            )


def describe_allowed(
    archs: Iterable[Arch], inspection: Inspection, allowed: re.Pattern[str]
) -> Iterator[str]:
    """Say how many fatbins lack a required target and are allowed to lack it."""
    fatbins = _Fatbins.read(inspection)
    names = _name_fatbins(inspection)
    for required in archs:
        lacking = fatbins.lacking(required, fatbins.together)
        let_be = sum(_is_called(names[one], allowed) for one in lacking)
        if let_be:
            yield ALLOWED.format(required, let_be, count(len(fatbins.judged), "fatbin"))


def describe_by_name(archs: Sequence[Arch], inspection: Inspection) -> str:
    """Say how many fatbins lack a required target that fatbins of the same kernels have.

    Return an empty text if there are none.
    """
    fatbins = _Fatbins.read(inspection)
    helped = {
        one
        for required in archs
        for one in fatbins.lacking(required, fatbins.judged)
        if _has(fatbins.together[one], required)
    }
    return BY_NAME.format(count(len(helped), "fatbin has", "fatbins have")) if helped else ""


@dataclass(frozen=True)
class _Fatbins:
    """The targets of each fatbin, by the number of its container."""

    judged: Mapping[int, Sequence[Arch]]  # linked fatbins; if there are none, relocatable ones
    with_kernels: Sequence[int]  # fatbins with kernels; all fatbins if no kernel is known
    together: Mapping[int, Sequence[Arch]]  # including targets of fatbins with the same kernels
    complete: Sequence[Sequence[Arch]]  # targets of each object that linked fatbins come from
    bound: AbstractSet[int]  # fatbins whose kernels are meant for their single target

    @classmethod
    def read(cls, inspection: Inspection) -> _Fatbins:
        groups = _group(inspection.report)
        linked = {one: group for (relocatable, one), group in groups.items() if not relocatable}
        objects = {one: group for (relocatable, one), group in groups.items() if relocatable}
        judged = linked or objects
        stems, bound = _find_stems(judged, inspection)
        together = _share_by_name(judged, stems)
        complete = list(objects.values()) if linked else []
        return cls(judged, _find_full(judged, inspection), together, complete, bound)

    def lacking(self, required: Arch, groups: Mapping[int, Sequence[Arch]]) -> list[int]:
        """Return the fatbins with kernels that lack `required`: no target in `groups` serves it.

        A fatbin that is meant for another target is returned only if all fatbins with kernels lack
        `required`. The list is empty if every linked object has the required PTX.
        """
        if required.ptx and self.complete and all(_has(one, required) for one in self.complete):
            return []  # the driver links the PTX of all objects again
        lacking = [one for one in self.with_kernels if not _has(groups[one], required)]
        meant = [one for one in lacking if one not in self.bound]
        return meant if len(lacking) < len(self.with_kernels) else lacking


def _group(report: FatbinReport) -> dict[tuple[bool, int], list[Arch]]:
    """Return the targets of each fatbin with code, keyed by (is relocatable, container number)."""
    groups = {
        place: [entry.arch for entry in images if entry.arch is not None]
        for place, images in report.groups().items()
    }
    return {place: archs for place, archs in groups.items() if archs}


def _has(archs: Iterable[Arch], required: Arch) -> bool:
    return any(serves(arch, required) for arch in archs)


def _find_full(groups: Mapping[int, Sequence[Arch]], inspection: Inspection) -> list[int]:
    """Return the numbers of the fatbins with kernels, or of all if no kernel is known.

    All unregistered fatbins count as one fatbin.
    """
    full = {kernel.container for kernel in inspection.kernels or ()}
    alone = inspection.report.unregistered
    found = [one for one in groups if one in full or (one in alone and not alone.isdisjoint(full))]
    return found or list(groups)


def _share_by_name(
    groups: Mapping[int, Sequence[Arch]], stems: Mapping[int, AbstractSet[str]]
) -> dict[int, Sequence[Arch]]:
    """Return each fatbin's targets, merged with those of fatbins that share a stem with it."""
    homes: defaultdict[str, list[int]] = defaultdict(list)
    for number, found in stems.items():
        for stem in found:
            homes[stem].append(number)
    shared = dict(groups)
    waiting = set(stems)
    while waiting:
        family, reached = set[int](), [waiting.pop()]
        while reached:
            number = reached.pop()
            family.add(number)
            near = {other for stem in stems[number] for other in homes.pop(stem, ())}
            reached += near & waiting
            waiting -= near
        archs = tuple({arch for number in family for arch in groups[number]})
        shared |= dict.fromkeys(family, archs)
    return shared


def _find_stems(
    groups: Mapping[int, Sequence[Arch]], inspection: Inspection
) -> tuple[dict[int, set[str]], set[int]]:
    """Return the stems of each fatbin of one target: its kernel names without the target.

    A fatbin is left out if one of its kernel names does not contain the target. Also return the
    fatbins in which every name contains the target more than once.
    """
    targets = {
        number: set(archs)
        for number, archs in groups.items()
        if number not in inspection.report.unregistered
    }
    alone = {number: archs.pop() for number, archs in targets.items() if len(archs) == 1}
    stems: dict[int, set[str]] = {}
    once: set[int] = set()
    for kernel in inspection.kernels or ():
        number = kernel.container
        if number is None or number not in alone:
            continue
        stem, times = _take_out(alone[number], kernel.name)
        if times == 0:
            del alone[number]
            stems.pop(number, None)
        else:
            stems.setdefault(number, set()).add(stem)
        if times == 1:
            once.add(number)
    return stems, stems.keys() - once


def _take_out(arch: Arch, name: str) -> tuple[str, int]:
    """Return a name without `arch` (`sm90a`, `sm_90`, `compute_90`), and the number of removals.

    NOTE: the name is demangled, because a mangled name has lengths that change with the target.
    """
    suffix = f"{arch.suffix}?" if arch.suffix else ""
    prefix = "(?:sm|compute|ptx)" if arch.ptx else "sm"
    pattern = re.compile(rf"{prefix}_?{arch.number}{suffix}(?![0-9])", re.IGNORECASE)
    if pattern.search(name) is None:
        return name, 0
    return pattern.subn("", demangle(name))


def _is_called(names: Iterable[str], pattern: re.Pattern[str]) -> bool:
    return any(pattern.search(name) or pattern.search(demangle(name)) for name in names)


def _name_fatbins(inspection: Inspection) -> dict[int, tuple[str, ...]]:
    """Return the names of each fatbin: its source files and kernels, or else its number.

    Fatbins that nothing registers have one common name.
    """
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
