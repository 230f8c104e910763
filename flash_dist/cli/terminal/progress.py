"""What is shown on a terminal's stderr while something takes long; elsewhere nothing is."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from threading import Lock, Timer
from typing import IO, TYPE_CHECKING, Final

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from .text import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE: Final = 1.0  # seconds; what is done by then shows nothing


def is_terminal(stream: IO[str] | None) -> bool:
    """Whether somebody watches."""
    return stream is not None and Console(file=stream).is_terminal


@contextmanager
def working(what: str) -> Iterator[None]:
    """Say that something is under way."""
    if not is_terminal(sys.stderr):
        yield
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
        yield
    finally:
        timer.cancel()
        with lock:
            ended = True
        status.stop()


@contextmanager
def downloading() -> Iterator[Callable[[int, int | None], None]]:
    """Return what takes the bytes so far and of the whole, and draws a bar."""
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
