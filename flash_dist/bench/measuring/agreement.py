"""Compare the results of two attention functions, to find a wrong mask before timing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from ..baselines.eager import Masked, attend_eagerly

if TYPE_CHECKING:
    from ..baselines.ours import Attend
    from ..baselines.problem import Problem, Tensor

NAMES: Final = ("out", "dq", "dk", "dv", "dbias")
LIMITS: Final = {"bf16": 0.1, "fp16": 0.05, "fp32": 0.01}  # largest relative error, by dtype
FLOAT64_LIMIT: Final = 1e-4  # of float32 against float64: largest error over largest value

_BY_ROW: Final = ("out", "dv")  # compared row by row; rows of the other gradients may be close to 0


def compute(attend: Attend, problem: Problem) -> tuple[Tensor, ...]:
    """Return out, dq, dk, dv and, if there is a bias, dbias; only out for a KV cache."""
    if problem.shape.cached:
        with torch.no_grad():
            return (attend(*problem.inputs),)
    out = attend(*problem.inputs)
    grads = torch.autograd.grad(out, problem.inputs, problem.dout, allow_unused=True)
    return (out.detach(), *grads)


def measure_errors(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> dict[str, float]:
    """Return the error of each tensor: of its worst row for out and dv, else of the whole tensor.

    Errors are relative to the norm of the row or tensor. This detects one key too many in one row
    of out, and one query too many in one row of dv.
    """
    return {
        name: _worst_row(a, b) if name in _BY_ROW else _relative_norm(a, b)
        for name, a, b in zip(NAMES, found, wanted, strict=False)  # decoding has only out
    }


def _worst_row(a: Tensor, b: Tensor) -> float:
    a, b = a.float(), b.float()
    difference, norm = (a - b).norm(dim=-1), b.norm(dim=-1)
    floor = 1e-3 * float(norm.median())  # avoids division by 0 in rows without visible keys
    return float((difference / norm.clamp_min(max(floor, 1e-30))).nan_to_num(torch.inf).max())


def _relative_norm(a: Tensor, b: Tensor) -> float:
    a, b = a.float(), b.float()
    error = float((a - b).norm() / b.norm().clamp_min(1e-30))
    return error if error == error else float("inf")  # noqa: PLR0124 - False for NaN


def measure_against_float64(found: tuple[Tensor, ...], problem: Problem) -> dict[str, float]:
    """Return the largest error divided by the largest float64 value, by name of the tensor."""
    wanted = _compute_float64(problem)
    return {
        name: float((a.double() - b).abs().max() / b.abs().max())
        for name, a, b in zip(NAMES, found, wanted, strict=False)
    }


def _compute_float64(problem: Problem) -> list[Tensor]:
    """Return out, dq, dk and dv in float64, computed for one kv head at a time."""
    shape = problem.shape
    group = shape.num_heads_q // shape.num_heads_kv
    masked = Masked.of(problem)
    tensors = (problem.q, problem.k, problem.v, problem.dout)
    wanted = [torch.empty_like(x, dtype=torch.float64) for x in (problem.dout, *problem.inputs)]
    for batch in range(shape.batch):
        for head in range(shape.num_heads_kv):
            own, queries = slice(head, head + 1), slice(head * group, (head + 1) * group)
            places = [(slice(batch, batch + 1), slice(None), x) for x in (queries, own, own)]
            q, k, v, dout = (
                x.detach()[place].double()
                for x, place in zip(tensors, (*places, places[0]), strict=True)
            )
            inputs = tuple(x.requires_grad_() for x in (q, k, v))
            out = attend_eagerly(inputs, masked=masked, group=group)
            grads = torch.autograd.grad(out, inputs, dout)
            for target, part, place in zip(
                wanted, (out.detach(), *grads), (places[0], *places), strict=True
            ):
                target[place] = part
    return wanted
