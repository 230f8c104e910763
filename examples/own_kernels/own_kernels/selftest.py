"""The cases of `python -m own_kernels selftest`.

The toolkit runs each case many times, on two streams, over memory filled with NaN. All runs must
give the same bits, and the first must give the values of `exact`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from ._toolkit.selftest.case import Case, make_values
from .functions import rms_norm, silu_mul

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Tensors = dict[str, torch.Tensor]

DTYPES: Final = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
EPS: Final = 1e-5
MANY: Final = 5 << 20  # elements: several rows for each block of a large GPU


@dataclass(frozen=True)
class RmsNormCase(Case):
    """RMS norm of some rows, forward and backward."""

    dtype: str
    rows: int
    hidden: int

    def make_inputs(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return x, weight and dout."""
        shapes = ((self.rows, self.hidden), (self.hidden,), (self.rows, self.hidden))
        dtype = DTYPES[self.dtype]
        return tuple(make_values(i, one, dtype, device=device) for i, one in enumerate(shapes))

    def run(self, inputs: tuple[torch.Tensor, ...]) -> Tensors:
        """Run forward and backward once."""
        x, weight, dout = inputs
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        out = rms_norm(x, weight, EPS)
        dx, dweight = torch.autograd.grad(out, (x, weight), dout)
        return {"out": out.detach(), "dx": dx, "dweight": dweight}

    def exact(self, inputs: tuple[torch.Tensor, ...]) -> Tensors:
        """Return the results of `run`, computed in float64."""
        x, weight, dout = inputs
        x.requires_grad_()
        weight.requires_grad_()
        out = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight
        dx, dweight = torch.autograd.grad(out, (x, weight), dout)
        return {"out": out, "dx": dx, "dweight": dweight}


@dataclass(frozen=True)
class SiluMulCase(Case):
    """SiLU of one tensor times another."""

    dtype: str
    count: int

    def make_inputs(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return a, with values up to 8 where SiLU saturates, and b."""
        dtype, shape = DTYPES[self.dtype], (self.count,)
        return (
            make_values(0, shape, dtype, device=device, scale=8.0),
            make_values(1, shape, dtype, device=device),
        )

    def run(self, inputs: tuple[torch.Tensor, ...]) -> Tensors:
        """Run the forward once."""
        return {"out": silu_mul(*inputs)}

    def exact(self, inputs: tuple[torch.Tensor, ...]) -> Tensors:
        """Return the results of `run`, computed in float64."""
        a, b = inputs
        return {"out": torch.nn.functional.silu(a) * b}


def load_cases() -> Callable[..., list[Case]]:
    """Return a function that chooses the cases of a device."""
    return choose_cases


def choose_cases(device: torch.device, selected: Iterable[dict[str, Any]]) -> list[Case]:
    """Return the cases for all column counts with kernels on a GPU; a few on the CPU."""
    sizes = {("fp16", 256), ("bf16", 1024)}
    if device.type == "cuda":
        sizes = {(k["dtype"], k["hidden"]) for k in selected if k["role"] == "rms" and k["chosen"]}
    return [*_norm_cases(sizes, many=device.type == "cuda"), *_silu_cases()]


def _norm_cases(sizes: Iterable[tuple[str, int]], *, many: bool) -> Iterator[Case]:
    for dtype, hidden in sorted(sizes):
        yield RmsNormCase(dtype, 1, hidden)
        yield RmsNormCase(dtype, 7, hidden - 1)  # only the first row is aligned
        yield RmsNormCase(dtype, 7, hidden - 8)
        if many:
            yield RmsNormCase(dtype, MANY // hidden, hidden)


def _silu_cases() -> Iterator[Case]:
    for dtype in DTYPES:
        yield SiluMulCase(dtype, 1)
        yield SiluMulCase(dtype, 100_003)
