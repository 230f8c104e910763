"""Choices of how to compute, for a call, a block or a thread: precision and order of sums."""

from __future__ import annotations

import functools
import inspect
import threading
from typing import TYPE_CHECKING, ClassVar, Final, Literal, ParamSpec, TypeVar, cast

import torch

from ..masks import Band, BlockMask
from ..masks.inputs import complain, require_bool

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from ..masks.intervals import IntervalMask

P = ParamSpec("P")
R = TypeVar("R")
Precision = Literal["tf32x3", "ieee"]
TF32X3: Final = "tf32x3"
IEEE: Final = "ieee"
IEEE32: Final = "ieee32"  # dtype of float32 kernels that multiply with FFMA
PRECISIONS: Final = (TF32X3, IEEE)
_RUN_LATER: Final = (
    inspect.isgeneratorfunction,
    inspect.iscoroutinefunction,
    inspect.isasyncgenfunction,
)


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
        self.has_matched = False  # lets most calls skip the lookup


_thread: Final = _Thread()
process: Final = _Process()


class Choice:
    """A choice from here on, within a `with` block, or in each call of a function it decorates."""

    _name: ClassVar[str]

    def __init__(self, value: object) -> None:
        self._value = value
        self._before = getattr(process if _thread.is_main else _thread, self._name)
        self._choose(value)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return the function with each call within such a block; here, undo the choice.

        Raises:
            TypeError: It is no function, or one whose body runs after the call.
        """
        self._choose(self._before)
        fits = inspect.isroutine(function) and not any(does(function) for does in _RUN_LATER)
        if not fits:
            message = (
                f"{type(self).__name__} must decorate a function, got {function!r:.80}\n\n"
                "hint: in a generator, a coroutine or a class, use a `with` block"
            )
            raise TypeError(message)

        @functools.wraps(function)
        def within(*args: P.args, **kwargs: P.kwargs) -> R:
            with type(self)(self._value):
                return function(*args, **kwargs)

        return within

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


class match_kvcache(Choice):  # noqa: N801 - called as a function
    """Give out and lse the bits of `flash_attn_with_kvcache`, from here on or in a `with` block.

    As a decorator, it goes for the calls of a function.

    Attention then sums in the order of the cache. A query has the same bits in training, in a
    prefill at once or in chunks, and in decoding, with or without pages, in any batch or packing.
    Gradients are those of this out and lse. Forward kernels take longer.

    It is for causal and full attention, windows, softcap, alibi_slopes and sinks, in float16 and
    bfloat16. float32 on a GPU and other masks raise an error. On the CPU, where it takes every
    dtype, the calls of the cache must be within the choice, too.

    A thread's choice is its own; threads that made none take what the main thread has chosen at the
    time. torch.compile makes the choice a part of the graph, and compiles again where it meets
    another. An argument `match_kvcache` goes before all of it. A checkpointed layer that a backward
    outside of the block computes again has other bits: run that backward inside, too.

    Args:
        match: False takes the faster order again.

    Raises:
        TypeError: match is no bool.
    """

    _name = "match_kvcache"

    def __init__(self, match: bool = True) -> None:  # noqa: FBT001, FBT002 - as torch.set_grad_enabled
        require_bool("match_kvcache", match)
        process.has_matched = True
        super().__init__(bool(match))


def is_matching(
    match: bool | None,  # noqa: FBT001
    q: torch.Tensor,
    mask: Band | BlockMask | IntervalMask,
) -> bool:
    """Return whether a call must have the bits of a cache.

    Args:
        match: The argument of the call; None: the choice of this thread.
        q: Queries.
        mask: Which keys each sees.

    Raises:
        TypeError: match is no bool, or no cache has the dtype.
        ValueError: No cache has the mask.
    """
    if match is None:
        match = find_match_kvcache()
    else:
        require_bool("match_kvcache", match)
    if not match:
        return False
    if q.dtype == torch.float32 and q.device.type == "cuda":
        raise complain(
            TypeError,
            "match_kvcache must be False for float32 on a GPU, got True",
            "caches are float16 or bfloat16 there",
        )
    if not isinstance(mask, Band) and (not isinstance(mask, BlockMask) or mask.band is None):
        raise complain(
            ValueError,
            f"match_kvcache must be False with this mask, got True and {mask!r}",
            "caches have causal and window_size; `match_kvcache=False` goes for one call",
        )
    return True
