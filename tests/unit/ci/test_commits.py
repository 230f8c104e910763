"""The rule for subjects of commits, in real repositories and as git's hook."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ci import commits
from ci.commits import (
    BASE,
    LONGEST,
    NotCheckedError,
    check_history,
    check_message,
    find_problem,
    main,
)
from flash_dist.errors import FlashDistError
from flash_dist.toolkit.make.project import ROOT

if TYPE_CHECKING:
    from pathlib import Path

IDENTITY = {
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@example.org",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@example.org",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
}


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True)
    return done.stdout.decode().strip()


def commit(folder: Path, message: str) -> str:
    git(folder, "commit", "--quiet", "--allow-empty", "--no-verify", "--message", message)
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a repository with one commit whose subject breaks the rule: the base of the tests."""
    for name, value in IDENTITY.items():
        monkeypatch.setenv(name, value)
    for name in ("GIT_DIR", "GIT_INDEX_FILE", "GIT_WORK_TREE"):  # a git hook sets them
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "clone"
    git(tmp_path, "init", "--quiet", "--initial-branch=main", str(folder))
    commit(folder, "Fixed stuff.")
    return folder


GOOD = [
    "docs: put the pip line first",
    "decode: launch the combine kernel early (PDL)",
    "select, doctor, build: know GPUs by name",
    "csrc/sm90: load Q once",
    "ci: don't fetch",
    "docs: explain",
    "docs: fix 3.10's wheel (a.b)...x",
    'Revert "docs: put the pip line first"',
    'Reapply "Fixed stuff."',
    f'Revert "docs: {"x" * LONGEST}"',
    "Merge branch 'main' into topic",
    "Merge remote-tracking branch 'origin/main'",
    "docs: " + "x" * (LONGEST - len("docs: ")),
]


@pytest.mark.parametrize("subject", GOOD)
def test_a_good_subject_has_no_problem(subject: str) -> None:
    assert find_problem(subject) is None


BAD = {
    "too long": ("docs: " + "x" * 67, "at most 72 characters, got 73"),
    "no area": ("fix the docs", "`area: imperative` in lower case"),
    "no space": ("docs:fix the links", "`area: imperative` in lower case"),
    "an area in capitals": ("README: fix the links", "`area: imperative` in lower case"),
    "a capital": ("docs: Fix the links", "`area: imperative` in lower case"),
    "nothing behind the area": ("docs: ", "`area: imperative` in lower case"),
    "empty": ("", "`area: imperative` in lower case"),
    "a full stop": ("docs: fix the links.", "no full stop"),
    "-es": ("docs: fixes the links", "the imperative of `fixes` is `fix`"),
    "-ed": ("docs: added links", "the imperative of `added` is `add`"),
    "-ing": ("docs: making links", "the imperative of `making` is `make`"),
    "merged by hand": ("Merge two tables", "`area: imperative` in lower case"),
}


@pytest.mark.parametrize(("subject", "problem"), BAD.values(), ids=BAD)
def test_a_bad_subject_is_shown_with_the_reason(subject: str, problem: str) -> None:
    found = find_problem(subject)
    assert found is not None
    assert problem in found
    assert f"`{subject}`" in found


def test_every_commit_after_the_base_is_checked(clone: Path) -> None:
    base = git(clone, "rev-parse", "HEAD")
    assert list(check_history(clone, base)) == []
    first = commit(clone, "docs: Fixed links")
    commit(clone, "docs: fix links\n\nThe body. Is free.")
    last = commit(clone, "fixup! docs: fix links")
    found = list(check_history(clone, base))
    assert len(found) == 2
    assert found[0].startswith(git(clone, "rev-parse", "--short", last))
    assert "--autosquash" in found[0]
    assert found[1].startswith(git(clone, "rev-parse", "--short", first))


def test_commits_of_a_merged_branch_are_checked_and_the_merge_is_not(clone: Path) -> None:
    base = git(clone, "rev-parse", "HEAD")
    git(clone, "switch", "--quiet", "--create", "topic")
    commit(clone, "a topic")
    git(clone, "switch", "--quiet", "main")
    commit(clone, "docs: fix links")
    git(clone, "merge", "--quiet", "--no-ff", "--message", "All of the topic.", "topic")
    (found,) = check_history(clone, base)
    assert found.endswith("`a topic`")


