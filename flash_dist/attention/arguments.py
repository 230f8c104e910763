"""Checks and conversions of the public functions' arguments."""

from __future__ import annotations

import math
from functools import lru_cache
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._C import _functorch as functorch
from torch._subclasses.fake_tensor import FakeTensor

from ..kernels.boundaries import is_checking, warn_unchecked
from ..masks import Band, BlockMask, IntervalMask
from ..masks.inputs import MAX_SEQLEN, require_bool
from ..masks.registry import is_traced
from ..toolkit.errors import show
from .layouts import (
    ALIGNMENT,
    DENSE,
    DEVICE_TYPES,
    NAMES,
    Layout,
    Names,
    check_layouts,
    dtype_name,
    require_device,
    require_int32,
)
from .support import require_kernels

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Tensor = torch.Tensor
Triple = tuple[Tensor, Tensor, Tensor]
Window = tuple[int | None, int | None] | Tensor
NO_WINDOW: Final = (-1, -1)
FULL: Final = Band()
CAUSAL: Final = Band(right=0)
# True while a torch.func transform runs: tensors may then have no address. This must not be a
# Python function: torch.compile would trace it, and record its result as a constant of the graph.
is_transformed: Final[Callable[[], bool]] = torch._C._are_functorch_transforms_active  # noqa: SLF001
# True if autocast is on for any device; torch's public function asks about one device.
is_autocast: Final[Callable[[], bool]] = torch._C._is_any_autocast_enabled  # noqa: SLF001
_WHOLE: Final = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
# Exclusive limits of the scales that stay positive and finite when they are rounded to float32.
SCALES: Final = (2.0**-150, 2.0**128 - 2.0**103)


def is_symbolic(x: object) -> bool:
    """Return whether torch.compile is tracing, or x is a fake tensor.

    x then has no address, and its sizes may be symbolic.
    """
    return torch.compiler.is_compiling() or isinstance(x, FakeTensor)


def prepare_inputs(
    q: Tensor, k: Tensor, v: Tensor, tokens: int = DENSE, names: Names = NAMES
) -> Triple:
    """Check q, k, v, cast them under autocast, and drop the heads_per_kv axis of k and v.

    Args:
        q: Queries, with a num_heads axis or with num_heads_kv and heads_per_kv axes.
        k: Keys, likewise.
        v: Values, likewise.
        tokens: DENSE or PACKED.
        names: The caller's names of the tensors.

    Raises:
        TypeError: An argument is not a tensor, or a dtype is not supported.
        ValueError: Shapes, devices or strides do not fit.
        FlashDistError: This build has no code that runs on the GPU.
    """
    plain = type(q) is type(k) is type(v) is Tensor
    traced = torch.compiler.is_compiling()
    if traced or not plain or not q.layout is k.layout is v.layout is torch.strided:
        _require_tensors(q, k, v, names)
    if is_autocast():
        q, k, v = autocast(q, k, v)
    if traced or (not plain and isinstance(q, FakeTensor)):
        check_layouts(Layout.of(q), Layout.of(k), Layout.of(v), tokens, names)
        return q, _drop_group(k, tokens), _drop_group(v, tokens)
    try:
        # fmt: off
        grouped = _check_once(
            tokens, names,
            q.dtype, q.device, q.shape, q.stride(),
            k.dtype, k.device, k.shape, k.stride(),
            v.dtype, v.device, v.shape, v.stride(),
        )
        # fmt: on
    except RuntimeError:
        _require_tensors(q, k, v, names)  # reading the shape of a nested tensor fails
        raise
    return (q, _drop_group(k, tokens), _drop_group(v, tokens)) if grouped else (q, k, v)


