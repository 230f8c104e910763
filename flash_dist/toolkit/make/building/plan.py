"""Decides the arch set and CUDA toolkit of one wheel before anything is downloaded.

The variable PACKAGE_ARCH_SET names a published set, TORCH_CUDA_ARCH_LIST lists targets. If neither
is set, the wheel is for the GPUs that are visible here, or for the default set of pip if none is
visible.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Final

from ...builds.published import load_archsets, pick_for
from ...errors import ArchError
from ...machine.libcuda import Cuda, Gpu, read_cuda
from ...product import NAME
from ...targets.advice import describe_device
from ...targets.archs import own_targets
from ...targets.devices import driver_supports_toolkit, toolkit_driver
from ...targets.needs import choose_target
from ...targets.verdict import FLOOR, OLDEST
from ..project import ARCHSETS, load_project
from ..toolchain.nvcc import installed_home, named_home, release_of, tool_version
from ..toolchain.preflight import check, read_host
from .binding import require_stable
from .choose import (
    NAMED,
    NATIVE,
    SKIP_UNSUPPORTED,
    VARIABLE,
    choose_sets,
    describe_lacking,
    same_major,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ...targets.archs import ArchSet
    from ..toolchain.preflight import Preflight

OTHERS: Final = f"{VARIABLE} chooses others"


@dataclass(frozen=True)
class BuildPlan:
    """The plan of one wheel: its targets, and the reason for them."""

    toolkit: str  # CUDA release, such as 13.0
    archset: ArchSet
    reason: str
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        targets = ", ".join(map(str, self.archset.archs))
        lines = [f"building for {self.reason}: {targets}", *self.notes]
        return "\n".join(lines)


def make_plan(environ: Mapping[str, str], ask_driver: Callable[[], Cuda] = read_cuda) -> BuildPlan:
    """Choose the toolkit and the arch set.

    Args:
        environ: Variables that may name the toolkit and the arch set.
        ask_driver: Returns the GPUs; called if no variable names targets.

    Raises:
        KernelsError: The targets cannot be built here.
    """
    return choose_targets(environ, find_release(environ), ask_driver)


def check_sources(plan: BuildPlan) -> BuildPlan:
    """Check the sources before anything is compiled, and return the plan with any warning added.

    Raises:
        KernelsError: A file has no target of the set, a target has no file, or a file uses more
            than torch's stable ABI.
    """
    project = load_project()
    project.require_targets(plan.archset)
    sources = (*project.binding, *(one.path for one in project.plain))
    note = require_stable(sources, project.include)
    return replace(plan, notes=(*plan.notes, f"warning: {note}")) if note else plan


@cache
def plan_this_build() -> BuildPlan:
    """Make the plan once per process: the hooks of the backend share it.

    Raises:
        KernelsError: The targets cannot be built here.
    """
    return check_sources(make_plan(os.environ))


def find_release(environ: Mapping[str, str]) -> str:
    """Return the CUDA release of the existing toolkit, else of the toolkit to install."""
    home = named_home(environ) or installed_home()
    return release_of(tool_version(home, "nvcc")) if home else run_preflight(environ).toolkit


def run_preflight(environ: Mapping[str, str]) -> Preflight:
    """Check this machine, and the toolkit in CUDA_HOME."""
    home = named_home(environ)
    own = release_of(tool_version(home, "nvcc")) if home else None
    return check(read_host(environ), cuda_home_version=own)


def choose_targets(
    environ: Mapping[str, str], toolkit: str, ask_driver: Callable[[], Cuda]
) -> BuildPlan:
    """Choose a named arch set, listed targets, those of the GPUs here, or pip's default set."""
    published = load_archsets(ARCHSETS)
    names = environ.get(NAMED, "").split()
    if len(names) > 1:
        message = f"{NAMED} names one arch set of {', '.join(published)}, got `{' '.join(names)}`"
        raise ArchError(message, hint="`nox -s build_wheels` builds several")
    if names or environ.get(VARIABLE, "").strip() not in {"", NATIVE}:
        reason = NAMED if names else VARIABLE
        archset = _choose(names, environ, published, toolkit)
        plain = describe_lacking(archset)
        notes = (f"warning: {plain}",) if plain else ()
        return BuildPlan(toolkit, archset, f"what {reason} says", notes)
    return _choose_for_gpus(ask_driver(), toolkit, published)


def _choose(
    names: list[str], environ: Mapping[str, str], published: Mapping[str, ArchSet], toolkit: str
) -> ArchSet:
    try:
        chosen = choose_sets(names, environ, published, toolkit).sets[0]
    except ArchError as error:
        if SKIP_UNSUPPORTED not in (error.hint or ""):
            raise
        hint = f"remove what it cannot compile from {VARIABLE}"
        raise ArchError(error.message, hint=hint) from error
    if names and not same_major(chosen.toolkit, toolkit):
        message = f"arch set `{chosen.name}` is compiled with CUDA {chosen.toolkit}, not {toolkit}"
        hint = f"`nox -s build_wheels -- {chosen.name}` brings that toolkit; CUDA_HOME may name one"
        raise ArchError(message, hint=hint)
    return chosen


def _choose_for_gpus(cuda: Cuda, toolkit: str, published: Mapping[str, ArchSet]) -> BuildPlan:
    own = own_targets(published.values())
    chosen = {gpu: choose_target(gpu.device, toolkit, own) for gpu in cuda.gpus}
    notes = tuple(_refusal(gpu, toolkit) for gpu, arch in chosen.items() if arch is None)
    archs = sorted({arch for arch in chosen.values() if arch is not None})
    if not archs:
        pick = pick_for("pip", ARCHSETS)
        able = _choose([pick.name], {}, published, toolkit)
        why = f"arch set `{able.name}`, as {_absence(cuda)} ({OTHERS})"
        return BuildPlan(toolkit, able, why, notes)
    able = _choose([], {VARIABLE: " ".join(map(str, archs))}, published, toolkit)
    devices = sorted({gpu.device for gpu, arch in chosen.items() if arch is not None})
    why = f"the GPUs here, {', '.join(map(str, devices))} ({OTHERS})"
    return BuildPlan(toolkit, able, why, (*notes, *_driver_notes(cuda, toolkit)))


def _refusal(gpu: Gpu, toolkit: str) -> str:
    named = describe_device(gpu.device, gpu.name)
    starts = f"{NAME} starts at {FLOOR}"
    why = starts if gpu.device < OLDEST else f"CUDA {toolkit} compiles nothing for it"
    return f"GPU {gpu.index} is left out, {named}: {why}"


def _absence(cuda: Cuda) -> str:
    if cuda.gpus:
        return "nothing can be compiled for the GPUs here"
    broken = cuda.status == "broken"
    return f"the driver does not answer: {cuda.reason}" if broken else "no GPU is here"


def _driver_notes(cuda: Cuda, toolkit: str) -> tuple[str, ...]:
    """Return a warning if the driver here is too old for code of this toolkit."""
    if cuda.driver is None or driver_supports_toolkit(cuda.driver, toolkit):
        return ()
    needed = f"what is built with CUDA {toolkit} needs driver {toolkit_driver(toolkit)} or newer"
    return (f"warning: {needed}, here is {cuda.driver}",)
