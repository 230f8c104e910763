"""Checks that a wheel or conda package is the released file and holds what it declares.

The checks fail closed: an unreadable part is a failure.

RECORD and the bill of materials are inside the wheel, so whoever changes the wheel can change them
too. Only a manifest from another source can prove that the wheel is unchanged.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ..binaries.files import hash_file, open_file, unreadable
from ..binaries.wheel import open_wheel
from ..builds.archive_layout import list_names, read_members
from ..builds.conda_package import find_path_damage, open_conda
from ..builds.contents import OWN, find_naming, read_contents, read_manifest_in
from ..builds.manifest import declare_build
from ..builds.record import find_damage, hash_member
from ..builds.sbom import bill_name, find_differences
from ..errors import KernelsError, hint_to_build
from ..findings.result import EXIT_FINDINGS, EXIT_FINE, EXIT_NOTHING_CHECKED, CheckResult
from ..findings.verifications import (
    VERIFY_ARCHIVE,
    VERIFY_AUDIT,
    VERIFY_CHECKSUM,
    VERIFY_FOREIGN_FILE,
    VERIFY_METADATA,
    VERIFY_NOT_LISTED,
    VERIFY_PACKAGE,
    VERIFY_RECORD,
    VERIFY_SBOM_DIFFERS,
    VERIFY_SBOM_MISSING,
    VERIFY_UNREAD,
)
from ..product import PROGRAM
from ..targets.wording import count, few_lines
from .conda import find_foreign_claims, find_foreign_members
from .files import INSTALLER, find_foreign_kinds, find_foreign_names
from .identity import find_contradictions
from .own import audit_contents
from .ownership import name_other_project

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from ..builds.conda_package import CondaContents
    from ..builds.listing import Listing
    from ..findings.entry import Entry
    from .signatures import SignedRelease

JSON_VERSION: Final = 1
_SHOWN: Final = 10
_BUILD_AGAIN: Final = hint_to_build(
    "build it again with `nox -s build_wheels`", "do not install it; download it again"
)
_SILENT: Final = (".tar.gz", ".pyz")  # files of a release that list no contents


@dataclass(frozen=True)
class Verification:
    """Result of verifying one file of a release."""

    path: str
    sha256: str  # empty: unreadable
    listing: Listing | None  # None: no manifest was given
    results: tuple[CheckResult, ...]

    def __bool__(self) -> bool:
        return all(self.results) and any(result.status == "ok" for result in self.results)

    @property
    def exit_code(self) -> int:
        """Return 0 for a success, 1 for a failure, 3 if nothing could be checked."""
        if self:
            return EXIT_FINE
        return EXIT_NOTHING_CHECKED if all(self.results) else EXIT_FINDINGS

    def to_json(self) -> dict[str, Any]:
        """Return the verification as plain data."""
        return {
            "version": JSON_VERSION,
            "command": "verify",
            "passed": bool(self),
            "exit_code": self.exit_code,
            "path": self.path,
            "sha256": self.sha256 or None,
            "manifest": self.listing.source if self.listing else None,
            "checks": [result.to_json() for result in self.results],
        }


def verify_wheel(
    path: Path, listing: Listing | None = None, signed: SignedRelease | None = None
) -> Verification:
    """Check a file of a release; an unreadable part is a failed check.

    Args:
        path: The file.
        listing: The manifest of its release.
        signed: The same manifest, if its signature must prove the file.
    """
    listing = signed.listing if signed else listing
    try:
        sha256, size = _hash_file(path)
    except KernelsError as error:
        return Verification(str(path), "", listing, (_unread("file", error),))
    listed = replace(check_listing(path.name, sha256, size, listing), name="manifest")
    proofs = signed.check(path, sha256) if signed else ()
    results = (listed, *proofs, *_choose_checks(path)(path))
    return Verification(str(path), sha256, listing, results)


def _choose_checks(path: Path) -> Callable[[Path], tuple[CheckResult, ...]]:
    if other := name_other_project(path):
        return partial(_skip_other, other)
    if path.name.endswith(_SILENT):
        return _skip_contents
    return _check_conda if path.suffix == ".conda" else _check_wheel


def _skip_contents(path: Path) -> tuple[CheckResult, ...]:
    summary = f"a {path.name[path.name.rindex('.') :]} has no list of its own to compare with"
    return (CheckResult("skip", f"{summary}: only a manifest can check it", name="contents"),)


def _skip_other(project: str, path: Path) -> tuple[CheckResult, ...]:
    summary = f"it is of {project:.60} and has no record of its build that it could be held against"
    fix = f"`{PROGRAM} audit {shlex.quote(str(path))}` judges the release of any project"
    return (CheckResult("skip", summary, fix=fix, name="contents"),)


def _check_wheel(path: Path) -> tuple[CheckResult, ...]:
    return (
        _guard("archive", check_archive, path),
        _guard("files", check_files, path),
        *_check_contents(path),
    )


def _check_contents(path: Path) -> tuple[CheckResult, ...]:
    return (
        _guard("record", check_record, path),
        _guard("metadata", check_metadata, path),
        _guard("audit", check_audit, path),
        _guard("sbom", check_sbom, path),
    )


def _check_conda(path: Path) -> tuple[CheckResult, ...]:
    """Check a conda package, then the wheel inside."""
    try:
        with open_conda(path) as package:
            paths = replace(check_paths(package), name="paths")
            files = _guard("files", partial(check_files, more=(INSTALLER,)), package.wheel)
            told = _guard("package", partial(check_package, package), path)
            archive = _guard("archive", check_conda_archive, path)
            return (archive, paths, told, files, *_check_contents(package.wheel))
    except KernelsError as error:
        return (_unread("paths", error),)


def _hash_file(path: Path) -> tuple[str, int]:
    if path.is_dir():
        raise unreadable(str(path), "it is a folder", hint="pass the wheels in it")
    with open_file(path) as file:
        return hash_file(file).hex(), file.tell()


def _guard(name: str, check: Callable[[Path], CheckResult], path: Path) -> CheckResult:
    try:
        return replace(check(path), name=name)
    except KernelsError as error:
        return _unread(name, error)


def _unread(name: str, error: KernelsError) -> CheckResult:
    return CheckResult("fail", error.message, fix=error.hint or "", entry=VERIFY_UNREAD, name=name)


def _fail(summary: str, problems: Sequence[str], entry: Entry) -> CheckResult:
    fix = "do not install it; download it again"
    return CheckResult("fail", summary, few_lines(problems, _SHOWN), fix, entry)


def check_listing(name: str, sha256: str, size: int, listing: Listing | None) -> CheckResult:
    """Check that a release lists a file with this name, hash and size; skip without a listing."""
    if listing is None:
        summary = "not compared with a release: no manifest was named"
        return CheckResult("skip", summary, data={"sha256": sha256})
    listed = listing.files.get(name)
    if listed is None:
        return CheckResult(
            "fail",
            f"`{listing.source}` lists no file {name}",
            (f"it lists {', '.join(sorted(listing.files)) or 'none'}",),
            "name the manifest of the release that the wheel is of",
            VERIFY_NOT_LISTED,
        )
    if (listed.sha256, listed.size) != (sha256, size):
        return CheckResult(
            "fail",
            "the file is not the one that was released",
            (
                f"this file  {sha256}, {size} bytes",
                f"released   {listed.sha256}, {listed.size} bytes",
            ),
            "do not install it; download it again from the index of the release",
            VERIFY_CHECKSUM,
        )
    return CheckResult("ok", f"SHA-256 {sha256}, as released")


def check_paths(package: CondaContents) -> CheckResult:
    """Check that a conda package holds exactly what its paths.json lists, in `site-packages/`."""
    damage = list(find_path_damage(package))
    if damage:
        return _fail("files of the conda package differ from its paths.json", damage, VERIFY_RECORD)
    return CheckResult("ok", f"{len(package.files)} files are those that paths.json lists")


def check_archive(path: Path) -> CheckResult:
    """Check that each byte of a wheel belongs to one regular file, so that all readers agree."""
    with open_file(path) as file:
        members, problems = read_members(file)
    problems = (*problems, *find_foreign_kinds(members))
    if problems:
        return _fail("the archive does not match its list of members", problems, VERIFY_ARCHIVE)
    return CheckResult("ok", "every byte belongs to one of its regular files")


def check_files(path: Path, *, more: Sequence[str] = ()) -> CheckResult:
    """Check that a wheel holds exactly a dist-info and the files that its build lists."""
    with open_wheel(path) as wheel, open_file(path) as file:
        manifest = read_manifest_in(wheel)
        names = {*wheel.names, *list_names(file)}  # Wheel omits folders, zipfile cuts names at NUL
        foreign = list(find_foreign_names(names, manifest, more=more))
    if foreign:
        summary = "the wheel holds files that are not of this package, or lacks some"
        return _fail(summary, foreign, VERIFY_FOREIGN_FILE)
    libraries = count(len(manifest.libraries), "library", "libraries")
    listed = f"{len(manifest.files)} modules and data that _build.json lists"
    summary = f"{listed}, {libraries}, a dist-info"
    return CheckResult("ok", f"{summary}: no file more, none less")


def check_metadata(path: Path) -> CheckResult:
    """Check that a wheel's file name, METADATA, WHEEL and _build.json agree."""
    with open_wheel(path) as wheel:
        contradictions = list(find_contradictions(wheel, path.name))
    if contradictions:
        summary = "file name, METADATA, WHEEL and _build.json disagree"
        return _fail(summary, contradictions, VERIFY_METADATA)
    return CheckResult("ok", "file name, METADATA, WHEEL and _build.json agree")


