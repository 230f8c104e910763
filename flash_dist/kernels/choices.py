"""Choices for a call, a `with` block or a thread: precision, and order of sums."""

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
IEEE32: Final = "ieee32"  # dtype name for float32 kernels that multiply with FFMA
PRECISIONS: Final = (TF32X3, IEEE)
_RUN_LATER: Final = (
    inspect.isgeneratorfunction,
    inspect.iscoroutinefunction,
    inspect.isasyncgenfunction,
)


class _Thread(threading.local):
    """Choices of one thread; None: no choice. torch.compile can read attributes of this class."""

    def __init__(self) -> None:
        self.is_main = threading.current_thread() is threading.main_thread()
        self.precision: Precision | None = None
        self.match_kvcache: bool | None = None


class _Process:
    """Choices of the main thread, which also apply to threads without their own choice."""

    def __init__(self) -> None:
        self.precision: Precision = "tf32x3"
        self.match_kvcache = False
        self.has_matched = False  # while False, calls need not look up match_kvcache


_thread: Final = _Thread()
process: Final = _Process()


class Choice:
    """Base class of choices, which apply from now on, in a `with` block or in decorated calls."""

    _name: ClassVar[str]

    def __init__(self, value: object) -> None:
        self._value = value
        self._before = getattr(process if _thread.is_main else _thread, self._name)
        self._choose(value)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return a function that makes the choice for each call; undo the constructor's choice.

        Raises:
            TypeError: The argument is not a function, or its body runs after the call (as in a
                generator).
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
        """Make the choice again: an earlier `with` block of this object may have undone it."""
        self._choose(self._value)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Restore the previous choice."""
        self._choose(self._before)

    def _choose(self, value: object) -> None:
        setattr(process if _thread.is_main else _thread, self._name, value)


def find_precision() -> Precision:
    """Return the precision chosen in this thread, or else in the main thread."""
    return _thread.precision or process.precision


def find_match_kvcache() -> bool:
    """Return the choice of match_kvcache in this thread, or else in the main thread."""
    own = _thread.match_kvcache
    return process.match_kvcache if own is None else own


class float32_precision(Choice):  # noqa: N801 - called as a function
    """Choose how kernels multiply float32 numbers from now on, or in a `with` block.

    "tf32x3", the default, makes three TF32 products on tensor cores, which loses at most 2^-22 of a
    term. "ieee" uses float32 fused multiply-adds as in IEEE 754 (FFMA), and takes up to 2.5 times
    as long. GPUs of compute capability 7.5 have no TF32 and always compute "ieee". float16,
    bfloat16 and CPU calls are not affected.

    A choice belongs to one thread and applies to its calls of every attention function. Threads
    without a choice, such as autograd's, use the current choice of the main thread. A backward uses
    the choice of its forward. torch.compile stores the choice in the graph, and recompiles for
    another choice. An argument `float32_precision` takes precedence.

    Args:
        precision: "tf32x3" or "ieee".

    Raises:
        TypeError: precision is not a string.
        ValueError: precision is another string.
    """

    _name = "precision"

    def __init__(self, precision: Precision) -> None:
        super().__init__(read_precision(precision))


def read_precision(precision: object) -> Precision:
    """Check that a value is a precision, and return it.

    Raises:
        TypeError: The precision is not a string.
        ValueError: The precision is unknown.
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
    """Return whether a call uses no TF32; precision None means the current choice."""
    return (find_precision() if precision is None else read_precision(precision)) == IEEE


class match_kvcache(Choice):  # noqa: N801 - called as a function
    """Give out and lse the bits of `flash_attn_with_kvcache`, from now on or in a `with` block.

    As a decorator, it applies to the calls of a function.

    Attention then sums in the same order as attention to a cache. The results for a query have the
    same bits in training, in a prefill at once or in chunks, and in decoding, with or without
    pages, in any batch or packing. Gradients are those of this out and lse. Forward kernels take
    longer.

    Causal and full attention, windows, softcap, alibi_slopes and sinks are supported, in float16
    and bfloat16. float32 on a GPU and other masks raise an error. On the CPU every dtype is
    supported, but there the choice must also apply to the calls of `flash_attn_with_kvcache`.

    A choice belongs to one thread; threads without a choice use the current choice of the main
    thread. torch.compile stores the choice in the graph, and recompiles for another choice. An
    argument `match_kvcache` takes precedence. If a backward outside of the block recomputes a
    checkpointed layer, the recomputed results have other bits: run the backward inside, too.

    Args:
        match: False chooses the faster order again.

    Raises:
        TypeError: match is not a bool.
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
    """Return whether a call must have the bits of attention to a cache.

    Args:
        match: The argument of the call; None: the current choice.
        q: Queries.
        mask: Which keys are visible to each query.

    Raises:
        TypeError: match is not a bool, or attention to a cache does not support the dtype.
        ValueError: Attention to a cache does not support the mask.
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
