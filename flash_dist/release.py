"""One release held against requirements: a wheel of this package, or anybody's files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .archives import Unread
from .audit import AuditResult, audit_wheel
from .contents import MANIFEST
from .inspection import Choice, Inspection, inspect_library, sizes_by_target
from .libraries import open_libraries
from .requirements import Requirements, find_losses, find_shortfalls
from .wheel import open_wheel

if TYPE_CHECKING:
    from .archs import Arch
    from .inspection import Level


@dataclass(frozen=True)
class Release:
    """What was audited, and where it falls short."""

    path: str
    inspections: tuple[Inspection, ...]
    problems: tuple[str, ...]
    own: AuditResult | None = None  # of a wheel of this package, with all problems

    def __bool__(self) -> bool:
        return not self.problems

    @property
    def archs(self) -> tuple[Arch, ...]:
        """The targets of all libraries, old to new."""
        return tuple(sorted({arch for one in self.inspections for arch in one.report.archs}))

    def to_json(self) -> dict[str, Any]:
        """Return the audit as plain data."""
        if self.own is not None:
            return self.own.to_json()
        return {
            "version": 1,
            "passed": bool(self),
            "path": self.path,
            "libraries": [
                {
                    "path": one.name,
                    "archs": [str(arch) for arch in one.report.archs],
                    "sizes": {
                        name: size._asdict() for name, size in sizes_by_target(one.report).items()
                    },
                }
                for one in self.inspections
            ],
            "problems": list(self.problems),
        }


def audit_release(
    path: Path, requirements: Requirements, *, baseline: str | None = None
) -> Release:
    """Hold a file or folder against requirements.

    Args:
        path: A wheel, library or folder.
        requirements: What it must hold.
        baseline: An older release, none of whose targets and kernels may be gone.

    Raises:
        FlashDistError: The path, or the baseline, cannot be read at all.
    """
    size = path.stat().st_size if path.is_file() else None
    inspections, unread = read_release(path, requirements.level)
    problems = list(find_shortfalls(requirements, inspections, unread, size=size))
    if baseline is not None:
        old, _ = read_release(Path(baseline), "kernels")
        new, _ = read_release(path, "kernels")
        problems += find_losses(old, new)
    if not is_own_wheel(path):
        return Release(str(path), inspections, tuple(problems))
    result = audit_wheel(path)
    problems = list(dict.fromkeys((*result.problems, *problems)))
    own = replace(result, problems=tuple(problems))
    return Release(str(path), inspections, tuple(problems), own)


def read_release(path: Path, level: Level) -> tuple[tuple[Inspection, ...], tuple[Unread, ...]]:
    """Read the libraries of a file or folder; what cannot be read is kept apart."""
    inspections: list[Inspection] = []
    unread: list[Unread] = []
    choice = Choice(level)
    for found in open_libraries(path):
        if isinstance(found, Unread):
            unread.append(found)
        else:
            inspections.append(inspect_library(found.name, found.archive, found.fatbin, choice))
    return tuple(inspections), tuple(unread)


def is_own_wheel(path: Path) -> bool:
    """Whether a path is a wheel of this package, by its name or by its manifest."""
    if path.suffix != ".whl" or not path.is_file():
        return False
    if path.name.startswith("flash_dist-"):
        return True
    with open_wheel(path) as wheel:
        return MANIFEST in wheel.names