@lru_cache(maxsize=4096)
def _check_once(tokens: int, names: Names, *fields: Any) -> bool:  # noqa: ANN401
    """Check a combination of layouts; return whether k or v has a heads_per_kv axis.

    Args:
        tokens: DENSE or PACKED.
        names: The caller's names of q, k and v.
        fields: The fields of the layouts of q, k and v, one after the other. They are the cache
            key, because most calls repeat earlier layouts and then need not make a Layout.

    Raises:
        TypeError: A dtype is not supported.
        ValueError: Shapes, devices or strides do not fit.
        FlashDistError: This build has no code that runs on the GPU.
    """
    q, k, v = Layout(*fields[:4]), Layout(*fields[4:8]), Layout(*fields[8:])
    check_layouts(q, k, v, tokens, names)
    if q.device.type == "cuda":
        require_kernels(q.device.index, q.dtype, q.shape[-1], v.shape[-1], name=names.q)
    return len(k.shape) != tokens + 2 or len(v.shape) != tokens + 2


def _require_tensors(q: Tensor, k: Tensor, v: Tensor, names: Names) -> None:
    for name, x in ((names.q, q), (names.k, k), (names.v, v)):
        require_tensor(name, x)


def read_cu_seqlens(
    name: str,
    x: Any,  # noqa: ANN401 - a user's value
    q: Tensor,
    names: Names = NAMES,
) -> Tensor:
    """Check cu_seqlens, and return it; for a DTensor, return the full tensor.

    Raises:
        TypeError: x is not a tensor, or not int32.
        ValueError: Shape, device or strides do not fit.
    """
    require_tensor(name, x)
    if type(x) is not Tensor and hasattr(x, "full_tensor"):  # a DTensor: use its full tensor
        x = x.full_tensor()
    require_int32(name, x)
    require_device(name, x, q.device, names.q)
    if x.dim() != 1 or x.shape[0] < 1 or not x.is_contiguous():
        message = (
            f"{name} must be contiguous with shape [batch + 1], batch at least 0, "
            f"got shape {list(x.shape)} and strides {list(x.stride())}"
        )
        raise ValueError(message)
    tensor: Tensor = x
    return tensor


def may_wait() -> bool:
    """Return whether to check values on a GPU, for which the host waits.

    True if FLASH_DIST_CHECK=1. While a CUDA graph is captured, warn and return False instead.
    """
    if not is_checking():
        return False
    if torch.cuda.is_current_stream_capturing():
        warn_unchecked("a captured CUDA graph")
        return False
    return True


def may_look(q: Tensor) -> bool:
    """Return whether to check values: always on the CPU, on a GPU only if FLASH_DIST_CHECK=1.

    Return False for fake tensors, which have no values, and in a trace or a torch.func transform.
    """
    if is_symbolic(q) or is_traced() or is_transformed():
        return False
    return not q.is_cuda or may_wait()


def require_tensor(name: str, x: Tensor | None) -> None:
    """Raise TypeError if an argument is not a tensor, ValueError if it is nested or sparse."""
    if not isinstance(x, torch.Tensor):
        message = f"{name} must be a torch.Tensor, got {type(x).__name__}"
        if isinstance(x, (list, tuple)) or hasattr(x, "__array__"):
            message += f"\n\nhint: `torch.as_tensor({name})` makes one"
        raise TypeError(message)
    if x.is_nested:
        message = (
            f"{name} must be a dense tensor, got a nested one\n\nhint: `flash_attn_varlen_func` "
            "takes its values() and offsets()"
        )
        raise ValueError(message)
    if x.layout is not torch.strided:
        message = f"{name} must be a dense tensor, got layout {x.layout}\n\nhint: `x.to_dense()`"
        raise ValueError(message)


def autocast(*tensors: Any) -> tuple[Any, ...]:  # noqa: ANN401 - a user's value
    """Cast tensors as autocast does for torch's attention.

    If autocast is on for the device of the first tensor, floating point tensors are cast, except
    float64. All other arguments are returned unchanged. Later checks report unsupported ones.
    """
    kind = tensors[0].device.type if isinstance(tensors[0], torch.Tensor) else ""
    if kind not in DEVICE_TYPES or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if _is_cast(x) else x for x in tensors)


