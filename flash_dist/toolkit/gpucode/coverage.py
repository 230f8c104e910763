"""Classifies the kernels of a library for each target: real code, or only a stub.

A stub is normal if the library's dispatcher never calls the kernel on that target. So the verdicts
are not findings: they explain an error message or a kernel that silently does nothing. The length
of a body is compared with the kernel's longest body for other targets, because all of them are
compiled from one source.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, Literal

from ..errors import FatbinError, LimitError
from .fatbin import Fatbin, run_ahead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ..targets.archs import Arch
    from .images import FatbinEntry
    from .sass import Body

Verdict = Literal[
    "real",
    "stub:empty",  # compiled out: does nothing, silently
    "stub:printf",  # prints an error such as "was built for another architecture"
    "stub:assert",
    "stub:trap",
    "stub:tiny",  # much shorter than on another target, for an unknown reason
    "missing",  # not in the image, though in other images of its container
    "unknown",  # the image could not be read
]

REAL: Final[Verdict] = "real"
EMPTY_MOST: Final = 4  # a body that does nothing has at most this many instructions
# Only a kernel with more instructions than this on another target gets the verdict "stub:empty".
EMPTY_BESIDE: Final = 16
STUB_MOST: Final = 48  # a body that only reports an error has at most this many instructions
# If other targets have bodies, the longest is longer than a stub by at least these factors.
COMPLAINT_RATIO: Final = 3  # for a body that only reports an error
TINY_RATIO: Final = 16  # for a body with the verdict "stub:tiny"
MAX_CELLS: Final = 1_000_000  # kernels times targets; the largest library seen has 130 000
MAX_WARNINGS: Final = 100


@dataclass(frozen=True)
class KernelCoverage:
    """One kernel of one container, and its verdict on each target of that container."""

    name: str
    container: int
    verdicts: dict[str, Verdict]


@dataclass(frozen=True)
class Coverage:
    """The table of kernels and targets of one library."""

    path: str
    targets: tuple[str, ...]  # oldest first
    rows: tuple[KernelCoverage, ...]
    warnings: tuple[str, ...] = ()  # images that could not be read

    @property
    def counts(self) -> dict[str, dict[Verdict, int]]:
        """Number of kernels, by target and verdict."""
        counts: dict[str, Counter[Verdict]] = {target: Counter() for target in self.targets}
        for row in self.rows:
            for target, verdict in row.verdicts.items():
                counts[target][verdict] += 1
        return {target: dict(sorted(found.items())) for target, found in counts.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the table as plain data."""
        return {
            "path": self.path,
            "targets": list(self.targets),
            "counts": self.counts,
            "kernels": [vars(row) for row in self.rows],
            "warnings": list(self.warnings),
        }


def find_coverage(fatbin: Fatbin) -> Coverage:
    """Unpack all loadable images, one container after the other, and judge each kernel.

    Raises:
        LimitError: The library has more than MAX_CELLS pairs of kernel and target, or the work on
            it exceeds its limit.
    """
    entries = sorted(fatbin.report.select(), key=lambda entry: entry.container)
    rows: list[KernelCoverage] = []
    warnings: list[str] = []
    cells = 0
    with run_ahead(fatbin.payload, entries) as unpacked:
        for number, group in groupby(unpacked, key=lambda pair: pair[0].container):
            container = _read_container(fatbin, group)
            warnings += container.warnings[: MAX_WARNINGS - len(warnings)]
            cells += container.cells
            _check_cells(cells, fatbin)
            rows += (KernelCoverage(name, number, found) for name, found in container.judge())
    targets = tuple(str(arch) for arch in fatbin.report.archs)
    return Coverage(fatbin.report.path, targets, tuple(rows), tuple(warnings))


