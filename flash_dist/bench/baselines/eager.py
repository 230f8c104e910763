"""Attention as plain torch operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .failures import CannotRun
from .scoring import PLAIN, make_scoring

if TYPE_CHECKING:
    from .ours import Attend
    from .problem import Problem
    from .scoring import Scoring


@dataclass(frozen=True)
class Masked:
    """The masked positions, bool [seqlen_q, seqlen_k], and whether any query has no visible key."""

    scores: torch.Tensor
    has_empty_row: bool

    @classmethod
    def of(cls, problem: Problem) -> Masked | None:
        """Return the masked positions of a problem; None if all keys are visible."""
        if problem.visible is None:
            return None
        return cls(~problem.visible, bool((~problem.visible).all(dim=-1).any()))


def make_eager(problem: Problem) -> Attend:
    """Return a function that computes attention with torch operations; all scores are in memory.

    It computes in the dtype of the inputs.

    Raises:
        CannotRun: The problem has packed documents or dropout.
    """
    shape = problem.shape
    if shape.documents:
        message = "eager attention does not support packed documents"
        raise CannotRun(message)
    masked = Masked.of(problem)
    group = shape.num_heads_q // shape.num_heads_kv
    scoring = PLAIN if problem.bias is not None else make_scoring(problem)
    return lambda *inputs: attend_eagerly(inputs, masked=masked, group=group, scoring=scoring)


def attend_eagerly(
    inputs: tuple[torch.Tensor, ...],
    *,
    masked: Masked | None,
    group: int,
    scoring: Scoring = PLAIN,
) -> torch.Tensor:
    """Compute attention from inputs: q, k and v [batch, seqlen, heads, head_dim], and any bias."""
    q, k, v = (x.transpose(1, 2) for x in inputs[:3])
    if group > 1:
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    scores = sum(inputs[3:], _modify(scores, scoring))
    if masked is not None:
        scores = scores.masked_fill(masked.scores, -torch.inf)
    weights = torch.softmax(scores, dim=-1)
    if masked is not None and masked.has_empty_row:
        weights = weights.masked_fill(masked.scores, 0)
    out = weights @ v
    if scoring.sinks is not None:
        out = scoring.weigh(out, scores.float().logsumexp(dim=-1))
    return out.transpose(1, 2)


def _modify(scores: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Apply the score_mod, if there is one, to the scores [batch, heads, seqlen_q, seqlen_k]."""
    if scoring.score_mod is None:
        return scores
    numbers = (torch.arange(size, device=scores.device) for size in scores.shape)
    batch, head, i, j = torch.meshgrid(*numbers, indexing="ij")
    return scoring.score_mod(scores, batch, head, i, j)
