"""Checks of q, k and v: dtypes, devices, shapes and strides, not values.

Dense tensors are [batch, seqlen, heads..., head_dim], packed ones [total, heads..., head_dim],
where heads... is one axis (num_heads) or two (num_heads_kv, heads_per_kv).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch.compiler import is_compiling

from ..masks.inputs import MAX_SEQLEN

if TYPE_CHECKING:
    from collections.abc import Sequence

DEVICE_TYPES: Final = ("cuda", "cpu")
CUDA_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)
CPU_DTYPES: Final = (*CUDA_DTYPES, torch.float64)
MAX_HEAD_DIM: Final = 512
GENERAL_HEAD_DIM: Final = 256  # maximum for float32 on a GPU, and for compute capability 7.5
HEAD_DIM_STEP: Final = 8
MAX_BLOCKS: Final = 2**31 - 1
SMALLEST_TILE: Final = 64  # rows of the smallest tile of any kernel; bounds the number of blocks
ALIGNMENT: Final = 16  # bytes per load

DENSE: Final = 2  # axes before the heads: batch and seqlen
PACKED: Final = 1  # axes before the heads: total
_TOKEN_AXES: Final = {DENSE: "batch, seqlen", PACKED: "total"}


@dataclass(frozen=True, eq=False)  # compared by identity, because it is part of cache keys
class Names:
    """The caller's names of the tensors, and the order of their axes, for error messages."""

    q: str = "q"
    k: str = "k"
    v: str = "v"
    cu_seqlens_q: str = "cu_seqlens_q"
    cu_seqlens_k: str = "cu_seqlens_k"
    max_seqlen_q: str = "max_seqlen_q"
    max_seqlen_k: str = "max_seqlen_k"
    heads_first: bool = False  # the axes are [batch, num_heads, seqlen, head_dim]

    def order(self, numbers: Sequence[int]) -> list[int]:
        """Return a shape or strides in the caller's order of axes."""
        if not self.heads_first:
            return list(numbers)
        batch, seqlen, heads, head_dim = numbers
        return [batch, heads, seqlen, head_dim]


NAMES: Final = Names()
TORCH: Final = Names("query", "key", "value", heads_first=True)


class Seen:
    """Records rare properties that some tensor in this process has had.

    While a property is False, calls skip the check for it.
    """

    odd_head_dim = False  # a head_dim that is not a multiple of HEAD_DIM_STEP


