"""Requirements on a release of any package, and the shortfalls of its libraries.

The check fails closed: no GPU code, an image of unknown format or an unreadable file is a
shortfall.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final

from ..findings.audits import (
    AUDIT_KERNEL_ABSENT,
    AUDIT_KERNEL_NOT_REAL,
    AUDIT_MIN_DRIVER,
    AUDIT_NO_GPU_CODE,
    AUDIT_NOT_UNDERSTOOD,
    AUDIT_TARGET_EXTRA,
    AUDIT_TARGET_MISSING,
    AUDIT_TOO_LARGE,
    AUDIT_UNREAD,
)
from ..findings.result import Finding, label, within
from ..gpucode.coverage import REAL
from ..gpucode.differences import find_differences
from ..gpucode.images import ROCM_WARNING
from ..gpucode.inspection import Choice
from ..targets.compatibility import judge
from ..targets.devices import Device
from ..targets.wording import count, list_few
from .fatbins import find_missing, serves

if TYPE_CHECKING:
    import re
    from collections.abc import Iterable, Iterator, Sequence

    from ..gpucode.archives import Unread
    from ..gpucode.coverage import KernelCoverage
    from ..gpucode.images import FatbinEntry
    from ..gpucode.inspection import Inspection, Level
    from ..targets.archs import Arch
    from ..targets.devices import Driver

OPAQUE: Final = (
    "{} of LTO-IR and no other: it was not judged, because only NVIDIA's linker can read it"
)
_NAMED = 5  # items named in one message; further items are counted


@dataclass(frozen=True)
class Requirements:
    """Requirements on every library with GPU code. By default, it only has to be readable."""

    archs: tuple[Arch, ...] = ()
    forbid_extra: bool = False  # forbid other targets
    kernels: tuple[str, ...] = ()  # parts of names: matching kernels must exist and be real
    no_stubs: re.Pattern[str] | None = None  # kernels whose names match must not be stubs
    max_bytes: int | None = None  # maximum size of the released file
    min_driver: Driver | None = None  # oldest driver that must load every image
    allow_missing: re.Pattern[str] | None = None  # fatbins whose names match may lack targets
    headers_only: bool = False  # judge headers, and open no image
    policies: tuple[tuple[str, Requirements], ...] = ()  # library pattern, requirements

    def of(self, library: str) -> Requirements:
        """Return the requirements of the first policy that matches a library; else `self`."""
        found = (one for pattern, one in self.policies if is_named(library, pattern))
        return next(found, self)

    @property
    def choice(self) -> Choice:
        """The choice of what to read in the libraries."""
        asked = (self, *(one for _, one in self.policies))
        deep = any(one.kernels or one.no_stubs for one in asked)
        level: Level = "coverage" if deep else "targets"
        return Choice(level, checked=not self.headers_only)


def is_named(library: str, pattern: str) -> bool:
    """Tell if a pattern such as `*cuda12*.so` matches a library's path, or its last part."""
    names = (library, PurePosixPath(library).name)
    return any(fnmatchcase(name, pattern) for name in names)


def find_shortfalls(
    requirements: Requirements,
    inspections: Sequence[Inspection],
    unread: Sequence[Unread] = (),
    *,
    size: int | None = None,
) -> tuple[Finding, ...]:
    """Describe where the libraries fall short of the requirements.

    Args:
        requirements: The requirements.
        inspections: The libraries, read as `Requirements.choice` says.
        unread: Files that could not be read.
        size: Bytes of the released file, None for a folder.
    """
    unreadable = (f"{one.name} cannot be read: {one.reason}" for one in unread)
    found = list(label(AUDIT_UNREAD, unreadable))
    coded = [one for one in inspections if one.report.entries]
    if not coded:
        found.append(Finding(AUDIT_NO_GPU_CODE, "no GPU code for NVIDIA inside"))
    for one in inspections:
        # A release may also serve other GPUs. Code for AMD GPUs is not judged here.
        unclear = [text for text in one.warnings if text != ROCM_WARNING]
        if one.opaque and one.opaque == len(one.report.entries):
            unclear.append(OPAQUE.format(count(one.opaque, "image")))
        found += within(one.name, label(AUDIT_NOT_UNDERSTOOD, unclear))
    for one in coded:
        found += within(one.name, _library_shortfalls(requirements.of(one.name), one))
    found += label(AUDIT_KERNEL_ABSENT, _absent_kernels(requirements.kernels, coded))
    if size is not None and requirements.max_bytes is not None and size > requirements.max_bytes:
        sentence = f"the file has {size:,} bytes, allowed are {requirements.max_bytes:,}"
        found.append(Finding(AUDIT_TOO_LARGE, sentence))
    return tuple(found)


