"""The work of a pass: attention, or a stack of layers around it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils.checkpoint import checkpoint

from ..baselines.table import bind

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..baselines.ours import Attend
    from ..baselines.problem import Problem

    Run = Callable[[], object]

PARAMETER_SCALE = 0.02


def make_run(name: str, attend: Attend, problem: Problem, pass_: str) -> Run:
    """Return one pass; all work that is not part of it is done before this returns."""
    if problem.shape.layers > 1:
        return bind(name, Stack(attend, problem).run)
    make = {
        "forward": _make_forward,
        "backward": _make_backward,
        "both": _make_both,
        "checkpointed": _make_checkpointed,
    }[pass_]
    return bind(name, make(attend, problem))


def _make_forward(attend: Attend, problem: Problem) -> Run:
    def run() -> object:
        with torch.no_grad():
            return attend(*problem.inputs)

    return run


def _make_backward(attend: Attend, problem: Problem) -> Run:
    out = attend(*problem.inputs)
    return lambda: torch.autograd.grad(out, problem.inputs, problem.dout, retain_graph=True)


def _make_both(attend: Attend, problem: Problem) -> Run:
    return lambda: torch.autograd.grad(attend(*problem.inputs), problem.inputs, problem.dout)


def _make_checkpointed(attend: Attend, problem: Problem) -> Run:
    def run() -> object:
        out = checkpoint(attend, *problem.inputs, use_reentrant=False)
        return torch.autograd.grad(out, problem.inputs, problem.dout)

    return run


class Stack:
    """Pre-norm attention layers with residuals, each an activation checkpoint of its own.

    A layer is x + W_out attention(W_q norm(x), W_k norm(x), W_v norm(x)); its width is that of the
    query heads. There is no feed-forward part, which would be the same for everyone.
    """

    def __init__(self, attend: Attend, problem: Problem) -> None:
        shape = problem.shape
        self.attend = attend
        self.heads = (shape.num_heads_q, shape.num_heads_kv, shape.num_heads_kv)
        self.head_dims = (shape.head_dim, shape.head_dim, shape.head_dim_v)
        width = shape.num_heads_q * shape.head_dim
        widths = [heads * dim for heads, dim in zip(self.heads, self.head_dims, strict=True)]
        generator = torch.Generator(problem.device).manual_seed(1)

        def draw(*size: int) -> torch.Tensor:
            x = torch.randn(size, generator=generator, device=problem.device)
            return (x * PARAMETER_SCALE).to(problem.q.dtype).requires_grad_()

        width_out = shape.num_heads_q * shape.head_dim_v
        self.layers = [
            (*(draw(one, width) for one in widths), draw(width, width_out))
            for _ in range(shape.layers)
        ]
        size = (shape.batch, shape.seqlen_q, width)
        self.x = torch.randn(size, generator=generator, device=problem.device).to(problem.q.dtype)
        self.dout = torch.randn_like(self.x)
        self.parameters = [weight for layer in self.layers for weight in layer]

    def _layer(self, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        *projections, last = weights
        normed = torch.nn.functional.rms_norm(x, x.shape[-1:])
        q, k, v = (
            (normed @ weight.T).unflatten(-1, (heads, head_dim))
            for weight, heads, head_dim in zip(projections, self.heads, self.head_dims, strict=True)
        )
        return x + self.attend(q, k, v).flatten(2) @ last.T

    def run(self) -> object:
        """Run forward and backward through all layers."""
        x = self.x
        for weights in self.layers:
            x = checkpoint(self._layer, x, *weights, use_reentrant=False)
        return torch.autograd.grad(x, self.parameters, self.dout)
