"""Removes temporary files before a process that is asked to end does so."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_SIGNALS: Final = (signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))


class Terminated(BaseException):
    """A signal that ends the process arrived."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number


@contextmanager
def raising_signals() -> Iterator[None]:
    """Turn such a signal into an exception, which leaves the block through every `with`.

    Signals that are ignored (nohup) or handled already stay unchanged.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = [one for one in _SIGNALS if signal.getsignal(one) is signal.SIG_DFL]
    for one in taken:
        signal.signal(one, _raise)
    try:
        yield
    finally:
        for one in taken:
            signal.signal(one, signal.SIG_DFL)


@contextmanager
def ending_at_once() -> Iterator[None]:
    """Let such a signal end the process at once, as by default, within `raising_signals`.

    For waits in compiled code, which raise no exception before they are over.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = [one for one in _SIGNALS if signal.getsignal(one) is _raise]
    for one in taken:
        signal.signal(one, signal.SIG_DFL)
    try:
        yield
    finally:
        for one in taken:
            signal.signal(one, _raise)


def _raise(number: int, frame: FrameType | None) -> None:
    del frame
    raise Terminated(number)
