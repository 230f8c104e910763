"""Precision of products of float32, for a call, a block or a thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, Literal, cast

if TYPE_CHECKING:
    from types import TracebackType

Precision = Literal["tf32x3", "ieee"]

TF32X3: Final = "tf32x3"
IEEE: Final = "ieee"
IEEE32: Final = "ieee32"  # the dtype of kernels whose float32 products are FFMA
PRECISIONS: Final = (TF32X3, IEEE)


class _Thread(threading.local):
    """Choice of one thread; an attribute, which torch.compile can read."""

    def __init__(self) -> None:
        self.is_main = threading.current_thread() is threading.main_thread()
        self.precision: Precision | None = None  # its own choice; the main thread's is below


_thread: Final = _Thread()
_of_process: Precision = TF32X3  # what the main thread chose: that of threads which chose none


class float32_precision:  # noqa: N801 - called as a function
    """Choose how kernels multiply float32 from here on, or within a `with` block.

    "tf32x3", the default, makes three products of TF32 on the matrix units, which leaves out 2^-22
    of a term at most; "ieee" rounds each product and sum as IEEE 754 says (FFMA), and takes up to
    2.5 times as long. GPUs of compute capability 7.5 have no TF32 and compute "ieee" either way.
    float16 and bfloat16 are computed as ever, and so is everything on the CPU.

    A thread's choice is its own, and goes for its calls of every attention function; threads that
    made none, autograd's among them, take what the main thread has chosen at the time. The backward
    of a call does as its forward did, whatever was chosen since. torch.compile makes the choice a
    part of the graph, and compiles again where it meets another. An argument `float32_precision`
    goes before all of it.

    Args:
        precision: "tf32x3" or "ieee".

    Raises:
        TypeError: precision is no string.
        ValueError: It is another one.
    """

    def __init__(self, precision: Precision) -> None:
        self._precision = read_precision(precision)
        self._before = _of_process if _thread.is_main else _thread.precision
        _choose(self._precision)

    def __enter__(self) -> None:
        """Choose it, again if this is its second block."""
        _choose(self._precision)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Choose again what was chosen before."""
        _choose(self._before)


def read_precision(precision: object) -> Precision:
    """Return a precision that a caller named.

    Raises:
        TypeError: It is no string.
        ValueError: There is none of that name.
    """
    if not isinstance(precision, str):
        message = f'float32_precision must be "tf32x3" or "ieee", got {type(precision).__name__}'
        raise TypeError(message)
    if precision not in PRECISIONS:
        message = (
            f'float32_precision must be "tf32x3" or "ieee", got "{precision:.60}"\n\n'
            'hint: "ieee" is what torch calls "highest", without TF32'
        )
        raise ValueError(message)
    return cast("Precision", precision)


def is_ieee(precision: Precision | None) -> bool:
    """Return whether a call with this precision, None for the one chosen, uses no TF32."""
    if precision is None:
        return (_thread.precision or _of_process) == IEEE
    return read_precision(precision) == IEEE


def _choose(precision: Precision | None) -> None:
    global _of_process  # noqa: PLW0603 - of the process
    if precision is not None and _thread.is_main:
        _of_process = precision
    else:
        _thread.precision = precision
