"""Whether q, k, v can be attended: dtypes, devices, shapes and strides, apart from any values.

Dense tensors are [batch, seqlen, heads..., head_dim], packed ones [total, heads..., head_dim],
where heads... is num_heads or num_heads_kv, heads_per_kv.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch

from ..masks.inputs import MAX_SEQLEN

DEVICE_TYPES: Final = ("cuda", "cpu")
CUDA_DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)
CPU_DTYPES: Final = (*CUDA_DTYPES, torch.float64)
MAX_HEAD_DIM: Final = 256
HEAD_DIM_STEP: Final = 8
MAX_BLOCKS: Final = 2**31 - 1
SMALLEST_TILE: Final = 64  # rows of the smallest tile of any kernel, for the limit on blocks
ALIGNMENT: Final = 16  # bytes of one load

DENSE: Final = 2  # axes before the heads: batch and seqlen
PACKED: Final = 1  # total
_TOKEN_AXES: Final = {DENSE: "batch, seqlen", PACKED: "total"}


class Layout(NamedTuple):
    """All of a tensor that decides whether it can be attended, apart from its address."""

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


def check_layouts(q: Layout, k: Layout, v: Layout, tokens: int) -> None:
    """Raise TypeError or ValueError if q, k, v cannot be attended.

    Args:
        q: Layout of the queries.
        k: Layout of the keys, maybe with an expanded heads_per_kv axis.
        v: Layout of the values, likewise.
        tokens: DENSE or PACKED.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, x, tokens)
    k, v = (_fold(name, x, q, tokens) for name, x in (("k", k), ("v", v)))
    for name, x in (("k", k), ("v", v)):
        _check_against_q(name, x, q, tokens)
    _check_keys(q, k, v, tokens)
    if q.device.type == "cuda":
        for name, x in (("q", q), ("k", k), ("v", v)):
            reason = stride_error(x)
            if reason is not None:
                message = f"{name} {reason}"
                raise ValueError(message)
        _check_index_range(q, k, tokens)


def stride_error(x: Layout) -> str | None:
    """Say why 16-byte loads cannot step through x, None if they can."""
    if x.stride[-1] != 1:
        return f"must be contiguous in its last dimension, got strides {list(x.stride)}"
    step = ALIGNMENT // x.dtype.itemsize
    outer = zip(x.shape[:-1], x.stride[:-1], strict=True)
    if any(stride % step != 0 for size, stride in outer if size > 1):
        return (
            f"must have strides that are multiples of {step} elements ({ALIGNMENT} bytes), "
            f"got {list(x.stride)}"
        )
    return None


def _check_tensor(name: str, x: Layout, tokens: int) -> None:
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
        *names, last = (dtype_name(dtype) for dtype in allowed)
        message = (
            f"{name} must be {', '.join(names)} or {last} on {x.device.type}, "
            f"got {dtype_name(x.dtype)}"
        )
        raise TypeError(message)
    if any(size == 0 for size in x.shape[tokens:]):
        message = (
            f"no dimension of {name} but {_TOKEN_AXES[tokens]} may be 0, got shape {list(x.shape)}"
        )
        raise ValueError(message)
    if x.shape[-1] % HEAD_DIM_STEP != 0 or x.shape[-1] > MAX_HEAD_DIM:
        what = "head_dim_v" if name == "v" else "head_dim"
        message = (
            f"{what} must be a multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}, "
            f"got {x.shape[-1]} ({name} has shape {list(x.shape)})"
        )
        raise ValueError(message)
    if x.shape[tokens - 1] > MAX_SEQLEN:
        message = (
            f"seqlen must be at most {MAX_SEQLEN}, "
            f"got {x.shape[tokens - 1]} ({name} has shape {list(x.shape)})"
        )
        raise ValueError(message)


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype as messages do: `float16`."""
    return str(dtype).removeprefix("torch.")


def _fold(name: str, x: Layout, q: Layout, tokens: int) -> Layout:
    """Leave out the heads_per_kv axis of k or v, along which it must be expanded."""
    if len(x.shape) == tokens + 2:
        return x
    heads_q, heads_kv, group = math.prod(q.shape[tokens:-1]), x.shape[tokens], x.shape[-2]
    if group not in {1, heads_q // heads_kv}:
        message = (
            f"heads_per_kv of {name} must be that of q, {heads_q // heads_kv}, or 1, "
            f"got {group} ({name} has shape {list(x.shape)}, q has shape {list(q.shape)})"
        )
        raise ValueError(message)
    if group > 1 and x.stride[-2] != 0:
        message = (
            f"{name} with heads_per_kv {group} must be expanded along it (stride 0 in dimension "
            f"{tokens + 1}), got strides {list(x.stride)}"
        )
        raise ValueError(message)
    return x.without_heads_per_kv()


def _check_against_q(name: str, x: Layout, q: Layout, tokens: int) -> None:
    if x.dtype != q.dtype:
        both = f"{dtype_name(q.dtype)} and {dtype_name(x.dtype)}"
        message = f"q and {name} must have the same dtype, got {both}"
        raise TypeError(message)
    if x.device != q.device:
        message = f"q and {name} must be on the same device, got {q.device} and {x.device}"
        raise ValueError(message)
    if tokens == DENSE and x.shape[0] != q.shape[0]:
        message = (
            f"q and {name} must agree in batch, got shapes {list(q.shape)} and {list(x.shape)}"
        )
        raise ValueError(message)


def _check_keys(q: Layout, k: Layout, v: Layout, tokens: int) -> None:
    if k.shape[-1] != q.shape[-1]:
        message = f"q and k must agree in head_dim, got {q.shape[-1]} and {k.shape[-1]}"
        raise ValueError(message)
    if k.shape[:-1] != v.shape[:-1]:
        message = (
            "k and v must have the same shape but for head_dim, "
            f"got {list(k.shape)} and {list(v.shape)}"
        )
        raise ValueError(message)
    if v.shape[-1] > k.shape[-1]:
        message = f"head_dim_v must be at most head_dim, {k.shape[-1]}, got {v.shape[-1]}"
        raise ValueError(message)
    heads_q, heads_kv = q.shape[tokens], k.shape[tokens]
    if len(q.shape) == tokens + 3 and heads_q != heads_kv:
        message = (
            f"q and k must agree in num_heads_kv where q has heads_per_kv, "
            f"got shapes {list(q.shape)} and {list(k.shape)}"
        )
        if q.shape[tokens + 1] == heads_kv:
            axes = f"{tokens}, {tokens + 1}"
            message += f"\n\nhint: `q.transpose({axes})` of queries [.., groups, num_heads_kv, ..]"
        raise ValueError(message)
    if heads_q % heads_kv != 0:
        message = f"num_heads_kv must divide num_heads_q, got {heads_kv} (k) and {heads_q} (q)"
        raise ValueError(message)


def _check_index_range(q: Layout, k: Layout, tokens: int) -> None:
    rows = max(q.shape[tokens - 1], k.shape[tokens - 1])
    batch = q.shape[0] if tokens == DENSE else 1
    blocks = batch * math.prod(q.shape[tokens:-1]) * (rows // SMALLEST_TILE + 1)
    if blocks > MAX_BLOCKS:
        message = (
            f"batch * num_heads_q * seqlen / {SMALLEST_TILE} must be at most {MAX_BLOCKS}, "
            f"got {blocks} (q has shape {list(q.shape)}, k has shape {list(k.shape)})"
        )
        raise ValueError(message)