def check_conda_archive(path: Path) -> CheckResult:
    """Check that a conda package holds only regular files, and that each byte belongs to a file."""
    problems = list(find_foreign_members(path))
    if problems:
        summary = "the archives of the conda package hold more than files"
        return _fail(summary, problems, VERIFY_ARCHIVE)
    return CheckResult("ok", "every byte belongs to one of its regular files")


def check_package(package: CondaContents, path: Path) -> CheckResult:
    """Check that the metadata of a conda package follows from its wheel."""
    claims = list(find_foreign_claims(package, path.name))
    if claims:
        summary = "the conda package says more than follows from its wheel"
        return _fail(summary, claims, VERIFY_PACKAGE)
    depends = ", ".join(map(str, package.index["depends"]))
    return CheckResult("ok", f"it is named and depends as its wheel does: {depends}")


def check_record(path: Path) -> CheckResult:
    """Check that a wheel holds exactly the files that RECORD lists, with their hashes and sizes."""
    with open_wheel(path) as wheel:
        damage = list(find_damage(wheel))
        files = len(wheel.names)
    if damage:
        return _fail("files of the wheel differ from its RECORD", damage, VERIFY_RECORD)
    return CheckResult("ok", f"{files} files are those that RECORD lists")


def check_audit(path: Path) -> CheckResult:
    """Check that a wheel passes the audit: its code and libraries are as its manifest declares."""
    contents = read_contents(path)
    result = audit_contents(contents)
    if not result:
        return CheckResult(
            "fail",
            "the code in the wheel differs from its _build.json",
            few_lines([f"{problem} ({problem.id})" for problem in result.problems], _SHOWN),
            f"`{PROGRAM} audit {shlex.quote(str(path))}` lists everything",
            VERIFY_AUDIT,
            data={"findings": [problem.to_json() for problem in result.problems]},
        )
    targets = ", ".join(map(str, contents.manifest.arch_set.archs))
    counts = declare_build(contents.manifest).counts
    summary = f"{counts} for {targets} are what _build.json declares"
    return CheckResult("ok", summary)