class Layout(NamedTuple):
    """All properties of a tensor that decide whether attention supports it, except its address."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, x: torch.Tensor) -> Layout:
        """Return the layout of a tensor."""
        return cls(x.dtype, x.device, x.shape, x.stride())

    def without_heads_per_kv(self) -> Layout:
        """Return the layout of `x.select(-2, 0)`."""
        shape, stride = self.shape, self.stride
        return Layout(self.dtype, self.device, (*shape[:-2], shape[-1]), (*stride[:-2], stride[-1]))


def check_layouts(q: Layout, k: Layout, v: Layout, tokens: int, names: Names = NAMES) -> None:
    """Raise TypeError or ValueError if attention does not support q, k and v.

    Args:
        q: Layout of the queries.
        k: Layout of the keys, which may have an expanded heads_per_kv axis.
        v: Layout of the values, likewise.
        tokens: DENSE or PACKED.
        names: The caller's names of the tensors.

    A tensor whose head_dim is not a multiple of HEAD_DIM_STEP may have any strides, because it is
    padded, which copies it.
    """
    for name, x, what in (
        (names.q, q, "head_dim"),
        (names.k, k, "head_dim"),
        (names.v, v, "head_dim_v"),
    ):
        _check_tensor(name, x, what, tokens, names)
    k, v = (_drop_group(name, x, q, tokens, names) for name, x in ((names.k, k), (names.v, v)))
    for name, x in ((names.k, k), (names.v, v)):
        _check_against_q(name, x, q, tokens, names)
    _check_keys(q, k, v, tokens, names)
    if q.device.type == "cuda":
        for name, x in ((names.q, q), (names.k, k), (names.v, v)):
            reason = None if x.shape[-1] % HEAD_DIM_STEP else stride_error(x, names)
            if reason is not None:
                message = f"{name} {reason}"
                raise ValueError(message)
        _check_index_range(q, k, tokens, names)
    if (q.shape[-1] % HEAD_DIM_STEP or v.shape[-1] % HEAD_DIM_STEP) and not is_compiling():
        Seen.odd_head_dim = True


def stride_error(x: Layout, names: Names = NAMES) -> str | None:
    """Return why x cannot be read with 16-byte loads; None if it can."""
    if x.stride[-1] != 1:
        return f"must be contiguous in its last dimension, got strides {names.order(x.stride)}"
    step = ALIGNMENT // x.dtype.itemsize
    outer = zip(x.shape[:-1], x.stride[:-1], strict=True)
    if any(stride % step != 0 for size, stride in outer if size > 1):
        return (
            f"must have strides that are multiples of {step} elements ({ALIGNMENT} bytes), "
            f"got {names.order(x.stride)}"
        )
    return None


def _check_tensor(name: str, x: Layout, what: str, tokens: int, names: Names) -> None:
    if x.device.type not in DEVICE_TYPES:
        message = f"{name} must be on a CUDA device or the CPU, got device {x.device}"
        raise ValueError(message)
    if len(x.shape) not in {tokens + 2, tokens + 3}:
        axes = _TOKEN_AXES[tokens]
        message = (
            f"{name} must have {tokens + 2} dimensions [{axes}, num_heads, head_dim] or "
            f"{tokens + 3} [{axes}, num_heads_kv, heads_per_kv, head_dim], "
            f"got shape {list(x.shape)}"
        )
        raise ValueError(message)
    allowed = CUDA_DTYPES if x.device.type == "cuda" else CPU_DTYPES
    if x.dtype not in allowed:
        *most, last = (dtype_name(dtype) for dtype in allowed)
        message = (
            f"{name} must be {', '.join(most)} or {last} on {x.device.type}, "
            f"got {dtype_name(x.dtype)}"
        )
        raise TypeError(message)
    if any(size == 0 for size in x.shape[tokens:]):
        message = (
            f"no dimension of {name} but {_TOKEN_AXES[tokens]} may be 0, "
            f"got shape {names.order(x.shape)}"
        )
        raise ValueError(message)
    is_general = x.device.type == "cuda" and x.dtype == torch.float32
    largest = GENERAL_HEAD_DIM if is_general else MAX_HEAD_DIM
    if x.shape[-1] > largest:
        message = (
            f"{what} must be at most {largest}{' for float32 on cuda' if is_general else ''}, "
            f"got {x.shape[-1]} ({name} has shape {names.order(x.shape)})"
        )
        raise ValueError(message)
    if x.shape[tokens - 1] > MAX_SEQLEN:
        message = (
            f"seqlen must be at most {MAX_SEQLEN}, "
            f"got {x.shape[tokens - 1]} ({name} has shape {names.order(x.shape)})"
        )
        raise ValueError(message)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype for messages, such as `float16`."""
    return str(dtype).removeprefix("torch.")


def _drop_group(name: str, x: Layout, q: Layout, tokens: int, names: Names) -> Layout:
    """Return the layout of k or v without its heads_per_kv axis, if any; the axis must be expanded.

    Raises:
        ValueError: The size of the axis is neither 1 nor q's heads_per_kv, or it is not expanded.
    """
    if len(x.shape) == tokens + 2:
        return x
    heads_q, heads_kv, group = math.prod(q.shape[tokens:-1]), x.shape[tokens], x.shape[-2]
    if group != 1 and group != heads_q // heads_kv:  # `not in {1, ...}` would hash symbolic sizes
        message = (
            f"heads_per_kv of {name} must be that of {names.q}, {heads_q // heads_kv}, or 1, "
            f"got {group} ({name} has shape {list(x.shape)}, {names.q} has shape {list(q.shape)})"
        )
        raise ValueError(message)
    if group > 1 and x.stride[-2] != 0:
        message = (
            f"{name} with heads_per_kv {group} must be expanded along it (stride 0 in dimension "
            f"{tokens + 1}), got strides {list(x.stride)}"
        )
        raise ValueError(message)
    return x.without_heads_per_kv()