def test_a_subject_of_two_lines_is_one(clone: Path) -> None:
    base = git(clone, "rev-parse", "HEAD")
    commit(clone, "docs: fix links\nand more")
    assert list(check_history(clone, base)) == []


def test_a_shallow_clone_without_the_base_is_an_error(clone: Path, tmp_path: Path) -> None:
    base = git(clone, "rev-parse", "HEAD")
    commit(clone, "bad")
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{clone}", str(shallow))
    with pytest.raises(NotCheckedError, match=rf"no commit subject was checked.*{base[:12]}"):
        list(check_history(shallow, base))
    git(shallow, "fetch", "--quiet", "--unshallow")
    assert len(list(check_history(shallow, base))) == 1


def test_sources_that_are_no_checkout_are_reported(clone: Path) -> None:
    """The report also comes if the sources are unpacked inside another checkout."""
    unpacked = clone / "unpacked"
    unpacked.mkdir()
    with pytest.raises(NotCheckedError, match=r"no commit subject was checked.*not a git checkout"):
        list(check_history(unpacked))


def test_errors_of_git_are_errors(tmp_path: Path) -> None:
    (tmp_path / ".git").write_text("gitdir: /absent\n")
    with pytest.raises(FlashDistError, match="git cannot read") as caught:
        list(check_history(tmp_path))
    assert not isinstance(caught.value, NotCheckedError)


def test_the_command_ends_with_1_for_a_problem_and_0_where_nothing_was_checked(
    clone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(base: str) -> int:
        monkeypatch.setattr(commits, "check_history", lambda: check_history(clone, base))
        return main([])

    base = git(clone, "rev-parse", "HEAD")
    assert check(base) == 0
    assert capsys.readouterr().err == ""
    assert check(BASE) == 0
    said = capsys.readouterr().err
    assert "no commit subject was checked" in said
    assert said.count("\n") == 1
    commit(clone, "bad")
    assert check(base) == 1
    assert capsys.readouterr().err.startswith("error: ")


MESSAGES = {
    "a body": ("docs: fix links\n\nThe body. Is free.\n", ""),
    "comments": ("# a comment\n\ndocs: fix links\n# Please enter the message\n", ""),
    "fixup": ("fixup! Anything of another subject", ""),
    "amend": ("amend! docs: fix links\n\ndocs: fix links", ""),
    "right in the body alone": ("Fix links\n\ndocs: in the body\n", "`area: imperative`"),
    "two lines": ("docs: fix links\n" + "x" * LONGEST, "at most 72 characters"),
    "nothing": ("# a comment\n", "got ``"),
}


@pytest.mark.parametrize(("message", "problem"), MESSAGES.values(), ids=MESSAGES)
def test_the_subject_of_a_message_is_what_git_takes(
    clone: Path, monkeypatch: pytest.MonkeyPatch, message: str, problem: str
) -> None:
    monkeypatch.chdir(clone)
    file = clone / ".git" / "COMMIT_EDITMSG"
    file.write_text(message)
    found = list(check_message(file))
    assert len(found) == bool(problem)
    assert problem in "".join(found)


def test_as_a_hook_of_git_it_refuses_a_commit(clone: Path) -> None:
    hook = clone / ".git" / "hooks" / "commit-msg"
    hook.parent.mkdir(exist_ok=True)
    run = f'PYTHONPATH="{ROOT}" exec "{sys.executable}" -m ci.commits "$1"'
    hook.write_text(f"#!/bin/sh\n{run}\n")
    hook.chmod(0o755)
    git(clone, "commit", "--quiet", "--allow-empty", "--message", "docs: fix links")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        git(clone, "commit", "--quiet", "--allow-empty", "--message", "Fix links")
    assert b"`area: imperative`" in caught.value.stderr
    assert git(clone, "log", "-1", "--format=%s") == "docs: fix links"
