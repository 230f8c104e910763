"""One attention call as a value that is passed from the public functions to the operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ..masks.inputs import complain
from .budget import BUDGET_NOW, workspace_budget
from .choices import is_ieee, is_matching, process
from .dropout.state import NOT_DROPPED, Dropout, require_dropping
from .scores import PLAIN, Scores

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..masks import Band, BlockMask
    from ..masks.intervals import IntervalMask
    from .choices import Precision

Tensor = torch.Tensor


class Packing(NamedTuple):
    """Packed sequences: where each begins, and the maximum lengths."""

    cu_seqlens_q: Tensor  # [batch + 1], int32
    cu_seqlens_k: Tensor  # [batch + 1], int32
    max_seqlen_q: int
    max_seqlen_k: int


NOT_PACKED: Final = (None, None, 0, 0)  # the operators' arguments if tensors are not packed
TENSORS: Final = 6  # number of tensors of a flattened Problem
OTHERS: Final = 11  # number of other fields of a flattened Problem


class Problem(NamedTuple):
    """An attention call: all arguments except q, k and v.

    NOTE: it has no properties, because Dynamo of torch 2.10 cannot trace properties of a
    NamedTuple.

    mask: Which keys are visible to each query; a band if packed.
    softmax_scale: Factor on the scores.
    packing: None for tensors with a batch axis.
    scores: Soft cap, ALiBi slopes, sinks and bias; None: none of these.
    budget: Bytes of workspace for the backward, or BUDGET_NOW.
    batch_invariant: Whether the gradients of a sequence must not depend on the rest of the batch.
    ieee: Whether float32 products use FFMA instead of TF32, see choices.py.
    match_kvcache: Whether out and lse must have the bits of attention to a cache, see choices.py.
    max_logit: Whether the largest score of each head is a third result. Not with match_kvcache or
        dropout.
    dropout: None: no weight is dropped.
    """

    mask: Band | BlockMask | IntervalMask
    softmax_scale: float
    packing: Packing | None = None
    scores: Scores | None = None
    budget: int = BUDGET_NOW
    batch_invariant: bool = False
    ieee: bool = False
    match_kvcache: bool = False
    max_logit: bool = False
    dropout: Dropout | None = None

    @classmethod
    def of(  # noqa: PLR0913 - the options of a public function
        cls,
        q: Tensor,
        mask: Band | BlockMask | IntervalMask,
        softmax_scale: float,
        *,
        packing: Packing | None = None,
        scores: Scores | None = None,
        batch_invariant: bool = False,
        float32_precision: Precision | None = None,
        match_kvcache: bool | None = None,
        max_logit: bool = False,
        dropout: Dropout | None = None,
    ) -> Problem:
        """Return the problem of a call with queries q.

        Its budget is the current one, or BUDGET_NOW while torch.compile traces.
        """
        is_float32 = q.dtype == torch.float32
        ieee = (is_float32 or float32_precision is not None) and is_ieee(float32_precision)
        ieee = ieee and is_float32
        matches = False
        if match_kvcache is not None or process.has_matched:
            matches = is_matching(match_kvcache, q, mask)
            if matches and scores is not None and scores.bias is not None:
                message = "match_kvcache must be False with a bias, got True: caches have none"
                raise ValueError(message)
            if matches and max_logit:
                raise complain(
                    ValueError,
                    "match_kvcache must be False with return_max_logit, got True",
                    "a call without match_kvcache, under no_grad, finds max_logit",
                )
        if dropout is not None:
            softcap = 0.0 if scores is None else scores.softcap
            require_dropping(
                dropout.p, softcap=softcap, ieee=ieee, match_kvcache=matches, max_logit=max_logit
            )
        if torch.compiler.is_compiling():
            how = batch_invariant, ieee, matches, max_logit, dropout
            return cls(mask, softmax_scale, packing, scores, BUDGET_NOW, *how)
        budget = workspace_budget()
        how = batch_invariant, ieee, matches, max_logit, dropout
        fields = mask, softmax_scale, packing, scores, budget, *how
        return tuple.__new__(cls, fields)  # ten times faster than the constructor of a NamedTuple

    def flatten(self) -> tuple[list[Tensor | None], tuple[Any, ...]]:
        """Return the tensors and the other fields, as arguments of an autograd.Function."""
        cu_seqlens_q, cu_seqlens_k, *longest = self.packing or NOT_PACKED
        softcap, *of_heads = self.scores or PLAIN
        dropout_p, rng_state = self.dropout or NOT_DROPPED
        tensors = [cu_seqlens_q, cu_seqlens_k, *of_heads, rng_state]
        how = self.budget, self.batch_invariant, self.ieee, self.match_kvcache, self.max_logit
        return tensors, (self.mask, self.softmax_scale, *longest, softcap, dropout_p, *how)

    @classmethod
    def unflatten(cls, tensors: Sequence[Tensor | None], others: Sequence[Any]) -> Problem:
        """Return the problem from the two results of `flatten`."""
        cu_seqlens_q, cu_seqlens_k, *of_heads, rng_state = tensors
        mask, softmax_scale, max_seqlen_q, max_seqlen_k, softcap, dropout_p, *how = others
        packing = scores = None
        if cu_seqlens_q is not None and cu_seqlens_k is not None:
            packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        if softcap != 0 or any(x is not None for x in of_heads):
            scores = Scores(softcap, *of_heads)
        dropout = None if rng_state is None else Dropout(dropout_p, rng_state)
        return cls(mask, softmax_scale, packing, scores, *how)._replace(dropout=dropout)