def _is_cast(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64


def _drop_group(x: Tensor, tokens: int) -> Tensor:
    return x if x.dim() == tokens + 2 else x.select(-2, 0)


def check_addresses(names: Sequence[str], *tensors: Tensor) -> None:
    """Raise ValueError if the address of a tensor is not a multiple of 16 bytes."""
    for name, x in zip(names, tensors, strict=True):
        address = find_address(x)
        if address % ALIGNMENT:
            message = f"{name} must start at a multiple of {ALIGNMENT} bytes, got address "
            raise ValueError(message + f"{address:#x}")


def are_aligned(*tensors: Tensor) -> bool:
    """Return whether all addresses are multiples of 16 bytes; False if a tensor has no address.

    Tensors in a transform of torch.func have none.
    """
    bits = 0
    try:
        for x in tensors:
            bits |= x.data_ptr()
    except RuntimeError:
        return False
    return bits % ALIGNMENT == 0


def find_address(x: Tensor) -> int:
    """Return a tensor's address; under vmap, its bitwise OR with the vmapped axes' byte strides.

    So the result is a multiple of 16 only if the addresses of all entries are multiples of 16.
    """
    bits = 0
    while functorch.is_functorch_wrapped_tensor(x):
        axis = functorch.maybe_get_bdim(x)
        x = functorch.get_unwrapped(x)
        if axis >= 0 and x.shape[axis] > 1:
            bits |= x.stride(axis) * x.element_size()
    return bits | x.data_ptr()


def choose_scale(scale: float | None, head_dim: int, name: str = "softmax_scale") -> float:
    """Check and return the scale of the scores; head_dim ** -0.5 if `scale` is None."""
    if scale is None:
        default: float = int(head_dim) ** -0.5
        return default
    if isinstance(scale, bool) or not isinstance(scale, (float, int, torch.SymFloat, Real)):
        message = f"{name} must be a float or None, got {type(scale).__name__}"
        if isinstance(scale, torch.Tensor):
            message += (
                f"\n\nhint: multiply the queries by it and pass {name}=1.0: its gradient is kept"
            )
        raise TypeError(message)
    number = to_float(scale)
    if not SCALES[0] < number < SCALES[1]:
        message = f"{name} must be positive and finite in float32, got {show(scale)}"
        raise ValueError(message)
    return number


def to_float(number: Any) -> float:  # noqa: ANN401 - any real number
    """Return a real number of any type as a float; infinity if it is too large for a float.

    NOTE: callers compare the result with bounds. A comparison with a 16-bit or 32-bit numpy float
    would round the bound to that type, and warn.
    """
    try:
        return float(number)
    except OverflowError:  # an int or a fraction too large for a float
        return math.inf


def choose_band(window_size: Window, *, causal: bool) -> Band:
    """Return the band for flash-attention's window_size and causal, aligned to the bottom right."""
    if type(causal) is not bool:
        require_bool("causal", causal)
    if type(window_size) is tuple and len(window_size) == 2:  # noqa: PLR2004
        left, right = window_size  # sides may be tensors, or -1.0, which equals -1
        if type(left) is type(right) is int and left == right == -1:
            return CAUSAL if causal else FULL
    sides = _read_sides(window_size)
    if sides is None:
        message = (
            "window_size must be two whole numbers (left, right), each at least 0, or -1 or None "
            f"for no bound, got {show(window_size)}"
        )
        raise ValueError(message)
    if sides == NO_WINDOW:
        return CAUSAL if causal else FULL
    left, right = sides
    return Band(left, 0 if causal else right)


def _read_sides(window_size: object) -> tuple[int, int] | None:
    """Return the sides of a window; None if they are not valid.

    A side without a bound (-1, None or more than MAX_SEQLEN) is returned as -1.
    """
    if isinstance(window_size, torch.Tensor) and window_size.dim() == 1:
        window_size = window_size.unbind()
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:  # noqa: PLR2004
        return None
    left, right = (-1 if side is None else read_whole(side) for side in window_size)
    if left is None or right is None or left < -1 or right < -1:
        return None
    return (-1 if left > MAX_SEQLEN else left), (-1 if right > MAX_SEQLEN else right)


def read_whole(value: object) -> int | None:
    """Return an integer of Python, NumPy or a one-element tensor as an int; None for other values.

    A SymInt is returned unchanged. Reading a tensor on a GPU waits for the GPU.
    """
    if isinstance(value, torch.Tensor):
        if value.is_nested or value.is_meta or value.numel() != 1 or value.dtype not in _WHOLE:
            return None
        return int(value.item())
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt, Integral)):
        return None
    number: Any = value
    return number if isinstance(value, (int, torch.SymInt)) else int(number)


