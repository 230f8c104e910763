"""Score modifications of a problem, as arguments of each baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from .failures import CannotRun
from .shapes import FEATURES

if TYPE_CHECKING:
    from collections.abc import Callable

    from .problem import Problem

    Tensor = torch.Tensor
    ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

SOFTCAP: Final = 50.0  # Gemma 2
DROPOUT_P: Final = 0.1
_STEEPEST: Final = 8.0  # -log2 of the last head's slope, as in the ALiBi paper


@dataclass(frozen=True)
class Scoring:
    """A score modification: score_mod, sinks or neither.

    score_mod: FlexAttention's function of (score, b, h, q_idx, kv_idx).
    sinks: [num_heads_q], float32. One more score in each row, without a value vector.
    """

    score_mod: ScoreMod | None = None
    sinks: Tensor | None = None

    def weigh(self, out: Tensor, lse: Tensor) -> Tensor:
        """Return out [batch, heads, seqlen_q, head_dim] times the weight that sinks leave to keys.

        lse: [batch, heads, seqlen_q], without the sinks.
        """
        if self.sinks is None:
            return out
        part = torch.sigmoid(lse - self.sinks[:, None])
        return out * part[..., None].to(out.dtype)


PLAIN: Final = Scoring()


def alibi_slopes(problem: Problem) -> Tensor:
    """Return one ALiBi slope per query head, in a geometric sequence, float32."""
    heads = problem.shape.num_heads_q
    steps = torch.arange(1, heads + 1, dtype=torch.float32, device=problem.device)
    return torch.exp2(-_STEEPEST * steps / heads)


def sinks_of(problem: Problem) -> Tensor:
    """Return a float32 sink per query head, from 0 to 4: the weight of 1 to 55 keys of score 0."""
    heads = problem.shape.num_heads_q
    return torch.linspace(0.0, 4.0, heads, dtype=torch.float32, device=problem.device)


def score_arguments(problem: Problem) -> dict[str, Any]:
    """Return the score modification as keyword arguments of `flash_attn_func`."""
    scores = problem.shape.scores
    if scores == "softcap":
        return {"softcap": SOFTCAP}
    if scores == "alibi":
        return {"alibi_slopes": alibi_slopes(problem)}
    if scores == "bias":
        return {"bias": problem.bias}
    if scores == "dropout":
        return {"dropout_p": DROPOUT_P}
    return {"learnable_sink": sinks_of(problem)} if scores == "sinks" else {}


def make_scoring(problem: Problem) -> Scoring:
    """Return the score modification as a function of a score, or as sinks.

    Raises:
        CannotRun: The problem has a bias or dropout instead.
    """
    scores = problem.shape.scores
    if scores in FEATURES:
        message = f"{scores} is no function of a score"
        raise CannotRun(message)
    if scores == "softcap":
        return Scoring(lambda score, *_: SOFTCAP * torch.tanh(score / SOFTCAP))
    if scores == "alibi":
        slopes, shift = alibi_slopes(problem), problem.shape.seqlen_k - problem.shape.seqlen_q
        return Scoring(
            lambda score, _batch, head, i, j: score - slopes[head] * (i + shift - j).abs()
        )
    return Scoring(sinks=sinks_of(problem)) if scores == "sinks" else PLAIN


def require_plain_scores(problem: Problem) -> None:
    """Raise if a problem has a score modification, a bias, sinks or dropout.

    Raises:
        CannotRun: The problem has one of these.
    """
    if problem.shape.scores:
        message = f"score modifications are not supported, got {problem.shape.scores}"
        raise CannotRun(message)
