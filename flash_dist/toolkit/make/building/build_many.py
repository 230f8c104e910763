"""Builds arch sets one after the other; a failure of one does not stop the others."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...builds.published import load_archsets
from ...errors import KernelsError, explain_os_error
from ...targets.wording import format_size
from ..command import command, complain
from ..declared.sets import describe_gaps
from ..project import ARCHSETS, ROOT
from ..wheels.platform_tags import describe_floor
from .choose import VARIABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ...targets.archs import ArchSet


@dataclass(frozen=True)
class BuiltWheel:
    """A wheel that was built."""

    archset: ArchSet
    path: Path
    objects: str  # "K kernels in V variants for T targets; N objects compiled, M reused"
    seconds: float

    def __str__(self) -> str:
        size = format_size(self.path.stat().st_size)
        name = self.path.relative_to(ROOT)
        return f"{self.archset.name}: {self.objects}; {size} in {self.seconds:.0f} s: {name}"


@dataclass(frozen=True)
class FailedSet:
    """A set whose build failed."""

    archset: ArchSet
    reason: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.archset.name}: failed after {self.seconds:.0f} s: {self.reason}"


@dataclass(frozen=True)
class Builds:
    """The results of building several sets."""

    built: tuple[BuiltWheel, ...]
    failed: tuple[FailedSet, ...] = ()

    def __bool__(self) -> bool:
        return not self.failed

    def __str__(self) -> str:
        lines = [*map(str, self.built), *map(str, self.failed)]
        if self.failed:
            count = len(self.built)
            again = name_build([one.archset for one in self.failed])
            lines.append(f"{count} of {count + len(self.failed)} wheels are built")
            lines.append(f"\nhint: `{again}` tries the rest again; objects stay")
        return "\n".join(lines)


def name_build(sets: Sequence[ArchSet]) -> str:
    """Return the command that builds published sets by name, or another set by its targets."""
    session, published = sets[0].session, load_archsets(ARCHSETS)
    if any(one.name not in published for one in sets):
        return f"{VARIABLE}='{sets[0]}' nox -s {session}"
    return f"nox -s {session} -- {' '.join(one.name for one in sets)}"


def build_each(sets: Sequence[ArchSet], build: Callable[[ArchSet], BuiltWheel]) -> Builds:
    """Build every set, even if another fails; announce each, with an estimate of the time left."""
    built: list[BuiltWheel] = []
    failed: list[FailedSet] = []
    begin = time.monotonic()
    for number, one in enumerate(sets, 1):
        left = estimate_left(sets, number - 1, time.monotonic() - begin)
        print(f"\n== set {number} of {len(sets)}{left}: {one.name}: {one}", flush=True)
        start = time.monotonic()
        try:
            built.append(build(one))
        except (KernelsError, OSError) as error:
            told = explain_os_error(error) if isinstance(error, OSError) else error
            complain(f"{one.name}: {told}")
            failed.append(FailedSet(one, told.message, time.monotonic() - start))
    return Builds(tuple(built), tuple(failed))


def estimate_left(sets: Sequence[ArchSet], done: int, seconds: float) -> str:
    """Return a text with the estimated time left; empty before the first set is done.

    A target is compiled for its first set only: later sets reuse the objects.
    """
    seen: set[object] = set()
    counts = []
    for one in sets:
        counts.append(1 + len(set(one.archs) - seen))  # packing and auditing count as one target
        seen.update(one.archs)
    if not done:
        return ""
    left = seconds * sum(counts[done:]) / sum(counts[:done])
    return f", about {left / 60:.0f} min left" if left >= 90 else f", about {left:.0f} s left"  # noqa: PLR2004


@command
def report(build: Callable[[Sequence[str]], Builds]) -> int:
    """Build the sets that the command line chooses, and report the results."""
    for gap in describe_gaps(ARCHSETS):
        print(
            f"warning: `nox -s index` will refuse these sets: {gap}\n", file=sys.stderr, flush=True
        )
    builds = build(sys.argv[1:])
    print(f"\n{builds}")
    if builds.built:
        print(describe_floor([one.path.name for one in builds.built]))
    return 0 if builds else 1
