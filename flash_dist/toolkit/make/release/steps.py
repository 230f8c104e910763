"""Runs the steps of a release, and resumes after an earlier run was killed.

`dist/release.json` records each complete step with the SHA-256 of every file that it made. A step
is skipped if its request, the files of the steps before it and its own files are unchanged. A step
that was killed is not recorded, so it is repeated.

SIGKILL ends a release, but not the processes that it has started. The environment variable
named by MARK identifies them, and a release does not start while one of them is running.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...errors import KernelsError
from ...product import VARIABLES
from ...targets.wording import count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

RECORD: Final = "release.json"
VERSION: Final = 1
MARK: Final = f"{VARIABLES}RELEASE_DIST"  # marks the processes of a release; the value is its dist/


class StepError(KernelsError):
    """A step ended without an error, and made no file; or another release is running."""


@dataclass(frozen=True)
class Step:
    """A step of a release.

    Args:
        name: Name of its session in nox.
        made: Patterns of the files in dist/ that it makes; empty for a step that only checks.
        asked: Everything else that its result depends on.
    """

    name: str
    made: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()


def walk(dist: Path, basis: str, steps: Iterable[Step], run: Callable[[Step], None]) -> list[str]:
    """Run the steps that are not complete, in their order.

    Args:
        dist: Folder of the files that the steps make.
        basis: A text that all steps depend on, such as the commit.
        steps: All steps of the release.
        run: Runs one step. An error ends the release.

    Returns:
        The names of the skipped steps.

    Raises:
        StepError: A step made none of its files, or processes of another release that writes to
            this folder are running.
    """
    with _marked(dist):
        return _walk(dist, basis, steps, run)


def find_running(dist: Path) -> dict[int, str]:
    """Return the other processes of a release that writes to `dist`: command lines by PID."""
    mark = os.fsencode(f"{MARK}={dist.resolve()}")
    running = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or belongs to another user
            if mark in (process / "environ").read_bytes().split(b"\0"):
                words = (process / "cmdline").read_bytes().strip(b"\0").split(b"\0")
                running[int(process.name)] = os.fsdecode(b" ".join(words))
    running.pop(os.getpid(), None)
    return running


@contextmanager
def _marked(dist: Path) -> Iterator[None]:
    """Mark processes that are started within the context as part of this release.

    Raises:
        StepError: Processes of another release that writes to this folder are running.
    """
    running = find_running(dist)
    if running:
        shown = ", ".join(f"{pid} `{line}`" for pid, line in list(running.items())[:3])
        number = count(len(running), "process", "processes")
        message = f"another release into `{dist}` is still running: {number}, such as {shown}"
        pids = " ".join(map(str, running))
        raise StepError(message, hint=f"wait until it ends, or `kill {pids}`; then start again")
    os.environ[MARK] = str(dist.resolve())
    try:
        yield
    finally:
        del os.environ[MARK]


def _walk(dist: Path, basis: str, steps: Iterable[Step], run: Callable[[Step], None]) -> list[str]:
    recorded, skipped = _read(dist), []
    for step in steps:
        asked = _digest([basis, step.name, step.asked])
        made = hash_files(dist, step.made)
        if recorded.get(step.name) == {"asked": asked, "made": made}:
            skipped.append(step.name)
        else:
            run(step)
            made = hash_files(dist, step.made)
            if step.made and not made:
                message = f"`{step.name}` made no file {' or '.join(step.made)} in `{dist}`"
                raise StepError(message, hint=f"`nox -s {step.name}` shows what it does")
            recorded[step.name] = {"asked": asked, "made": made}
            _write(dist, recorded)
        basis = _digest([asked, made])
    return skipped


def hash_files(dist: Path, patterns: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of each file in `dist` that matches a pattern, by relative path."""
    paths = {path for pattern in patterns for path in dist.glob(pattern) if path.is_file()}
    return {
        path.relative_to(dist).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(paths)
    }


def _digest(data: object) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def _read(dist: Path) -> dict[str, Any]:
    """Return the recorded steps by name; empty if the record is absent, unreadable or old."""
    try:
        data: Mapping[str, Any] = json.loads((dist / RECORD).read_text(encoding="utf-8"))
        return dict(data["steps"]) if data["version"] == VERSION else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _write(dist: Path, steps: Mapping[str, Any]) -> None:
    dist.mkdir(exist_ok=True)
    work = dist / f"{RECORD}.part"
    text = json.dumps({"version": VERSION, "steps": steps}, indent=1, sort_keys=True)
    work.write_text(f"{text}\n", encoding="utf-8")
    work.replace(dist / RECORD)