def require_same_dtype(name: str, x: Layout, q: Layout, name_q: str = "q") -> None:
    """Raise TypeError if the dtype of a tensor differs from that of q."""
    if x.dtype != q.dtype:
        both = f"{dtype_name(q.dtype)} and {dtype_name(x.dtype)}"
        message = f"{name_q} and {name} must have the same dtype, got {both}"
        if x.dtype.itemsize == 1:
            message += (
                f"\n\nhint: no kernel reads 8-bit numbers: keep {name} in {dtype_name(q.dtype)}"
            )
        raise TypeError(message)


def require_device(
    name: str, x: Layout | torch.Tensor, device: torch.device, name_q: str = "q"
) -> None:
    """Raise ValueError if a tensor is not on `device`, the device of q."""
    if x.device != device:
        message = f"{name_q} and {name} must be on the same device, got {device} and {x.device}"
        raise ValueError(message)


def require_int32(name: str, x: Layout | torch.Tensor) -> None:
    """Raise TypeError if a tensor is not int32."""
    if x.dtype != torch.int32:
        message = f"{name} must be int32, got {dtype_name(x.dtype)}\n\nhint: `{name}.int()`"
        raise TypeError(message)


def _check_against_q(name: str, x: Layout, q: Layout, tokens: int, names: Names) -> None:
    require_same_dtype(name, x, q, names.q)
    require_device(name, x, q.device, names.q)
    if tokens == DENSE and x.shape[0] != q.shape[0]:
        message = (
            f"{names.q} and {name} must agree in batch, "
            f"got shapes {names.order(q.shape)} and {names.order(x.shape)}"
        )
        raise ValueError(message)


def _check_keys(q: Layout, k: Layout, v: Layout, tokens: int, names: Names) -> None:
    both = f"{names.q} and {names.k}"
    if k.shape[-1] != q.shape[-1]:
        message = f"{both} must agree in head_dim, got {q.shape[-1]} and {k.shape[-1]}"
        raise ValueError(message)
    if k.shape[:-1] != v.shape[:-1]:
        message = (
            f"{names.k} and {names.v} must have the same shape but for head_dim, "
            f"got {names.order(k.shape)} and {names.order(v.shape)}"
        )
        raise ValueError(message)
    if v.shape[-1] > k.shape[-1]:
        message = f"head_dim_v must be at most head_dim, {k.shape[-1]}, got {v.shape[-1]}"
        raise ValueError(message)
    heads_q, heads_kv = q.shape[tokens], k.shape[tokens]
    if len(q.shape) == tokens + 3 and heads_q != heads_kv:
        message = (
            f"{both} must agree in num_heads_kv where {names.q} has heads_per_kv, "
            f"got shapes {list(q.shape)} and {list(k.shape)}"
        )
        if q.shape[tokens + 1] == heads_kv:
            axes = f"{tokens}, {tokens + 1}"
            message += f"\n\nhint: `q.transpose({axes})` of queries [.., groups, num_heads_kv, ..]"
        raise ValueError(message)
    if heads_q % heads_kv != 0:
        message = (
            "num_heads_kv must divide num_heads_q, "
            f"got {heads_kv} ({names.k}) and {heads_q} ({names.q})"
        )
        raise ValueError(message)


def _check_index_range(q: Layout, k: Layout, tokens: int, names: Names) -> None:
    rows = max(q.shape[tokens - 1], k.shape[tokens - 1])
    batch = q.shape[0] if tokens == DENSE else 1
    blocks = batch * math.prod(q.shape[tokens:-1]) * (rows // SMALLEST_TILE + 1)
    if blocks > MAX_BLOCKS:
        message = (
            f"batch * num_heads_q * seqlen / {SMALLEST_TILE} must be at most {MAX_BLOCKS}, "
            f"got {blocks} ({names.q} has shape {names.order(q.shape)}, "
            f"{names.k} has shape {names.order(k.shape)})"
        )
        raise ValueError(message)
