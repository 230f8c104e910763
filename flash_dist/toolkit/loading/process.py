"""Runs code that may crash, abort or hang in a child process, and reports how it ended.

The child appends one JSON object per line to a report file, so that its progress is known if it
dies. The child ends when its parent ends in any way: torchrun and Kubernetes stop processes by
SIGTERM and SIGKILL, and a child in a separate session would keep using the GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from ..product import NAME

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

_log = logging.getLogger(__name__)

Event = dict[str, Any]
Ending = Literal["done", "exit", "signal", "timeout", "not-started"]

POLL: Final = 0.02  # seconds between two polls of a child

PR_SET_PDEATHSIG = 1  # prctl(2)
_OUTPUT_LINES = 12
_OUTPUT_BYTES = 64 * 1024
_REPORT_BYTES = 64 * 1024  # free bytes that a temporary folder needs


@dataclass(frozen=True)
class Outcome:
    """How a child process ended, and its report until then."""

    ending: Ending
    detail: str = ""  # "status 3", "SIGABRT", "after 600 s", "`/tmp`: No space left on device"
    events: tuple[Event, ...] = ()
    output: tuple[str, ...] = ()  # the last printed lines
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return self.ending == "done"

    @property
    def sentence(self) -> str:
        """Describe the end of the process in words."""
        return {
            "done": "it ended normally",
            "exit": f"it ended with {self.detail}",
            "signal": f"it was killed by {self.detail}",
            "timeout": f"it was still running {self.detail} and was stopped",
            "not-started": f"it could not be started: {self.detail}",
        }[self.ending]


def python_command(*arguments: str) -> list[str]:
    """Return the command that starts Python with the search path of this process.

    Variables are inherited, but options are not: -I, -E, -s and -P are passed on, because they
    exclude the current folder, PYTHONPATH or the user's packages from imports.
    """
    flags = sys.flags
    options = {
        "-E": flags.ignore_environment,
        "-s": flags.no_user_site,
        "-P": getattr(flags, "safe_path", False),  # exists since Python 3.11
    }
    given = ["-I"] if flags.isolated else [option for option, is_set in options.items() if is_set]
    return [sys.executable, *given, *arguments]


def run_child(command: Sequence[str], *, timeout: float) -> Outcome:
    """Run a command with `--report FILE --parent PID` appended.

    A failure of the command is part of the result, never an exception.
    """
    with contextlib.closing(watch_child(command, timeout=timeout)) as child:
        while True:
            try:
                next(child)
            except StopIteration as ended:
                return cast("Outcome", ended.value)
            time.sleep(POLL)


def watch_child(command: Sequence[str], *, timeout: float) -> Generator[Path, None, Outcome]:
    """Run a command as `run_child` does; yield the report's path until the child has ended.

    Each iteration polls the child once, so one process can watch many children. Closing the
    generator ends the child.
    """
    started = time.monotonic()
    _log.debug("running %s", shlex.join(command))
    try:
        with tempfile.TemporaryDirectory(prefix=f"{NAME}-") as folder:
            _require_room(folder)
            ended = yield from _run_in(Path(folder), command, timeout)
    except OSError as error:
        what = f"`{error.filename}`: " if error.filename else ""
        return Outcome("not-started", f"{what}{error.strerror or error}")
    ended = replace(ended, seconds=time.monotonic() - started)
    _log.debug("after %.1f s: %s %s", ended.seconds, ended.ending, ended.detail)
    return ended


def _require_room(folder: str) -> None:
    if shutil.disk_usage(folder).free < _REPORT_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(Path(folder).parent))


def _run_in(folder: Path, command: Sequence[str], timeout: float) -> Generator[Path, None, Outcome]:
    report, output = folder / "report.jsonl", folder / "output.txt"
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [*command, "--report", str(report), "--parent", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        ending, detail = yield from _wait(process, report, timeout)
    return Outcome(ending, detail, tuple(read_events(report)), tuple(_tail(output)))


def _wait(
    process: subprocess.Popen[bytes], report: Path, timeout: float
) -> Generator[Path, None, tuple[Ending, str]]:
    until = time.monotonic() + timeout
    try:
        while (status := process.poll()) is None:
            if time.monotonic() >= until:
                return "timeout", f"after {timeout:g} s"
            yield report
    finally:
        if process.poll() is None:  # also on Ctrl-C in the parent
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status == 0:
        return "done", ""
    if status < 0:
        return "signal", _signal_name(-status)
    return "exit", f"status {status}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def end_with(parent: int | None) -> None:
    """End this child process as soon as its parent ends; None means no parent.

    Raises:
        SystemExit: The parent has already ended.
    """
    if parent is None:
        return
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that started this one has ended")


def read_events(report: Path) -> list[Event]:
    """Read the objects of a report; skip a last line that a crash cut short."""
    events = []
    try:
        lines = report.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):
            event = json.loads(line)
            if isinstance(event, dict):
                events.append(event)
    return events


def write_event(report: Path, event: Event) -> None:
    """Append one object and close the file, so that the object survives a crash."""
    with report.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(event) + "\n")


def _tail(output: Path) -> list[str]:
    with output.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - _OUTPUT_BYTES))
        text = stream.read().decode("utf-8", "replace")
    return [line for line in text.splitlines() if line.strip()][-_OUTPUT_LINES:]
