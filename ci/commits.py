"""Check the subjects of commits: `area: imperative`, at most 72 characters, no full stop.

`python -m ci.commits` checks every commit after BASE, for `nox -s lint`.
`python -m ci.commits FILE` checks one message, for the commit-msg hook of .pre-commit-config.yaml.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from flash_dist.errors import FlashDistError
from flash_dist.toolkit.make.command import command, complain
from flash_dist.toolkit.make.project import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# The check starts after this commit. After a push of a commit with a bad subject, set BASE to that
# commit.
BASE: Final = "783aee84cf37d8489e3569cdc2ac5b21111020b7"
LONGEST: Final = 72
EXAMPLE: Final = "docs: put the pip line first"

_SUBJECT: Final = re.compile(r"[a-z0-9][a-z0-9_./, ()-]*: (?P<verb>[a-z]\S*)(?: .*)?")
_WRITTEN_BY_GIT: Final = re.compile(r"""(?:Revert|Reapply) "|Merge [a-z -]+ '""")
_TO_BE_SQUASHED: Final = ("fixup! ", "squash! ", "amend! ")
_VERBS: Final = (
    *("add", "allow", "change", "check", "drop", "fix", "improve"),
    *("make", "move", "remove", "rename", "replace", "update", "use"),
)
# Other forms of the verbs: adds, added, adding, dropped, used. The table also has misspelt forms
# (`droped`), which are harmless.
_IMPERATIVE_OF: Final = {"made": "make"} | {
    f"{stem}{ending}": verb
    for verb in _VERBS
    for stem in (verb, verb.removesuffix("e"), f"{verb}{verb[-1]}")
    for ending in ("s", "es", "ed", "ing")
}


class NotCheckedError(FlashDistError):
    """The history cannot be checked: no git checkout, or a clone without the base."""


def find_problem(subject: str) -> str | None:
    """Return a sentence about what is wrong with a subject; None if the subject is good."""
    if _WRITTEN_BY_GIT.match(subject):
        return None
    if len(subject) > LONGEST:
        return f"a subject has at most {LONGEST} characters, got {len(subject)}: `{subject}`"
    match = _SUBJECT.fullmatch(subject)
    if match is None:
        return f"a subject is `area: imperative` in lower case (`{EXAMPLE}`), got `{subject}`"
    if subject.endswith("."):
        return f"a subject has no full stop, got `{subject}`"
    imperative = _IMPERATIVE_OF.get(match["verb"])
    if imperative:
        return f"the imperative of `{match['verb']}` is `{imperative}`, got `{subject}`"
    return None


def check_message(path: Path) -> Iterator[str]:
    """Yield what is wrong with the message in a file; accept subjects such as `fixup! ...`."""
    with path.open("rb") as file:
        done = subprocess.run(
            ["git", "stripspace", "--strip-comments"], stdin=file, capture_output=True, check=True
        )
    paragraph, _, _ = done.stdout.decode(errors="replace").strip().partition("\n\n")
    subject = " ".join(paragraph.splitlines())  # like `git log --format=%s`
    problem = None if subject.startswith(_TO_BE_SQUASHED) else find_problem(subject)
    if problem:
        yield problem


def check_history(root: Path = ROOT, base: str = BASE) -> Iterator[str]:
    """Yield the problems of the commits after a base; merge commits may have any subject.

    Raises:
        NotCheckedError: The folder is not a git checkout, or the checkout lacks the base.
    """
    if not (root / ".git").exists():
        message = f"no commit subject was checked: `{root}` is not a git checkout"
        raise NotCheckedError(message)
    if base not in _git(root, "rev-list", "--ignore-missing", "--max-count=1", base):
        message = (
            f"no commit subject was checked: this clone does not hold commit {base[:12]} "
            "(`git fetch --unshallow` completes a shallow clone)"
        )
        raise NotCheckedError(message)
    words = ("--no-merges", "--no-show-signature", "--format=%h %s", f"{base}..HEAD")
    for line in _git(root, "log", *words).splitlines():
        commit, _, subject = line.partition(" ")
        if subject.startswith(_TO_BE_SQUASHED):
            yield f"{commit}: `git rebase --autosquash` must squash `{subject}`"
            continue
        problem = find_problem(subject)
        if problem:
            yield f"{commit}: {problem}"


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, check=False)
    if done.returncode:
        message = f"git cannot read `{root}`: {done.stderr.decode(errors='replace').strip()}"
        raise FlashDistError(message)
    return done.stdout.decode(errors="replace")


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m ci.commits", description="Check subjects.")
    parser.add_argument("message", nargs="?", type=Path, help="file of one message; default: all")
    args = parser.parse_args(arguments)
    try:
        problems = list(check_message(args.message) if args.message else check_history())
    except NotCheckedError as reason:
        print(reason, file=sys.stderr)
        return 0
    for problem in problems:
        complain(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
