"""Checks that this tree, and the wheels in dist/, can be released: `nox -s release`.

python -m PACKAGE.toolkit.make.release.release tree       before anything is built
python -m PACKAGE.toolkit.make.release.release wheels     when all are built
python -m PACKAGE.toolkit.make.release.release publish    print the remaining steps
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...audit.own import audit_wheel, describe_failure
from ...audit.signatures import envelope_of
from ...builds.listing import FILE_NAME
from ...builds.published import published_sets
from ...errors import KernelsError
from ...product import NAME, PROGRAM
from ...targets.wording import format_size
from ..command import command
from ..container.engine import find_engine
from ..project import EMBEDDED, ROOT, load_project
from ..wheels.artefacts import PYPI, Artefact, find_artefacts, require_sound
from ..wheels.gates import require_archs, require_fresh
from ..wheels.platform_tags import (
    MANYLINUX,
    platform_of,
    require_glibc,
    require_platform,
    require_same_tags,
)
from ..wheels.source import Source, ask_git, read_source
from .manifest import SUMS, require_source
from .signing import VARIABLE, find_signers
from .toolkit_wheel import FOLDER as TOOLKIT_FOLDER
from .toolkit_wheel import require_version

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ...targets.archs import ArchSet

_HEADING: Final = re.compile(r"^## (?P<version>\S+), (?P<date>.+)$", re.MULTILINE)
_DATE: Final = re.compile(r"20\d\d-\d\d-\d\d")


class ReleaseError(KernelsError):
    """This tree, or the wheels in dist/, cannot be released."""


def require_tree(root: Path, version: str) -> str:
    """Check that the tree is committed and the version is dated and new; return the commit.

    Raises:
        ReleaseError: The tree is not committed, or the version is not dated or not new.
        SourceError: The folder is not a clone.
    """
    changed = ask_git(root, "status", "--porcelain").splitlines()
    if changed:
        message = f"{len(changed)} files are not committed, such as {changed[0][3:]}"
        raise ReleaseError(message, hint="a release is made of a commit; `git status` lists them")
    require_changelog((root / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    commit = ask_git(root, "rev-parse", "HEAD")
    tagged = ask_git(
        root, "for-each-ref", f"refs/tags/v{version}", "--format=%(*objectname)%(objectname)"
    )
    if tagged and not tagged.startswith(commit):
        message = f"{version} is released: the tag v{version} is of commit {tagged[:12]}"
        raise ReleaseError(message, hint="raise `version` in pyproject.toml")
    return commit


def require_changelog(text: str, version: str) -> None:
    """Check that the newest changelog entry is of this version and has a date."""
    entries = [(match["version"], match["date"]) for match in _HEADING.finditer(text)]
    newest, date = entries[0] if entries else ("nothing", "")
    if newest != version:
        released = dict(entries).get(version)
        is_old = f", and {version} was released on {released}" if released else ""
        message = f"pyproject.toml says {version}, the newest of CHANGELOG.md is {newest}{is_old}"
        raise ReleaseError(message, hint="raise `version` in pyproject.toml, or add its entry")
    if _DATE.fullmatch(date) is None:
        message = (
            f"CHANGELOG.md says `{version}, {date}`, a release has a date: `{version}, 2026-12-31`"
        )
        raise ReleaseError(message, hint="write the day of the release there and commit")


def require_engine(environ: Mapping[str, str]) -> str:
    """Return the container engine; raise if there is none, as native wheels are not released."""
    engine = find_engine(environ)
    if engine is None:
        message = "no container engine answers, and natively built wheels are not released"
        hint = f"start podman or docker: a release serves {MANYLINUX}, not this machine alone"
        raise ReleaseError(message, hint=hint)
    return engine


def find_problems(
    artefacts: Sequence[Artefact], sets: Sequence[ArchSet], version: str, source: Source | None
) -> Iterator[str]:
    """Yield the reasons why these wheels are not a release.

    Args:
        artefacts: The wheels.
        sets: The published sets: there must be exactly one wheel of each.
        version: Version of the release.
        source: The commit that the wheels must be built from; None: any.
    """
    built = [one.set_name for one in artefacts]
    for archset in sets:
        count = built.count(archset.name)
        if count != 1:
            yield f"there are {count} wheels of the set `{archset.name}`, not one"
    by_name = {archset.name: archset for archset in sets}
    for one in artefacts:
        if one.set_name not in by_name:
            yield f"{one.file_name} is of `{one.set_name}`, which is not published"
            continue
        try:
            _require_wheel(one, by_name[one.set_name], version, source)
        except KernelsError as error:
            yield error.message


def _require_wheel(one: Artefact, archset: ArchSet, version: str, source: Source | None) -> None:
    require_platform(one.path, platform_of(archset.machine))
    require_same_tags(one.path)
    if one.version.public != version:
        message = f"{one.file_name} is of version {one.version.public}, released is {version}"
        raise ReleaseError(message)
    if one.manifest.toolkit.cuda != archset.toolkit:
        built = one.manifest.toolkit.cuda
        message = f"{one.file_name} is built with CUDA {built}, its set asks for {archset.toolkit}"
        raise ReleaseError(message)
    result = audit_wheel(one.path, budget_bytes=archset.budget_bytes)
    if not result:
        raise ReleaseError(describe_failure(result))
    require_archs(result, archset)
    require_sound(one)
    if source is not None:
        require_fresh(one.path, one.manifest)
        require_source(one, source)


def describe_publishing(
    version: str, commit: str, dist: Path, url: str, keyids: Sequence[str] = ()
) -> str:
    """List the steps that a person must do to publish the release."""
    tag = f"git tag -a v{version} -m '{NAME} {version}' {commit[:12]}"
    proof = f"{PROGRAM} verify --manifest {FILE_NAME}{' --key public.json' if keyids else ''}"
    envelope = f", {envelope_of(dist / FILE_NAME).name}" if keyids else ""
    signed = f"signed by {', '.join(one[:12] for one in keyids)}" if keyids else "not signed"
    sign = f"sign: `{VARIABLE}=KEY nox -s release` again, which goes on at the manifest"
    steps = [
        *([] if keyids else [sign]),
        f"copy index/ to {url or 'your server of files'}",
        f"put {FILE_NAME}{envelope}, {SUMS} and provenance/ beside it",
        f"twine upload {PYPI}/*.whl" + (f" {TOOLKIT_FOLDER}/*.whl" if EMBEDDED else ""),
        f"{tag} && git push origin v{version}",
        f"download a file as users do, on another machine: `{proof} FILE`",
    ]
    lines = [f"release {version} of commit {commit[:12]} is ready in {dist}, {signed}"]
    lines += [f"  {number}. {step}" for number, step in enumerate(steps, 1)]
    lines.append(
        "On GitHub the tag alone builds, attests and publishes: .github/workflows/release.yml"
    )
    return "\n".join(lines)


def read_keyids(dist: Path) -> list[str]:
    """Return the ids of the keys that have signed the manifest."""
    envelope = envelope_of(dist / FILE_NAME)
    if not envelope.is_file():
        return []
    return [one["keyid"] for one in json.loads(envelope.read_text("utf-8"))["signatures"]]


def check_tree(args: argparse.Namespace, version: str) -> None:
    """Reject a tree that cannot be released, and a machine that cannot build it."""
    if args.tag not in {"", f"v{version}"}:
        message = f"the tag is `{args.tag}`, that of version {version} is `v{version}`"
        raise ReleaseError(message, hint="raise `version` in pyproject.toml, or move the tag")
    commit = require_tree(ROOT, version)
    is_built = args.no_build or args.check
    how = "wheels are built elsewhere" if is_built else f"built by {require_engine(os.environ)}"
    if EMBEDDED:
        require_version(version)
    keys = ", ".join(one.public_key.keyid[:12] for one in find_signers())
    signed = f"signed by {keys}" if keys else f"not signed: {VARIABLE} names no key"
    print(f"release {version} of commit {commit[:12]}, {how}, {signed}")


def check_wheels(args: argparse.Namespace, version: str) -> None:
    """Reject wheels that are not exactly those of this release."""
    artefacts = find_artefacts(args.dist)
    problems = list(find_problems(artefacts, published_sets(), version, read_source()))
    if problems:
        told = "\n".join(f"  {problem}" for problem in problems)
        message = f"the wheels in `{args.dist}` are not release {version}:\n{told}"
        raise ReleaseError(message, hint="`nox -s build_wheels` in a container builds them")
    for one in artefacts:
        require_glibc(one.path)
        print(f"{one.set_name}: {one.file_name}, {format_size(one.size)}")


def tell_publishing(args: argparse.Namespace, version: str) -> None:
    """Print the steps that a person must do to publish the release."""
    missing = [name for name in ("index", PYPI, FILE_NAME, SUMS) if not (args.dist / name).exists()]
    if missing:
        message = f"`{args.dist}` lacks {', '.join(missing)}"
        raise ReleaseError(message, hint="`nox -s index pypi manifest` makes them")
    keyids = read_keyids(args.dist)
    print(describe_publishing(version, read_source().commit, args.dist, args.url, keyids))


STAGES: Final = {"tree": check_tree, "wheels": check_wheels, "publish": tell_publishing}


def make_parser() -> argparse.ArgumentParser:
    """Return the parser for the name of a stage and the session's options."""
    parser = argparse.ArgumentParser(prog="nox -s release --", description="Make a release.")
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--no-build", action="store_true", help="the wheels in dist/ are those")
    parser.add_argument("--check", action="store_true", help="judge the tree and go no further")
    parser.add_argument("--tag", default="", help="the tag that is released must be this version's")
    parser.add_argument("--url", default="", help="where the index will be served from")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of the wheels")
    return parser


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    args = make_parser().parse_args(arguments)
    STAGES[args.stage](args, load_project().version)
    return 0


if __name__ == "__main__":
    sys.exit(main())
