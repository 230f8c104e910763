"""Precision of products of float32, for a call, a block or a thread."""

from __future__ import annotations

from typing import Final, cast

from .choices import Choice, Precision, find_precision

TF32X3: Final = "tf32x3"
IEEE: Final = "ieee"
IEEE32: Final = "ieee32"  # the dtype of kernels whose float32 products are FFMA
PRECISIONS: Final = (TF32X3, IEEE)


class float32_precision(Choice):  # noqa: N801 - called as a function
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

    _name = "precision"

    def __init__(self, precision: Precision) -> None:
        super().__init__(read_precision(precision))


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
    return (find_precision() if precision is None else read_precision(precision)) == IEEE
