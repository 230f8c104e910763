"""The torch operators: loading the binding registers them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

torch.ops.load_library(str(Path(__file__).with_name("_C.so")))

NAME = "my_kernels::scale"


def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return x * factor.

    Args:
        x: Any shape, float32; contiguous if on a GPU.
        factor: Multiplies every element.
    """
    result: torch.Tensor = torch.ops.my_kernels.scale(x, factor)
    return result


@torch.library.impl(NAME, "CPU")
def _scale_cpu(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


@torch.library.register_fake(NAME)
def _scale_fake(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[torch.Tensor, float], output: torch.Tensor) -> None:
    ctx.factor = inputs[1]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return scale(grad.contiguous(), ctx.factor), None


torch.library.register_autograd(NAME, _backward, setup_context=_keep)
