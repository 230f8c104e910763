"""Finds the oldest driver and the targets that given GPUs need. Pure functions."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Final

from .archs import DEFAULT_TOOLKIT, TOOLKIT_ARCHS, Arch, ArchSet, unsupported
from .compatibility import Origin, choose_arch, judge
from .devices import DRIVER_CUDA, Device, Driver, last_driver, toolkit_compression
from .verdict import FLOOR, Build, Situation, judge_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


BRANCHES: Final = tuple(sorted(DRIVER_CUDA))


def driver_of(branch: int) -> Driver:
    """Return the driver of a known branch."""
    return Driver(DRIVER_CUDA[branch], str(branch))


def first_branch(serves: Callable[[Driver], bool]) -> int | None:
    """Return the oldest driver branch for which `serves` is true; None if there is none.

    NOTE: this is a binary search. Newer drivers serve everything that older drivers serve, because
    they drop support only for GPUs without builds.
    """
    place = bisect_left(BRANCHES, x=True, key=lambda branch: serves(driver_of(branch)))
    return BRANCHES[place] if place < len(BRANCHES) else None


def serve(
    archset: ArchSet, devices: Iterable[Device], driver: Driver | None = None
) -> list[str] | None:
    """Return the best `how` for each GPU; None unless the set is guaranteed to serve every GPU."""
    origin = Origin(archset.toolkit, None, toolkit_compression(archset.toolkit))
    hows: list[str] = []
    for device in devices:
        verdicts = [judge(arch, device, driver, origin) for arch in archset.archs]
        best = min(verdicts, key=lambda verdict: verdict.rank, default=None)
        if not best:
            return None
        hows.append(best.how)
    return hows


def first_branch_of_set(archset: ArchSet, devices: Sequence[Device]) -> int | None:
    """Return the oldest driver branch with which a set serves all of these GPUs, or None."""
    return first_branch(lambda driver: serve(archset, devices, driver) is not None)


def first_branch_of_build(build: Build, able: Iterable[Situation]) -> int | None:
    """Return the oldest driver branch with which a build serves all of `able`, or None."""
    able = tuple(able)
    return first_branch(
        lambda driver: all(judge_device(build, replace(one, driver=driver)) for one in able)
    )


def last_branch_of(devices: Iterable[Device]) -> int | None:
    """Return the last driver branch that supports all of these GPUs; None if the newest does so."""
    dropped = [one.dropped_by for one in devices if one.dropped_by is not None]
    return last_driver(min(dropped)) if dropped else None


def choose_target(
    device: Device, toolkit: str, own: tuple[Arch, ...], floor: Device = FLOOR
) -> Arch | None:
    """Return the target that serves a GPU best: its own number, with the suffix that kernels need.

    A GPU that is newer than the toolkit gets SASS of the same major, or PTX. Return None if the
    toolkit compiles nothing for the GPU, or if the GPU is older than the kernels support.

    Args:
        device: The GPU.
        toolkit: CUDA version of the compiler.
        own: Targets with a suffix that have kernels of their own.
        floor: The oldest GPU with kernels.
    """
    if device < floor:
        return None
    best = choose_arch(_list_compiled(toolkit, own), device)
    return best[0] if best and best[1] else None


@cache
def _list_compiled(toolkit: str, own: tuple[Arch, ...]) -> tuple[Arch, ...]:
    """Return the targets that a toolkit compiles: plain SASS and PTX, and those in `own`."""
    plain = {arch for archs in TOOLKIT_ARCHS.values() for arch in archs if not arch.suffix}
    every = sorted({*own, *plain} | {replace(arch, ptx=True) for arch in plain})
    refused = unsupported(ArchSet("every", "every", tuple(every)), toolkit)
    return tuple(arch for arch in every if arch not in refused)


def list_targets(
    devices: Iterable[Device], own: tuple[Arch, ...], floor: Device = FLOOR
) -> ArchSet:
    """Return a set for exactly these GPUs, except GPUs for which no target can be compiled.

    Args:
        devices: The GPUs.
        own: Targets with a suffix that have kernels of their own.
        floor: The oldest GPU with kernels.
    """
    found = {choose_target(device, DEFAULT_TOOLKIT, own, floor) for device in devices}
    return ArchSet("list", "list", tuple(sorted(arch for arch in found if arch is not None)))
