"""Compares a release with requirements: a wheel of this package, or files of any other package."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from ..binaries.wheel import open_wheel
from ..builds.contents import find_naming
from ..findings.audits import AUDIT_EMBEDDED_DIFFERS, AUDIT_LOST
from ..findings.result import Finding, label, within
from ..gpucode.images import ROCM_WARNING, UNITS, UNREGISTERED
from ..gpucode.inspection import Choice, Inspection, inspect_libraries, sizes_by_target
from ..gpucode.libraries import open_libraries
from ..product import NAME
from ..targets.wording import count
from .fatbins import describe_allowed, describe_by_name
from .own import AuditResult, audit_wheel
from .requirements import Requirements, find_losses, find_shortfalls, is_named

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ..targets.archs import Arch


RENAMED: Final = "{} of which the header says {} and the image {}: judged as what it is itself"


@dataclass(frozen=True)
class Release:
    """An audited release and its shortfalls."""

    path: str
    inspections: tuple[Inspection, ...]
    problems: tuple[Finding, ...]
    own: AuditResult | None = None  # audit of a wheel that this toolkit built, with all problems
    requirements: Requirements = field(default_factory=Requirements)

    def __bool__(self) -> bool:
        return not self.problems

    @property
    def headers_only(self) -> bool:
        """Tell if no image was opened."""
        return self.own is None and self.requirements.headers_only

    @property
    def archs(self) -> tuple[Arch, ...]:
        """The targets of all libraries, oldest first."""
        return tuple(sorted({arch for one in self.inspections for arch in one.report.archs}))

    @property
    def for_rocm(self) -> tuple[str, ...]:
        """The libraries with code for AMD GPUs, which the audit does not judge."""
        return tuple(one.name for one in self.inspections if ROCM_WARNING in one.warnings)

    @property
    def opaque(self) -> int:
        """The number of images that hold LTO-IR, which only NVIDIA's linker can read."""
        return sum(one.opaque for one in self.inspections)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Remarks that are not problems, but limit what the verdict covers."""
        names = [one.name for one in self.inspections]
        unused = (
            f"no library is named like `{pattern}`, which has its own table"
            for pattern, _ in self.requirements.policies
            if not any(is_named(name, pattern) for name in names)
        )
        limits = (f"{one.name}: {text}" for one in self.inspections for text in self._limits(one))
        return (*limits, *unused)

    def _limits(self, inspection: Inspection) -> Iterator[str]:
        unregistered = len(inspection.report.unregistered)
        if unregistered:
            yield UNREGISTERED.format(count(unregistered, *UNITS))
        yield from describe_renamed(inspection)
        asked = self.requirements.of(inspection.name)
        by_name = describe_by_name(asked.archs, inspection)
        if by_name:
            yield by_name
        if asked.allow_missing is not None:
            yield from describe_allowed(asked.archs, inspection, asked.allow_missing)

    def to_json(self) -> dict[str, Any]:
        """Return the audit as plain data."""
        if self.own is not None:
            return self.own.to_json()
        return {
            "version": 1,
            "passed": bool(self),
            "path": self.path,
            "headers_only": self.headers_only,
            "warnings": list(self.warnings),
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
            "problems": [str(problem) for problem in self.problems],
            "findings": [problem.to_json() for problem in self.problems],
        }


def audit_release(
    path: Path, requirements: Requirements, *, baseline: str | None = None
) -> Release:
    """Compare a file or folder with requirements.

    Args:
        path: A wheel, library or folder.
        requirements: The requirements on the release.
        baseline: An older release. All its targets and kernels must still be there.

    Raises:
        KernelsError: The path or the baseline cannot be read.
    """
    size = path.stat().st_size if path.is_file() else None
    inspections, unread = inspect_libraries(open_libraries(path), requirements.choice)
    problems = list(find_shortfalls(requirements, inspections, unread, size=size))
    if baseline is not None:
        kernels = Choice("kernels")
        old, _ = inspect_libraries(open_libraries(baseline), kernels)
        new = inspections
        if requirements.headers_only:
            new, _ = inspect_libraries(open_libraries(path), kernels)
        problems += label(AUDIT_LOST, find_losses(old, new))
    if not is_own_wheel(path):
        return Release(
            str(path),
            tuple(inspections),
            tuple(problems),
            requirements=requirements,
        )
    result = audit_wheel(path)
    for one in inspections:
        problems += within(one.name, label(AUDIT_EMBEDDED_DIFFERS, describe_renamed(one)))
    problems = list(dict.fromkeys((*result.problems, *problems)))
    own = replace(result, problems=tuple(problems))
    return Release(str(path), tuple(inspections), tuple(problems), own)


def describe_renamed(inspection: Inspection) -> Iterator[str]:
    """Describe images whose code is for another target than their headers say."""
    for (header, image), number in inspection.renamed.items():
        yield RENAMED.format(count(number, "image"), header, image)


def is_own_wheel(path: Path) -> bool:
    """Return True if the names in a wheel show that a toolkit like this one built it.

    A file that is named like a wheel of this package counts, whatever it holds.
    """
    if path.suffix != ".whl" or not path.is_file():
        return False
    if path.name.startswith(f"{NAME}-"):
        return True
    with open_wheel(path) as wheel:
        return find_naming(wheel.names) is not None