def _library_shortfalls(requirements: Requirements, inspection: Inspection) -> Iterator[Finding]:
    missing = find_missing(requirements.archs, inspection, allowed=requirements.allow_missing)
    yield from label(AUDIT_TARGET_MISSING, missing)
    if requirements.forbid_extra:
        for arch in inspection.report.archs:
            if any(serves(arch, required) for required in requirements.archs):
                continue
            yield Finding(AUDIT_TARGET_EXTRA, f"code for {arch}, which is not required")
    if requirements.min_driver is not None:
        entries = inspection.report.entries
        yield from label(AUDIT_MIN_DRIVER, _driver_shortfalls(requirements.min_driver, entries))
    rows = inspection.coverage.rows if inspection.coverage is not None else ()
    yield from label(AUDIT_KERNEL_NOT_REAL, _kernel_shortfalls(requirements, rows))


def _driver_shortfalls(driver: Driver, entries: Iterable[FatbinEntry]) -> Iterator[str]:
    """Say why `driver` cannot run images on the GPUs that the images were compiled for."""
    reasons: dict[str, int] = {}
    for entry in entries:
        if entry.arch is not None:
            home = Device(entry.arch.major, entry.arch.minor)
            verdict = judge(entry.arch, home, driver, entry.origin)
            if not verdict:  # an unknown verdict counts as no
                reasons[verdict.reason] = reasons.get(verdict.reason, 0) + 1
    for reason, images in reasons.items():
        yield f"{reason} ({images} images)" if images > 1 else reason


def _kernel_shortfalls(requirements: Requirements, rows: Sequence[KernelCoverage]) -> Iterator[str]:
    targets = {str(arch) for arch in requirements.archs}
    lacking: dict[str, list[str]] = {}
    for row in rows:
        asked = any(part in row.name for part in requirements.kernels)
        strict = requirements.no_stubs is not None and requirements.no_stubs.search(row.name)
        for target, verdict in row.verdicts.items():
            wanted = not targets or target in targets
            if (asked and wanted and verdict != REAL) or (strict and verdict.startswith("stub")):
                lacking.setdefault(f"{verdict} for {target}", []).append(row.name)
    for what, names in lacking.items():
        yield f"{list_few(names, _NAMED)}: {what}"


def _absent_kernels(kernels: Sequence[str], inspections: Sequence[Inspection]) -> list[str]:
    names = [
        row.name
        for inspection in inspections
        if inspection.coverage is not None
        for row in inspection.coverage.rows
    ]
    return [
        f"no kernel is named like `{part}`, which is required"
        for part in kernels
        if not any(part in name for name in names)
    ]


def find_losses(baseline: Sequence[Inspection], inspections: Sequence[Inspection]) -> list[str]:
    """Name the libraries, targets and kernels of an older release that this release lacks."""
    changes = find_differences(baseline, inspections).changes
    gone = [change for change in changes if change.after is None and change.before]
    lost = [
        f"{change.library}: {change.target or 'GPU code'} was in the baseline and is gone"
        for change in gone
        if change.what in {"library", "target"}
    ]
    whole = {(change.library, change.target) for change in gone if change.what == "target"}
    kernels: dict[tuple[str, str], list[str]] = {}
    for change in gone:
        if change.what == "kernel" and (change.library, change.target) not in whole:
            kernels.setdefault((change.library, change.target), []).append(change.kernel)
    for (library, target), names in kernels.items():
        lost.append(f"{library}: {list_few(names, _NAMED)} for {target}: in the baseline, and gone")
    return lost