def check_sbom(path: Path) -> CheckResult:
    """Check that a wheel holds a bill of materials that matches its libraries and manifest."""
    with open_wheel(path) as wheel:
        manifest, naming = read_manifest_in(wheel), find_naming(wheel.names) or OWN
        bill = bill_name(naming.name)
        bills = [name for name in wheel.names if name.endswith(f".dist-info/sboms/{bill}")]
        if len(bills) != 1:
            summary = f"the wheel holds {len(bills)} bills of materials ({bill}), not one"
            return CheckResult("fail", summary, fix=_BUILD_AGAIN, entry=VERIFY_SBOM_MISSING)
        text = wheel.read(bills[0]).decode("utf-8", "backslashreplace")
        libraries = {*wheel.libraries, *naming.members(manifest)}
        files = {name: hash_member(wheel, name) for name in sorted(libraries)}
    differences = list(find_differences(text, manifest, files))
    if differences:
        summary = "the bill of materials does not match this wheel"
        details = few_lines(differences, _SHOWN)
        return CheckResult("fail", summary, details, _BUILD_AGAIN, VERIFY_SBOM_DIFFERS)
    parts = ", ".join(f"{one.name} {one.version}" for one in manifest.parts)
    held = count(len(files), "library", "libraries")
    return CheckResult("ok", f"{held} and what is in them: {parts}")
