"""Baseline that only copies the tensors that attention reads and writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .failures import CannotRun

if TYPE_CHECKING:
    from collections.abc import Callable

    from .problem import Problem


def make_copy(problem: Problem, pass_: str) -> Callable[[], object]:
    """Return a function that copies tensors with the shapes of q, k, v and out.

    For the backward it copies each of them twice: dq, dk, dv and dout have the same shapes.

    Raises:
        CannotRun: The pass has no copy.
    """
    inputs = problem.inputs[:2] if problem.shape.latent else problem.inputs  # v is part of k
    forward = [x.detach() for x in (*inputs, problem.dout)]  # dout stands in for out
    tensors = {"forward": forward, "backward": [*forward, *forward]}
    if pass_ not in tensors:
        message = f"phase of copy must be forward or backward, got `{pass_}`"
        raise CannotRun(message)
    sources = [x.clone() for x in tensors[pass_]]
    targets = [torch.empty_like(x) for x in sources]
    return lambda: torch._foreach_copy_(targets, sources)  # one kernel launch for all copies
