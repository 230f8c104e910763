"""Shows progress on a terminal's stderr during slow steps, and almost nothing elsewhere."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager, nullcontext
from functools import partial
from threading import Lock, Timer
from typing import IO, TYPE_CHECKING, Final

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from .text import complain, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

PATIENCE: Final = 1.0  # seconds; shorter steps show nothing
SELDOM: Final = 60.0  # minimum seconds between two lines of a log


def is_terminal(stream: IO[str] | None) -> bool:
    """Tell if a stream is a terminal."""
    return stream is not None and Console(file=stream).is_terminal


class Seldom:
    """Reports progress without a terminal: at most one line in `every` seconds, 60 by default."""

    def __init__(self, every: float | None = None) -> None:
        self._every = SELDOM if every is None else every
        self._said = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line on stderr, unless the previous line or the start is too recent."""
        if time.monotonic() - self._said >= self._every:
            self._said = time.monotonic()
            complain(printable(text))


def _ignore(_: str) -> None:
    """Report no progress."""


@contextmanager
def working(
    what: str, *, elsewhere: Callable[[str], None] = _ignore
) -> Iterator[Callable[[str], None]]:
    """Show that a step is running; yield a function that reports progress.

    Args:
        what: The step.
        elsewhere: Function that reports progress if there is no terminal.
    """
    if not is_terminal(sys.stderr):
        yield elsewhere
        return
    status = Console(file=sys.stderr, highlight=False, markup=False).status(printable(what))
    lock, ended = Lock(), False

    def start() -> None:
        with lock:
            if not ended:
                status.start()

    timer = Timer(PATIENCE, start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda text: status.update(printable(text))
    finally:
        timer.cancel()
        with lock:
            ended = True
        status.stop()


def testing(
    *,
    silent: bool,
    every: float | None = None,  # noqa: PT028 - no test
) -> Callable[[str], AbstractContextManager[Callable[[str], None]]]:
    """Return a version of `working` for selftests. If `silent`, it prints nothing.

    If not `silent`, but without a terminal, it prints lines as `Seldom` does.
    """
    if silent:
        return lambda _: nullcontext(_ignore)
    return partial(working, elsewhere=Seldom(every).say)


@contextmanager
def downloading() -> Iterator[Callable[[int, int | None], None]]:
    """Yield a function that draws a bar. It takes the bytes so far, and the total or None."""
    if not is_terminal(sys.stderr):
        yield lambda _done, _total: None
        return
    progress = Progress(
        TextColumn("downloading"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(file=sys.stderr),
        transient=True,
    )
    task = progress.add_task("download", total=None)
    began = time.monotonic()

    def show(done: int, total: int | None) -> None:
        progress.update(task, completed=done, total=total)
        if not progress.live.is_started and time.monotonic() - began > PATIENCE:
            progress.start()

    try:
        yield show
    finally:
        progress.stop()
