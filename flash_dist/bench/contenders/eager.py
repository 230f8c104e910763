"""Attention written out in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .failures import CannotRun

if TYPE_CHECKING:
    from .ours import Attend
    from .problem import Problem


@dataclass(frozen=True)
class Hidden:
    """Scores that do not count, [seqlen_q, seqlen_k]; whether some query sees no key at all."""

    scores: torch.Tensor
    has_empty_row: bool

    @classmethod
    def of(cls, problem: Problem) -> Hidden | None:
        """Return what the mask hides, None for nothing."""
        if problem.visible is None:
            return None
        return cls(~problem.visible, bool((~problem.visible).all(dim=-1).any()))


def make_eager(problem: Problem) -> Attend:
    """Return softmax(q @ k.T * scale) @ v with the scores in memory, in the inputs' dtype."""
    shape = problem.shape
    if shape.documents:
        message = "eager attention would store the scores of all documents at once"
        raise CannotRun(message)
    hidden = Hidden.of(problem)
    group = shape.num_heads_q // shape.num_heads_kv
    return lambda q, k, v: attend_eagerly(q, k, v, hidden=hidden, group=group)


def attend_eagerly(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, hidden: Hidden | None, group: int
) -> torch.Tensor:
    """Compute attention on [batch, seqlen, heads, head_dim]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if group > 1:
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if hidden is not None:
        scores = scores.masked_fill(hidden.scores, -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    if hidden is not None and hidden.has_empty_row:
        weights = weights.masked_fill(hidden.scores, 0)
    return (weights @ v).transpose(1, 2)
