"""The operators `torch.ops.own_kernels`.

Importing this module loads `_C.so`, which declares the operators and has their GPU kernels. The
module adds the formulas for the CPU, the shapes for torch.compile and the gradients.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]
Context = Any  # torch.autograd.function.FunctionCtx

EXTENSION = Path(__file__).with_name("_C.so")
if not EXTENSION.is_file():
    _MESSAGE = (
        f"the compiled part `{EXTENSION.name}` is not in {EXTENSION.parent}"
        "\n\nhint: install the wheel, and leave the folder of its sources, which hides it"
    )
    raise ImportError(_MESSAGE)
torch.ops.load_library(str(EXTENSION))

# --- CPU ------------------------------------------------------------------------------------------


def rms_norm_cpu(x: Tensor, weight: Tensor, eps: float) -> Pair:
    """Return out, and rstd of each row in float32."""
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    return (wide * rstd[..., None] * weight.float()).to(x.dtype), rstd


def rms_norm_bwd_cpu(dout: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> Pair:
    """Return dx and dweight."""
    x_hat = x.float() * rstd[..., None]
    g = dout.float() * weight.float()
    dx = (g - x_hat * (g * x_hat).mean(-1, keepdim=True)) * rstd[..., None]
    dweight = (dout.float() * x_hat).reshape(-1, x.shape[-1]).sum(0)
    return dx.to(x.dtype), dweight.to(x.dtype)


def silu_mul_cpu(a: Tensor, b: Tensor) -> Tensor:
    """Return silu(a) * b."""
    return (torch.nn.functional.silu(a.float()) * b.float()).to(a.dtype)


# --- Shapes ---------------------------------------------------------------------------------------


def rms_norm_fake(x: Tensor, _weight: Tensor, _eps: float) -> Pair:
    """Allocate out and rstd, uninitialised."""
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


def rms_norm_bwd_fake(_dout: Tensor, x: Tensor, weight: Tensor, _rstd: Tensor) -> Pair:
    """Allocate dx and dweight, uninitialised."""
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def silu_mul_fake(a: Tensor, _b: Tensor) -> Tensor:
    """Allocate the result, uninitialised."""
    return a.new_empty(a.shape)


# --- Gradients ------------------------------------------------------------------------------------


def rms_norm_save(ctx: Context, inputs: tuple[Tensor, Tensor, float], output: Pair) -> None:
    """Save tensors for the backward. rstd, the second output, has no gradient."""
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])


def rms_norm_backward(ctx: Context, dout: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:
    """Return the gradients of x, weight and eps."""
    dx, dweight = torch.ops.own_kernels.rms_norm_bwd(dout.contiguous(), *ctx.saved_tensors)
    return dx, dweight, None


def refuse_backward(_ctx: Context, *_: Tensor) -> None:
    """Refuse to differentiate the backward."""
    message = "rms_norm can be differentiated once: its backward has no gradient"
    raise NotImplementedError(message)


def silu_mul_save(ctx: Context, inputs: Pair, output: Tensor) -> None:  # noqa: ARG001
    """Save tensors for the backward."""
    ctx.save_for_backward(*inputs)


def silu_mul_backward(ctx: Context, dout: Tensor) -> Pair:
    """Return the gradients of a and b."""
    a, b = ctx.saved_tensors
    wide, g = a.float(), dout.float()
    sigmoid = torch.sigmoid(wide)
    da = g * b.float() * sigmoid * (1 + wide * (1 - sigmoid))
    return da.to(a.dtype), (g * wide * sigmoid).to(b.dtype)


for _name, _cpu, _fake, _backward, _save in (
    ("rms_norm", rms_norm_cpu, rms_norm_fake, rms_norm_backward, rms_norm_save),
    ("rms_norm_bwd", rms_norm_bwd_cpu, rms_norm_bwd_fake, refuse_backward, None),
    ("silu_mul", silu_mul_cpu, silu_mul_fake, silu_mul_backward, silu_mul_save),
):
    torch.library.impl(f"own_kernels::{_name}", "CPU", _cpu)
    torch.library.register_fake(f"own_kernels::{_name}", _fake)
    torch.library.register_autograd(f"own_kernels::{_name}", _backward, setup_context=_save)
