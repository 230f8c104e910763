"""The public attention function: argument checks, autograd and the workspace budget."""

from __future__ import annotations

import math
import os
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple, overload

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from . import _ops
from ._support import require_kernels
from .errors import FlashDistError

Tensor = torch.Tensor

HEAD_DIMS: Final = (64, 128)
CUDA_DTYPES: Final = (torch.float16, torch.bfloat16)
CPU_DTYPES: Final = (*CUDA_DTYPES, torch.float32, torch.float64)
MAX_SEQLEN: Final = 2**30 - 1
MAX_BLOCKS: Final = 2**31 - 1
SMALLEST_TILE: Final = 64  # rows of the smallest tile of any kernel, for the limit on blocks
ALIGNMENT: Final = 16  # bytes of one load

BUDGET_VARIABLE: Final = "FLASH_DIST_WORKSPACE_MB"
DEFAULT_BUDGET_MB: Final = 1024


def workspace_budget() -> int:
    """Return the bytes that a backward call may use for its workspace, see `flash_attn_func`.

    1 GiB, unless the environment variable FLASH_DIST_WORKSPACE_MB gives another number of MiB.
    """
    text = os.environ.get(BUDGET_VARIABLE, "")
    if not text:
        return DEFAULT_BUDGET_MB << 20
    if not text.isdecimal():
        message = f"{BUDGET_VARIABLE} must be a whole number of MiB, got `{text}`"
        raise FlashDistError(message, hint=f"unset it for the default of {DEFAULT_BUDGET_MB}")
    return int(text) << 20


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - torch's protocol
        ctx: Any,  # noqa: ANN401
        q: Tensor,
        k: Tensor,
        v: Tensor,
        softmax_scale: float,
        causal: bool,  # noqa: FBT001
        budget: int,
    ) -> tuple[Tensor, Tensor]:
        out, lse = _ops.fwd(q, k, v, softmax_scale, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.softmax_scale = softmax_scale
        ctx.causal = causal
        ctx.budget = budget
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        if dout is None and dlse is None:
            return (None,) * 6
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else _loadable(dout)
        if dlse is not None:
            dlse = dlse.contiguous()
        dq, dk, dv = _ops.bwd(
            dout, q, k, v, out, lse, dlse, ctx.softmax_scale, ctx.causal, ctx.budget
        )
        return dq, dk, dv, None, None, None


def _loadable(dout: Tensor) -> Tensor:
    """Return dout, copied if its layout (autograd's choice) does not suit 16-byte loads."""
    if dout.device.type == "cpu" or _is_symbolic(dout):
        return dout.contiguous()
    suits = _stride_error(Layout.of("dout", dout)) is None and dout.data_ptr() % ALIGNMENT == 0
    return dout if suits else dout.contiguous()


@overload
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def flash_attn_func(  # noqa: PLR0913 - the arguments users know
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention without storing the score matrix: softmax(q @ k.T * softmax_scale) @ v.

    Differentiable once and deterministic: forward and backward give the same bits on every run. The
    order of summation depends on shapes, the workspace budget and properties of the GPU (number of
    multiprocessors, shared memory) only.

    The backward keeps an intermediate result (dS, 16 bits per visible score) in a workspace of at
    most `FLASH_DIST_WORKSPACE_MB` MiB (1024 by default; less when less is needed) and works in
    chunks when that does not hold all of it; with 0, or when chunks would leave the GPU idle, it
    recomputes instead. Another budget may give other bits.

    CPU tensors are computed by the formulas in plain torch; float32 and float64 are accepted there
    as well.

    Args:
        q: [batch, seqlen_q, num_heads_q, head_dim], float16 or bfloat16 (float16 only on compute
            capability 7.5). head_dim is 64 or 128 and contiguous; all other strides and the address
            are multiples of 16 bytes.
        k: [batch, seqlen_k, num_heads_kv, head_dim], same dtype and device. num_heads_kv divides
            num_heads_q; query head h reads kv head h // (num_heads_q // num_heads_kv).
        v: Like k.
        softmax_scale: Factor on the scores, positive. Defaults to head_dim ** -0.5.
        causal: Query i sees key j if j <= i + seqlen_k - seqlen_q: the mask is aligned to the
            bottom right.
        return_lse: Also return lse.

    Returns:
        out: [batch, seqlen_q, num_heads_q, head_dim], same dtype as q. A row that sees no key is
            zero.
        lse: [batch, num_heads_q, seqlen_q], float32 (float64 for float64 inputs), only if
            `return_lse`: the natural logarithm of the sum of exp(scores), -inf for a row that sees
            no key. Differentiable.

    Raises:
        TypeError: An argument is no tensor, or a dtype is not supported.
        ValueError: Shapes, devices, alignment or softmax_scale do not fit.
        FlashDistError: This build has no code that runs on the GPU; the message names the arch
            set to install.
    """
    check_inputs(q, k, v)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    if not (math.isfinite(scale) and scale > 0):
        message = f"softmax_scale must be positive and finite, got {scale}"
        raise ValueError(message)
    if q.device.type == "cuda" and not _is_symbolic(q):
        require_kernels(q.device.index, q.dtype, q.shape[-1])
    out, lse = _FlashAttention.apply(  # type: ignore[no-untyped-call] # torch leaves it untyped
        q, k, v, scale, bool(causal), workspace_budget()
    )
    return (out, lse) if return_lse else out


def _is_symbolic(x: Tensor) -> bool:
    """Whether a tensor only stands for one: its sizes may be symbols, and it has no address."""
    return torch.compiler.is_compiling() or isinstance(x, FakeTensor)


class Layout(NamedTuple):
    """All of a tensor that decides whether it can be attended, apart from its address."""

    dtype: torch.dtype
    device: torch.device
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, name: str, x: Tensor) -> Layout:
        """Return the layout of an argument."""
        if not isinstance(x, torch.Tensor):
            message = f"{name} must be a torch.Tensor, got {type(x).__name__}"
            raise TypeError(message)
        return cls(x.dtype, x.device, x.shape, x.stride())


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise TypeError or ValueError if q, k, v cannot be attended."""
    layouts = Layout.of("q", q), Layout.of("k", k), Layout.of("v", v)
    if _is_symbolic(q):
        _check_layouts(*layouts)
        return
    _check_layouts_once(*layouts)
    if q.device.type == "cuda" and (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT != 0:
        name, x = next(
            one for one in (("q", q), ("k", k), ("v", v)) if one[1].data_ptr() % ALIGNMENT != 0
        )
        message = (
            f"{name} must start at a multiple of {ALIGNMENT} bytes, got address {x.data_ptr():#x}"
        )
        raise ValueError(message)


def _check_layouts(q: Layout, k: Layout, v: Layout) -> None:
    named = (("q", q), ("k", k), ("v", v))
    for name, x in named:
        _check_tensor(name, x)
    for name, x in named[1:]:
        _check_against_q(name, x, q)
    if k.shape != v.shape:
        message = f"k and v must have the same shape, got {list(k.shape)} and {list(v.shape)}"
        raise ValueError(message)
    if k.shape[2] == 0 or q.shape[2] % k.shape[2] != 0:
        message = f"num_heads_kv must divide num_heads_q, got {k.shape[2]} (k) and {q.shape[2]} (q)"
        raise ValueError(message)
    if q.device.type == "cuda":
        for name, x in named:
            reason = _stride_error(x)
            if reason is not None:
                message = f"{name} {reason}"
                raise ValueError(message)
        _check_index_range(q, k)


_check_layouts_once = lru_cache(maxsize=4096)(_check_layouts)  # most calls have been seen before


def _check_tensor(name: str, x: Layout) -> None:
    if x.device.type not in {"cuda", "cpu"}:
        message = f"{name} must be on a CUDA device or the CPU, got device {x.device}"
        raise ValueError(message)
    if len(x.shape) != 4:  # noqa: PLR2004
        message = (
            f"{name} must have 4 dimensions [batch, seqlen, num_heads, head_dim], "
            f"got shape {list(x.shape)}"
        )
        raise ValueError(message)
    allowed = CUDA_DTYPES if x.device.type == "cuda" else CPU_DTYPES
    if x.dtype not in allowed:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        message = (
            f"{name} must be {names} on {x.device.type}, got {str(x.dtype).removeprefix('torch.')}"
        )
        raise TypeError(message)
    if x.shape[3] not in HEAD_DIMS:
        sizes = " or ".join(map(str, HEAD_DIMS))
        message = f"head_dim must be {sizes}, got {x.shape[3]} ({name} has shape {list(x.shape)})"
        raise ValueError(message)
    if min(x.shape) == 0:
        message = f"no dimension of {name} may be 0, got shape {list(x.shape)}"
        raise ValueError(message)
    if x.shape[1] > MAX_SEQLEN:
        message = (
            f"seqlen must be at most {MAX_SEQLEN}, "
            f"got {x.shape[1]} ({name} has shape {list(x.shape)})"
        )
        raise ValueError(message)


def _check_against_q(name: str, x: Layout, q: Layout) -> None:
    if x.dtype != q.dtype:
        message = f"q and {name} must have the same dtype, got {q.dtype} and {x.dtype}"
        raise TypeError(message)
    if x.device != q.device:
        message = f"q and {name} must be on the same device, got {q.device} and {x.device}"
        raise ValueError(message)
    if x.shape[0] != q.shape[0] or x.shape[3] != q.shape[3]:
        message = (
            f"q and {name} must agree in batch and head_dim, "
            f"got shapes {list(q.shape)} and {list(x.shape)}"
        )
        raise ValueError(message)


def _stride_error(x: Layout) -> str | None:
    """Say why 16-byte loads cannot step through x, None if they can."""
    if x.stride[3] != 1:
        return f"must be contiguous in its last dimension, got strides {list(x.stride)}"
    step = ALIGNMENT // x.dtype.itemsize
    if any(
        stride % step != 0
        for size, stride in zip(x.shape[:3], x.stride[:3], strict=True)
        if size > 1
    ):
        return (
            f"must have strides that are multiples of {step} elements ({ALIGNMENT} bytes), "
            f"got {list(x.stride)}"
        )
    return None


def _check_index_range(q: Layout, k: Layout) -> None:
    rows = max(q.shape[1], k.shape[1])
    blocks = q.shape[0] * q.shape[2] * (rows // SMALLEST_TILE + 1)
    if blocks > MAX_BLOCKS:
        message = (
            f"batch * num_heads_q * seqlen / {SMALLEST_TILE} must be at most {MAX_BLOCKS}, "
            f"got {blocks} (q has shape {list(q.shape)}, k has shape {list(k.shape)})"
        )
        raise ValueError(message)