def require_whole(name: str, value: object) -> int:
    """Return the result of `read_whole`; raise TypeError if it is None."""
    number = read_whole(value)
    if number is None:
        message = f"{name} must be an int, got {describe_value(value)}"
        raise TypeError(message)
    return number


def is_within(number: int, most: int) -> bool:
    """Return whether 0 <= number <= most.

    Under torch.compile, the number may be known only when the graph runs. The result is then True,
    and the graph asserts both limits.
    """
    if not torch.compiler.is_compiling():
        return 0 <= number <= most
    from torch.fx.experimental.symbolic_shapes import guard_or_true  # noqa: PLC0415

    if not (guard_or_true(number >= 0) and guard_or_true(number <= most)):
        return False
    torch._check(number >= 0)  # noqa: SLF001 - as torch documents
    torch._check(number <= most)  # noqa: SLF001
    return True


def is_known(condition: bool) -> bool:  # noqa: FBT001 - may be symbolic
    """Return whether a condition is known to hold for all values of a graph's symbolic sizes."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # noqa: PLC0415

    return statically_known_true(condition)


def choose_mask(
    mask: BlockMask | IntervalMask | None, window_size: Window, *, causal: bool
) -> Band | BlockMask | IntervalMask:
    """Return the mask, or the band of causal and window_size if the mask is None.

    Raises:
        TypeError: The mask is neither a BlockMask nor an IntervalMask.
        ValueError: Both a mask and a band are given, or window_size is not valid.
    """
    band = choose_band(window_size, causal=causal)
    if mask is None:
        return band
    if not isinstance(mask, (BlockMask, IntervalMask)):
        message = f"mask must be a flash_dist.BlockMask or IntervalMask, got {describe_type(mask)}"
        raise TypeError(message)
    if band != FULL:
        message = (
            f"mask cannot be given together with causal={causal}, window_size={show(window_size)}"
            f"\n\nhint: {_name_joint(mask)}"
        )
        raise ValueError(message)
    return mask


def _name_joint(mask: BlockMask | IntervalMask) -> str:
    if isinstance(mask, IntervalMask):
        return "`IntervalMask.of` takes causal; a window goes into lo and hi"
    return "make `mask & BlockMask.causal()` once and pass that"


def describe_type(value: object) -> str:
    """Describe the type of an unsupported mask, with a hint if BlockMask can convert the mask."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return f"{kind.__name__}\n\nhint: `BlockMask.from_dense` makes one of booleans, once"
    if kind.__name__ != BlockMask.__name__:
        return kind.__name__
    return f"{kind.__module__}.{kind.__name__}\n\nhint: `BlockMask.from_flex` of flash_dist, once"


def describe_value(value: object) -> str:
    """Describe an unsupported value: a tensor by its shape and dtype, any other by its type."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    if value.is_nested:
        return "a nested tensor"
    where = " on the meta device" * value.is_meta
    return f"a tensor{where} of shape {list(value.shape)} and dtype {dtype_name(value.dtype)}"
