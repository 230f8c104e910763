"""The functions of the package. They check arguments and call the operators of `ops.py`."""

from __future__ import annotations

from typing import Final

import torch

from . import ops  # noqa: F401 - registers the operators

NORM_DTYPES: Final = (torch.float16, torch.bfloat16)
SILU_DTYPES: Final = (*NORM_DTYPES, torch.float32)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """RMS norm of the last axis: x / sqrt(mean(x * x) + eps) * weight, computed in float32.

    Args:
        x: [..., hidden], float16 or bfloat16. On a GPU hidden is at most 8192.
        weight: [hidden], same dtype and device as x.
        eps: Added to the mean of squares.

    Returns:
        [..., hidden], same dtype as x. Gradients of x and weight have the same bits in every run.
    """
    _check_dtype("x", x, NORM_DTYPES)
    if x.dim() == 0 or x.shape[-1] == 0:
        message = f"x must have at least one column, got shape {list(x.shape)}"
        raise ValueError(message)
    _check_like("weight", weight, x, "x", x.shape[-1:])
    if eps < 0:
        message = f"eps must be at least 0, got {eps}"
        raise ValueError(message)
    out: torch.Tensor
    out, _ = torch.ops.own_kernels.rms_norm(x.contiguous(), weight.contiguous(), eps)
    return out


def silu_mul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """SiLU of one tensor times another: a / (1 + exp(-a)) * b, computed in float32.

    Args:
        a: Any shape, float16, bfloat16 or float32.
        b: Same shape, dtype and device as a.

    Returns:
        Same shape and dtype as a.
    """
    _check_dtype("a", a, SILU_DTYPES)
    _check_like("b", b, a, "a", a.shape)
    out: torch.Tensor = torch.ops.own_kernels.silu_mul(a.contiguous(), b.contiguous())
    return out


def _check_dtype(name: str, tensor: torch.Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in allowed:
        *others, last = (str(dtype).removeprefix("torch.") for dtype in allowed)
        got = str(tensor.dtype).removeprefix("torch.")
        message = f"{name} must be {', '.join(others)} or {last}, got {got}"
        raise TypeError(message)


def _check_like(
    name: str, tensor: torch.Tensor, other: torch.Tensor, other_name: str, shape: torch.Size
) -> None:
    if tensor.dtype != other.dtype:
        message = f"{name} must have the dtype of {other_name}, {other.dtype}, got {tensor.dtype}"
        raise TypeError(message)
    if tensor.shape != shape:
        message = f"{name} must have shape {list(shape)}, got {list(tensor.shape)}"
        raise ValueError(message)
    if tensor.device != other.device:
        message = f"{name} must be on {other.device}, as {other_name}, got {tensor.device}"
        raise ValueError(message)
