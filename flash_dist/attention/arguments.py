"""What the public functions do with their arguments before anything is computed."""

from __future__ import annotations

from numbers import Real
from typing import Final

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..masks import Band, BlockMask
from ..masks.inputs import MAX_SEQLEN
from .layouts import (
    ALIGNMENT,
    DENSE,
    DEVICE_TYPES,
    Layout,
    check_layouts,
    check_layouts_once,
)

Tensor = torch.Tensor
Triple = tuple[Tensor, Tensor, Tensor]
NO_WINDOW: Final = (-1, -1)
SCALES: Final = (2.0**-150, 2.0**128 - 2.0**103)  # between these, float32 is neither 0 nor inf

# Arguments of other attention functions that are taken for their neutral values alone.
NO_BIAS: Final = "there are no kernels that add a bias"
REASONS: Final = {
    "dropout_p": "there are no kernels with dropout",
    "softcap": "there are no kernels that cap scores",
    "alibi_slopes": NO_BIAS,
    "return_attn_probs": "they are never stored\n\nhint: `return_lse=True` returns lse",
    "block_table": "there are no kernels that read keys in pages",
    "mask": (
        "packed sequences have causal and window_size only\n\nhint: `BlockMask.documents` is a "
        "mask of packed sequences for `flash_attn_func`, with a batch of 1"
    ),
    "return_aux": "only lse is there\n\nhint: `return_lse=True` returns it",
}
NEUTRAL: Final = {"dropout_p": 0, "softcap": 0, "return_attn_probs": False}  # the others: None


def is_symbolic(x: Tensor) -> bool:
    """Whether a tensor only stands for one: its sizes may be symbols, and it has no address."""
    return torch.compiler.is_compiling() or isinstance(x, FakeTensor)


def prepare_inputs(q: Tensor, k: Tensor, v: Tensor, tokens: int = DENSE) -> Triple:
    """Check q, k, v, cast them as autocast wants and leave out heads_per_kv of k and v.

    Args:
        q: Queries, with num_heads or with num_heads_kv and heads_per_kv.
        k: Keys, likewise.
        v: Values, likewise.
        tokens: DENSE or PACKED.

    Raises:
        TypeError: An argument is no tensor, or a dtype is not supported.
        ValueError: Shapes, devices, strides or addresses do not fit.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        require_tensor(name, x)
    kind = q.device.type
    if kind in DEVICE_TYPES and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        q, k, v = _autocast(q, dtype), _autocast(k, dtype), _autocast(v, dtype)
    layouts = Layout.of(q), Layout.of(k), Layout.of(v)
    if is_symbolic(q):
        check_layouts(*layouts, tokens)
    else:
        check_layouts_once(*layouts, tokens)
        if q.device.type == "cuda":
            _check_addresses(q, k, v)
    return q, _fold(k, tokens), _fold(v, tokens)


def require_tensor(name: str, x: Tensor) -> None:
    """Raise TypeError for what is no tensor, ValueError for what is nested or sparse."""
    if not isinstance(x, torch.Tensor):
        message = f"{name} must be a torch.Tensor, got {type(x).__name__}"
        raise TypeError(message)
    if x.is_nested:
        message = (
            f"{name} must be a dense tensor, got a nested one\n\nhint: `flash_attn_varlen_func` "
            "takes its values() and offsets()"
        )
        raise ValueError(message)
    if x.layout != torch.strided:
        message = f"{name} must be a dense tensor, got layout {x.layout}\n\nhint: `x.to_dense()`"
        raise ValueError(message)


def require_bool(name: str, value: object) -> None:
    """Raise TypeError for what is only true or false in a condition."""
    if not isinstance(value, (bool, torch.SymBool)):
        message = f"{name} must be True or False, got {type(value).__name__}"
        if isinstance(value, torch.Tensor):
            message += "\n\nhint: `BlockMask` is for what differs in a batch"
        raise TypeError(message)


def _autocast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast as the inputs of torch's own attention are: all but float64."""
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x


