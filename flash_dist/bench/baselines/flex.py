"""FlexAttention, compiled afresh for every problem."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from .scoring import make_scoring

if TYPE_CHECKING:
    from collections.abc import Callable

    from .ours import Attend
    from .problem import Problem

    MaskMod = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_LARGE: Final = 1 << 30  # with more scores than this, create_block_mask is compiled


def make_flex(problem: Problem) -> Attend:
    """Return compiled FlexAttention.

    NOTE: after too many recompilations, dynamo would silently run FlexAttention eagerly. So dynamo
    is reset for each problem, and `fullgraph=True` makes dynamo raise an error instead. Donated
    buffers are off, because the backward runs many times on one graph.
    """
    import torch._functorch.config as functorch  # noqa: PLC0415 - the import takes a second

    torch._dynamo.reset()  # noqa: SLF001 - torch documents this function
    functorch.donated_buffer = False
    compiled: Any = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    shape = problem.shape
    mask_mod = make_mask_mod(problem)
    block_mask = None
    if mask_mod is not None:
        sizes = (None, None, shape.seqlen_q, shape.seqlen_k)
        create: Any = create_block_mask
        if shape.seqlen_q * shape.seqlen_k > _LARGE:
            create = torch.compile(create_block_mask)
        block_mask = create(mask_mod, *sizes, device=problem.device)
    grouped = shape.num_heads_q != shape.num_heads_kv
    packed = bool(shape.documents)
    scoring = make_scoring(problem)
    arguments: dict[str, Any] = {"block_mask": block_mask, "enable_gqa": grouped}
    arguments |= {"score_mod": scoring.score_mod, "return_lse": scoring.sinks is not None}

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if packed:
            q, k, v = (x.unsqueeze(0) for x in (q, k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        found = compiled(q, k, v, **arguments)
        out: torch.Tensor = scoring.weigh(*found) if scoring.sinks is not None else found
        out = out.transpose(1, 2)
        return out.squeeze(0) if packed else out

    return attend


def make_mask_mod(problem: Problem) -> MaskMod | None:
    """Return the mask_mod that a user would write for the mask; None if all keys are visible."""
    shape = problem.shape
    kind = shape.mask.kind
    if shape.documents:
        return _in_documents(problem.document_ids, causal=kind == "causal")
    if kind == "full":
        return None
    if kind == "causal":
        shift = shape.seqlen_k - shape.seqlen_q
        return lambda _batch, _head, i, j: i + shift >= j
    if kind == "block-causal":
        queries, keys = (problem.block_ids(x) for x in (shape.seqlen_q, shape.seqlen_k))
        return lambda _batch, _head, i, j: keys[j] <= queries[i]
    if kind == "random":
        visible = problem.random_mask
        return lambda _batch, _head, i, j: visible[i, j]
    low, high = problem.intervals
    return lambda _batch, _head, i, j: (low[i] <= j) & (j < high[i])


def _in_documents(ids: torch.Tensor, *, causal: bool) -> MaskMod:
    if causal:
        return lambda _batch, _head, i, j: (ids[i] == ids[j]) & (i >= j)
    return lambda _batch, _head, i, j: ids[i] == ids[j]
