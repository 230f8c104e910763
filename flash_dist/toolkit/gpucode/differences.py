"""Compares two sets of libraries: targets, kernels with their resources, and sizes."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from .inspection import NOTHING, Inspection, Size, sizes_by_target

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from .cubin import KernelInfo

What = Literal["library", "target", "kernel", "resource"]

RESOURCES: Final = (
    *("registers", "static_smem", "stack", "code_size", "max_threads"),
    *("constant", "local"),
)


@dataclass(frozen=True)
class Change:
    """An addition (before is None), a removal (after is None) or a changed number.

    For a library or target the number is 1. For a kernel it is the number of kernels with this name
    and target, for a resource the sum of its values over these kernels.
    """

    what: What
    library: str
    target: str = ""
    kernel: str = ""
    resource: str = ""
    before: int | None = None
    after: int | None = None


@dataclass(frozen=True)
class SizeChange:
    """The sizes of a target's images in all libraries together, before and after."""

    target: str
    before: Size
    after: Size

    def to_json(self) -> dict[str, Any]:
        """Return the sizes as plain data."""
        return {
            "target": self.target,
            "before": self.before._asdict(),
            "after": self.after._asdict(),
        }


@dataclass(frozen=True)
class Differences:
    """All changes, and the sizes of every target."""

    changes: tuple[Change, ...]
    sizes: tuple[SizeChange, ...]

    def __bool__(self) -> bool:
        """Tell if the embedded code differs; sizes alone do not count."""
        return bool(self.changes)

    def of(self, what: What) -> tuple[Change, ...]:
        """Return the changes of one kind."""
        return tuple(change for change in self.changes if change.what == what)

    def to_json(self) -> dict[str, Any]:
        """Return the differences as plain data."""
        return {
            "changes": [vars(change) for change in self.changes],
            "sizes": [size.to_json() for size in self.sizes],
        }


def find_differences(before: Sequence[Inspection], after: Sequence[Inspection]) -> Differences:
    """Compare libraries of the same name. If each side has one library, names do not matter."""
    old, new = _by_name(before), _by_name(after)
    if len(old) == len(new) == 1:
        new = {next(iter(old)): next(iter(new.values()))}
    changes: list[Change] = []
    for name in dict.fromkeys((*old, *new)):
        if name not in old or name not in new:
            was, is_now = (1 if name in one else None for one in (old, new))
            changes.append(Change("library", name, before=was, after=is_now))
        changes += _compare(name, old.get(name), new.get(name))
    first, second = _sum_sizes(before), _sum_sizes(after)
    targets = dict.fromkeys((*first, *second))
    sizes = [SizeChange(one, first.get(one, NOTHING), second.get(one, NOTHING)) for one in targets]
    return Differences(tuple(changes), tuple(sizes))


def _by_name(inspections: Iterable[Inspection]) -> dict[str, Inspection]:
    """Return the libraries with GPU code by name."""
    return {one.name: one for one in inspections if one.report.entries}


def _compare(name: str, old: Inspection | None, new: Inspection | None) -> Iterator[Change]:
    targets = [{} if one is None else sizes_by_target(one.report) for one in (old, new)]
    for target in sorted(targets[0].keys() ^ targets[1].keys()):
        was, is_now = (1 if target in one else None for one in targets)
        yield Change("target", name, target, before=was, after=is_now)
    first, second = _kernels_of(old), _kernels_of(new)
    for key in sorted(first.keys() | second.keys()):
        yield from _compare_kernel(name, key, first.get(key, []), second.get(key, []))


def _kernels_of(inspection: Inspection | None) -> Mapping[tuple[str, str], list[KernelInfo]]:
    """Return the kernels by name and target; several kernels may share both."""
    found: defaultdict[tuple[str, str], list[KernelInfo]] = defaultdict(list)
    for kernel in (inspection.kernels or ()) if inspection is not None else ():
        found[kernel.name, str(kernel.arch)].append(kernel)
    return found


def _compare_kernel(
    library: str, key: tuple[str, str], old: list[KernelInfo], new: list[KernelInfo]
) -> Iterator[Change]:
    kernel, target = key
    place = {"library": library, "kernel": kernel, "target": target}
    if len(old) != len(new):
        yield Change("kernel", **place, before=len(old) or None, after=len(new) or None)
        return
    for resource in RESOURCES:
        a, b = ([getattr(one, resource) for one in kernels] for kernels in (old, new))
        if Counter(a) != Counter(b):
            yield Change("resource", **place, resource=resource, before=_sum(a), after=_sum(b))


def _sum(values: Iterable[int | None]) -> int | None:
    """Return the sum of the known values; None if no value is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _sum_sizes(inspections: Iterable[Inspection]) -> dict[str, Size]:
    sums: dict[str, Size] = {}
    for inspection in inspections:
        for name, size in sizes_by_target(inspection.report).items():
            sums[name] = sums.get(name, NOTHING).plus(size)
    return sums