def _fold(x: Tensor, tokens: int) -> Tensor:
    return x if x.dim() == tokens + 2 else x.select(-2, 0)


def _check_addresses(q: Tensor, k: Tensor, v: Tensor) -> None:
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT == 0:
        return
    named = (("q", q), ("k", k), ("v", v))
    name, x = next(one for one in named if one[1].data_ptr() % ALIGNMENT != 0)
    message = f"{name} must start at a multiple of {ALIGNMENT} bytes, got address {x.data_ptr():#x}"
    raise ValueError(message)


def choose_scale(scale: float | None, head_dim: int, name: str = "softmax_scale") -> float:
    """Return the factor on the scores, head_dim ** -0.5 unless one is given."""
    if scale is None:
        return float(int(head_dim) ** -0.5)
    if isinstance(scale, bool) or not isinstance(scale, (float, int, torch.SymFloat, Real)):
        message = f"{name} must be a float or None, got {type(scale).__name__}"
        if isinstance(scale, torch.Tensor):
            message += f"\n\nhint: multiply q by it and pass {name}=1.0: its gradient is kept"
        raise TypeError(message)
    if not SCALES[0] < scale < SCALES[1]:
        message = f"{name} must be positive and finite in float32, got {scale}"
        raise ValueError(message)
    return float(scale)


def choose_band(window_size: tuple[int, int], *, causal: bool) -> Band:
    """Return the band of flash-attention's arguments: aligned to the bottom right, -1 unbounded."""
    require_bool("causal", causal)
    if not _is_pair(window_size) or any(not _is_bound(side) for side in window_size):
        message = (
            "window_size must be two whole numbers (left, right), each at least 0 or -1 for no "
            f"bound, got {window_size}"
        )
        raise ValueError(message)
    if tuple(window_size) == NO_WINDOW:
        return Band(right=0) if causal else Band()
    left, right = (-1 if side > MAX_SEQLEN else side for side in window_size)
    return Band(left, 0 if causal else right)


def _is_pair(value: object) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2  # noqa: PLR2004


def _is_bound(side: object) -> bool:
    return isinstance(side, int) and not isinstance(side, bool) and side >= -1


def choose_mask(
    mask: BlockMask | None, window_size: tuple[int, int], *, causal: bool
) -> Band | BlockMask:
    """Return the mask object, or the band of the other arguments; both cannot be given."""
    band = choose_band(window_size, causal=causal)
    if mask is None:
        return band
    if not isinstance(mask, BlockMask):
        message = f"mask must be a flash_dist.BlockMask, got {describe_type(mask)}"
        raise TypeError(message)
    if band != Band():
        message = (
            f"mask cannot be given together with causal={causal}, window_size={window_size}"
            "\n\nhint: make `mask & BlockMask.causal()` once and pass that"
        )
        raise ValueError(message)
    return mask


def describe_type(value: object) -> str:
    """Name a type, with its module where it has a name of ours, and what makes a mask of it."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return f"{kind.__name__}\n\nhint: `BlockMask.from_dense` makes one of booleans, once"
    if kind.__name__ != BlockMask.__name__:
        return kind.__name__
    return f"{kind.__module__}.{kind.__name__}\n\nhint: `BlockMask.from_flex` of flash_dist, once"


def require_neutral(**arguments: object) -> None:
    """Raise ValueError for an argument that asks for what is not built, with the reason."""
    for name, value in arguments.items():
        neutral = NEUTRAL.get(name)
        if value is neutral:
            continue
        if neutral is None or not isinstance(value, (bool, int, float)) or value != neutral:
            message = f"{name} must be {neutral}, got {_describe(value)}: {REASONS[name]}"
            raise ValueError(message)


def _describe(value: object) -> str:
    return type(value).__name__ if isinstance(value, torch.Tensor) else f"{value!r:.60}"
