"""Lets `with` blocks clean up before SIGTERM or SIGHUP ends the process."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from types import FrameType

    Handler = Callable[[int, FrameType | None], None] | signal.Handlers

_SIGNALS: Final = (signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))


class Terminated(BaseException):
    """Raised when SIGTERM or SIGHUP arrives."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number


def raising_signals() -> AbstractContextManager[None]:
    """Turn SIGTERM and SIGHUP into an exception, so that every `with` in the block cleans up.

    A signal that is ignored (nohup) or already has a handler is left unchanged.
    """
    return _exchanging(signal.SIG_DFL, _raise)


def ending_at_once() -> AbstractContextManager[None]:
    """Let SIGTERM and SIGHUP end the process at once, as by default, within `raising_signals`.

    Use it around waits in compiled code, which would delay the exception until they end.
    """
    return _exchanging(_raise, signal.SIG_DFL)


@contextmanager
def _exchanging(old: Handler, new: Handler) -> Iterator[None]:
    """Replace the handler `old` of SIGTERM and SIGHUP within the block, in the main thread only."""
    is_main = threading.current_thread() is threading.main_thread()
    taken = [one for one in _SIGNALS if is_main and signal.getsignal(one) is old]
    for one in taken:
        signal.signal(one, new)
    try:
        yield
    finally:
        for one in taken:
            signal.signal(one, old)


def _raise(number: int, frame: FrameType | None) -> None:
    del frame
    raise Terminated(number)
