"""The cases of `python -m own_kernels selftest`.

The toolkit runs each case many times, on two streams, over memory filled with NaN. All runs must
give the same bits, and the first one the values of `compute_exact`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from ._toolkit.selftest.case import Exact
from ._toolkit.selftest.comparison import make_values
from .functions import rms_norm, silu_mul

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Tensors = dict[str, torch.Tensor]

DTYPES: Final = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
EPS: Final = 1e-5
CPU: Final = torch.device("cpu")
MANY: Final = 5 << 20  # elements: several rows for each block of a large GPU


class Case:
    """A case whose name says everything; see `_toolkit.selftest.case.Case`."""

    fills_gpu = False  # float64 on the CPU takes a second at most

    def describe_inputs(self, inputs: Any) -> dict[str, Any]:  # noqa: ANN401, ARG002
        """Return nothing that the name does not say."""
        return {}


@dataclass(frozen=True)
class NormCase(Case):
    """RMS norm of some rows, forward and backward."""

    dtype: str
    rows: int
    hidden: int

    @property
    def name(self) -> str:
        """The name of the case."""
        return f"rms_norm {self.dtype} {self.rows}x{self.hidden}"

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

    def compute_exact(self) -> Exact:
        """Compute the case in float64."""
        x, weight, dout = (one.double() for one in self.make_inputs(CPU))
        x.requires_grad_()
        weight.requires_grad_()
        out = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight
        dx, dweight = torch.autograd.grad(out, (x, weight), dout)
        return allow_rounding(self.dtype, {"out": out.detach(), "dx": dx, "dweight": dweight})


@dataclass(frozen=True)
class SiluCase(Case):
    """SiLU of one tensor times another."""

    dtype: str
    count: int

    @property
    def name(self) -> str:
        """The name of the case."""
        return f"silu_mul {self.dtype} {self.count}"

    def make_inputs(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return a, up to 8 so that SiLU saturates, and b."""
        dtype, shape = DTYPES[self.dtype], (self.count,)
        return (
            make_values(0, shape, dtype, device=device, scale=8.0),
            make_values(1, shape, dtype, device=device),
        )

    def run(self, inputs: tuple[torch.Tensor, ...]) -> Tensors:
        """Run once."""
        return {"out": silu_mul(*inputs)}

    def compute_exact(self) -> Exact:
        """Compute the case in float64."""
        a, b = (one.double() for one in self.make_inputs(CPU))
        return allow_rounding(self.dtype, {"out": torch.nn.functional.silu(a) * b})


def allow_rounding(dtype: str, values: Tensors) -> Exact:
    """Allow twice the error that rounding the largest value to the dtype makes.

    For float32, whose sums round as well, that is 16 times as much.
    """
    step = torch.finfo(DTYPES[dtype]).eps * (8 if dtype == "fp32" else 1)
    return Exact(values, {name: step * float(one.abs().max()) for name, one in values.items()})


def load_cases() -> Callable[..., list[NormCase | SiluCase]]:
    """Return what chooses the cases of a device."""
    return choose_cases


def choose_cases(
    device: torch.device, selected: Iterable[dict[str, Any]]
) -> list[NormCase | SiluCase]:
    """Return the cases of all columns that a GPU has kernels for; on the CPU, of a few."""
    sizes = {("fp16", 256), ("bf16", 1024)}
    if device.type == "cuda":
        sizes = {(k["dtype"], k["hidden"]) for k in selected if k["role"] == "rms" and k["chosen"]}
    return [*_norm_cases(sizes, many=device.type == "cuda"), *_silu_cases()]


def _norm_cases(sizes: Iterable[tuple[str, int]], *, many: bool) -> Iterator[NormCase]:
    for dtype, hidden in sorted(sizes):
        yield NormCase(dtype, 1, hidden)
        yield NormCase(dtype, 7, hidden - 1)  # no row but the first is aligned
        yield NormCase(dtype, 7, hidden - 8)
        if many:
            yield NormCase(dtype, MANY // hidden, hidden)


def _silu_cases() -> Iterator[SiluCase]:
    for dtype in DTYPES:
        yield SiluCase(dtype, 1)
        yield SiluCase(dtype, 100_003)