@dataclass
class _Container:
    """The bodies of one container, by kernel and target."""

    targets: set[Arch] = field(default_factory=set)
    unread: set[Arch] = field(default_factory=set)
    bodies: dict[str, dict[Arch, Body]] = field(default_factory=lambda: defaultdict(dict))
    warnings: list[str] = field(default_factory=list)

    @property
    def cells(self) -> int:
        return len(self.bodies) * len(self.targets)

    def add(self, arch: Arch, bodies: Iterable[Body]) -> None:
        for body in bodies:
            found = self.bodies[body.name]
            if arch not in found or found[arch].instructions < body.instructions:
                found[arch] = body

    def judge(self) -> Iterator[tuple[str, dict[str, Verdict]]]:
        """Yield the kernels with their verdicts, oldest targets first."""
        names = {arch: str(arch) for arch in sorted(self.targets)}
        absent: dict[Arch, Verdict] = dict.fromkeys(names, "missing")
        absent |= dict.fromkeys(self.unread, "unknown")
        for name, bodies in self.bodies.items():
            judged = absent | _judge_kernel(bodies)
            yield name, {names[arch]: verdict for arch, verdict in judged.items()}


def _read_container(
    fatbin: Fatbin, images: Iterable[tuple[FatbinEntry, Callable[[], bytes]]]
) -> _Container:
    container = _Container()
    for entry, unpack in images:
        if entry.arch is None:
            continue
        container.targets.add(entry.arch)
        try:
            container.add(entry.arch, fatbin.bodies(entry, unpack))
        except LimitError:
            raise
        except FatbinError as error:
            container.unread.add(entry.arch)
            container.warnings.append(error.message)
        _check_cells(container.cells, fatbin)
    return container


def _check_cells(cells: int, fatbin: Fatbin) -> None:
    if cells > MAX_CELLS:
        message = f"`{fatbin.report.path}` holds more than {MAX_CELLS} kernel-target pairs"
        raise LimitError(message)


def _judge_kernel(bodies: dict[Arch, Body]) -> dict[Arch, Verdict]:
    """Judge all bodies of one kernel."""
    lengths = [body.instructions for body in bodies.values()]
    if min(lengths) > STUB_MOST and TINY_RATIO * min(lengths) > max(lengths):
        return dict.fromkeys(bodies, REAL)  # long and of similar length: no rule applies
    return {arch: _judge(arch, bodies) for arch in bodies}


def _judge(arch: Arch, bodies: dict[Arch, Body]) -> Verdict:
    """Compare a body with the kernel's other bodies of its type, SASS or PTX, if there are any."""
    others = {other: body.instructions for other, body in bodies.items() if other != arch}
    peers = [length for other, length in others.items() if other.ptx == arch.ptx]
    if not peers:
        return _judge_alone(bodies[arch], max(others.values(), default=0))
    return _judge_beside(bodies[arch], max(peers))


def _judge_beside(body: Body, big: int) -> Verdict:
    length = body.instructions
    nothing = _does_nothing(body) and big > EMPTY_BESIDE
    if nothing or (length <= STUB_MOST and big >= COMPLAINT_RATIO * length + EMPTY_BESIDE):
        complaint = _complaint(body)
        if complaint is not None:
            return complaint
    if nothing:
        return "stub:empty"
    return "stub:tiny" if big >= TINY_RATIO * max(length, 1) else "real"


def _judge_alone(body: Body, big: int) -> Verdict:
    """Judge a kernel's only SASS or only PTX body: SASS and PTX lengths are not comparable."""
    if body.instructions <= STUB_MOST and not body.uses_memory:
        complaint = _complaint(body)
        if complaint is not None:
            return complaint
    return "stub:empty" if _does_nothing(body) and big > STUB_MOST else "real"


def _does_nothing(body: Body) -> bool:
    return body.counted and not body.calls and body.instructions <= EMPTY_MOST


def _complaint(body: Body) -> Verdict | None:
    if body.prints:
        return "stub:printf"
    if body.asserts:
        return "stub:assert"
    return "stub:trap" if body.traps else None
