"""Chooses the arch set for some GPUs: the smallest of the sets that serve the GPUs best.

Pure functions. `order_of_sets` defines best: the most GPUs served, then the most with SASS, then
the most with native code. A set without a local wheel is judged by its targets, and a wheel by its
manifest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from ..product import PRODUCT
from ..targets.archs import DEFAULT_MACHINE
from ..targets.axes import AXES, KernelKey
from ..targets.compatibility import Origin, order_of_sets
from ..targets.devices import toolkit_compression
from ..targets.needs import driver_of, first_branch
from ..targets.verdict import (
    FLOOR,
    FLOORS,
    HOW_ORDER,
    Build,
    DeviceVerdict,
    Situation,
    Variant,
    judge_device,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from packaging.version import Version

    from ..targets.archs import Arch, ArchSet
    from ..targets.devices import Device, Driver
    from .index import IndexedWheel

_LAST_SURE = HOW_ORDER.index("jit")

# Descriptions of code that serves a GPU worse than the code of the chosen set.
_WORSE = {
    "family": "only code of its family",
    "same-major": "only code of the same major",
    "jit": "only PTX through the JIT",
    "unverified": "no code that is guaranteed to run",
}


@dataclass(frozen=True)
class Candidate:
    """A set that could be installed."""

    name: str  # the name of the arch set, or the label in the wheel's version
    build: Build
    size: int | None = None  # bytes of the wheel; None: unknown
    version: Version | None = None  # None: a set without a wheel
    wheel: IndexedWheel | None = None

    @property
    def archs(self) -> tuple[Arch, ...]:
        """Targets of the set, oldest first."""
        return self.build.archs


@dataclass(frozen=True)
class Judged:
    """A candidate and how it serves each GPU."""

    candidate: Candidate
    verdicts: tuple[DeviceVerdict, ...]
    weight: int = 0  # bytes if all sizes are known, else the number of targets

    def __bool__(self) -> bool:
        return self.rank <= _LAST_SURE

    @property
    def rank(self) -> int:
        """The rank of the GPU that the set serves worst; a lower rank is better."""
        return max((_rank(verdict) for verdict in self.verdicts), default=0)

    def to_json(self) -> dict[str, Any]:
        """Return the candidate as plain data."""
        candidate = self.candidate
        return {
            "name": candidate.name,
            "version": str(candidate.version) if candidate.version else None,
            "targets": [str(arch) for arch in candidate.archs],
            "size": candidate.size,
            "covers": bool(self),
            "gpus": [_verdict_to_json(verdict) for verdict in self.verdicts],
            "wheel": candidate.wheel.to_json() if candidate.wheel else None,
        }


@dataclass(frozen=True)
class Selection:
    """The arch set chosen for some GPUs, and the alternatives."""

    devices: tuple[Device, ...]  # GPUs that some build could serve, each once, oldest first
    driver: Driver | None  # None: unknown, counts as new enough
    candidates: tuple[Judged, ...]  # the chosen set first, then by size; without one, best first
    chosen: Judged | None
    unservable: tuple[Device, ...] = ()  # GPUs older than any build supports
    held_back: Judged | None = None  # the set to use with a newer driver
    needed: int | None = None  # oldest driver branch that loads that set, if known

    def __bool__(self) -> bool:
        return self.chosen is not None and not self.unservable

    @property
    def smaller(self) -> tuple[Judged, ...]:
        """The sets that are smaller than the chosen one; all if none is chosen."""
        if self.chosen is None:
            return self.candidates
        return tuple(one for one in self.candidates[1:] if one.weight < self.chosen.weight)

    @property
    def driver_refusal(self) -> str:
        """The reason why the driver refuses the held-back set; empty if no newer driver helps."""
        verdicts = self.held_back.verdicts if self.held_back is not None else ()
        reasons = (one.reason for one in verdicts if one.cause == "driver-too-old")
        return next(reasons, "")


def _rank(verdict: DeviceVerdict) -> int:
    return HOW_ORDER.index(verdict.how) if verdict else HOW_ORDER.index("none")


def _verdict_to_json(verdict: DeviceVerdict) -> dict[str, Any]:
    return {
        "compute_capability": str(verdict.situation.device),
        "how": verdict.how if verdict else "none",
        "targets": [str(arch) for arch in verdict.targets],
        "cause": verdict.cause or None,
        "reason": verdict.reason or None,
    }


def make_build(name: str, archs: Iterable[Arch], toolkit: str) -> Build:
    """Return a build that stands for a set without a wheel.

    It has one kernel for each target and each combination of words that the target supports.
    """
    origin = Origin(toolkit, None, toolkit_compression(toolkit))
    role, sizes = PRODUCT.main_role, (1,) * len(AXES.sizes)
    variants = tuple(
        Variant(
            "_".join([*words, arch.identifier]),
            role,
            KernelKey(role, words, sizes),
            arch,
            origin=origin,
        )
        for arch in archs
        for words in product(*([word.name for word in axis.words] for axis in AXES.of("equal")))
        if all(FLOORS[word] <= arch.device for word in words)
    )
    return Build(name, variants, toolkit=toolkit)


def candidates_of(
    archsets: Iterable[ArchSet], machine: str = DEFAULT_MACHINE
) -> tuple[Candidate, ...]:
    """Return the published sets for one kind of CPU, as candidates without a wheel."""
    return tuple(
        Candidate(one.name, make_build(one.name, one.archs, one.toolkit), one.wheel_bytes)
        for one in archsets
        if one.machine == machine
    )


def select(
    devices: Iterable[Device], driver: Driver | None, candidates: Sequence[Candidate]
) -> Selection:
    """Choose the newest version with a set for all GPUs, and the best set of that version."""
    distinct = sorted(set(devices))
    wanted = tuple(device for device in distinct if device >= FLOOR)
    unservable = tuple(device for device in distinct if device < FLOOR)
    groups = _by_version(candidates)
    chosen, judged = _choose(wanted, driver, groups)
    if chosen is None:
        ordered = tuple(sorted(judged, key=_preference))
    else:
        others = sorted((one for one in judged if one is not chosen), key=lambda one: one.weight)
        ordered = (chosen, *others)
    selection = Selection(wanted, driver, ordered, chosen, unservable)
    return selection if chosen or driver is None else _add_held_back(selection, groups)


def _choose(
    wanted: Sequence[Device], driver: Driver | None, groups: Sequence[Sequence[Candidate]]
) -> tuple[Judged | None, list[Judged]]:
    """Return the best set of the newest group that has a set for all GPUs, and the whole group.

    If no group has such a set, return None and the newest group.
    """
    situations = [Situation(device, driver) for device in wanted]
    for group in groups if wanted else ():
        judged = _judge(group, situations)
        chosen = min(filter(None, judged), key=_preference, default=None)
        if chosen is not None:
            return chosen, judged
    return None, _judge(groups[0] if groups else [], situations)


def _add_held_back(selection: Selection, groups: Sequence[Sequence[Candidate]]) -> Selection:
    """Add the oldest driver that loads a usable set, and judge that set with the present driver.

    If no known driver loads a usable set, add the best set for an unknown driver.
    """
    wanted = selection.devices
    needed = first_branch(lambda newer: _choose(wanted, newer, groups)[0] is not None)
    served, _ = _choose(wanted, driver_of(needed) if needed else None, groups)
    if served is None:
        return selection
    situations = [Situation(device, selection.driver) for device in wanted]
    (held_back,) = _judge([served.candidate], situations)
    return replace(selection, held_back=held_back, needed=needed)


def _judge(candidates: Sequence[Candidate], situations: Sequence[Situation]) -> list[Judged]:
    sized = all(one.size for one in candidates)
    return [
        Judged(
            one,
            tuple(judge_device(one.build, situation) for situation in situations),
            one.size if sized and one.size else len(one.archs),
        )
        for one in candidates
    ]


def _preference(judged: Judged) -> tuple[tuple[int, int, int], int, int]:
    """Return a sort key: the best first; among equals, the smallest."""
    hows = (one.how if one else "none" for one in judged.verdicts)
    return order_of_sets(hows), judged.weight, len(judged.candidate.archs)


def _by_version(candidates: Sequence[Candidate]) -> list[list[Candidate]]:
    """Group candidates by version, ignoring the arch set: newest first, pre-releases last."""
    groups: dict[tuple[bool, Version] | None, list[Candidate]] = {}
    for one in candidates:
        version = one.version
        key = (not version.is_prerelease, _public(version)) if version else None
        groups.setdefault(key, []).append(one)
    return [groups[key] for key in sorted(groups, key=lambda key: key or (), reverse=True)]


def _public(version: Version) -> Version:
    return type(version)(version.public)


def describe_lack(judged: Judged, chosen: Judged | None) -> str:
    """Describe what a set lacks compared with the chosen one: `no code for 8.6, 12.1`."""
    limits = {one.situation.device: _rank(one) for one in chosen.verdicts} if chosen else {}
    lacks: dict[str, list[str]] = {}
    for verdict in judged.verdicts:
        if _rank(verdict) > min(limits.get(verdict.situation.device, _LAST_SURE), _LAST_SURE):
            lack = _WORSE.get(verdict.how, "no code") if verdict else _refusal(verdict)
            lacks.setdefault(lack, []).append(str(verdict.situation.device))
    return "; ".join(f"{lack} for {', '.join(devices)}" for lack, devices in lacks.items())


def _refusal(verdict: DeviceVerdict) -> str:
    if verdict.cause == "no-matching-code":
        return "code for some dtypes only" if verdict.targets else "no code"
    return verdict.reason
