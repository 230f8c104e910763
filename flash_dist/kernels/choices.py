"""Choices of how to compute, for a block, a thread or the process."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, ClassVar, Final, Literal

if TYPE_CHECKING:
    from types import TracebackType

Precision = Literal["tf32x3", "ieee"]


class _Thread(threading.local):
    """Choices of one thread, None for none; attributes, which torch.compile can read."""

    def __init__(self) -> None:
        self.is_main = threading.current_thread() is threading.main_thread()
        self.precision: Precision | None = None
        self.match_kvcache: bool | None = None


class _Process:
    """Choices of the main thread, which are those of threads that made none."""

    def __init__(self) -> None:
        self.precision: Precision = "tf32x3"
        self.match_kvcache = False
        self.has_matched = False  # whether any thread ever chose match_kvcache: few calls ask more


_thread: Final = _Thread()
process: Final = _Process()


class Choice:
    """A choice from here on, or within a `with` block."""

    _name: ClassVar[str]

    def __init__(self, value: object) -> None:
        self._value = value
        self._before = getattr(process if _thread.is_main else _thread, self._name)
        self._choose(value)

    def __enter__(self) -> None:
        """Choose it, again if this is its second block."""
        self._choose(self._value)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Choose again what was chosen before."""
        self._choose(self._before)

    def _choose(self, value: object) -> None:
        setattr(process if _thread.is_main else _thread, self._name, value)


def find_precision() -> Precision:
    """Return the precision that is chosen for this thread."""
    return _thread.precision or process.precision


def find_match_kvcache() -> bool:
    """Return whether match_kvcache is chosen for this thread."""
    own = _thread.match_kvcache
    return process.match_kvcache if own is None else own
