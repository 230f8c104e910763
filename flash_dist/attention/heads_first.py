"""Shared code of the functions with torch's layout, [..., num_heads, seqlen, head_dim]."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..kernels.problem import Problem
from ..kernels.scores import Scores
from ..masks.inputs import require_bool
from .arguments import choose_scale, prepare_inputs, require_tensor
from .autograd import attend
from .dropout.choice import choose_dropout
from .layouts import DENSE, TORCH
from .scores import read_bias

if TYPE_CHECKING:
    from torch import Tensor

    from ..masks import Band, BlockMask, IntervalMask


def attend_heads_first(  # noqa: PLR0913 - one attention problem
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Band | BlockMask | IntervalMask,
    scale: float | None,
    *,
    enable_gqa: bool,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return out and lse for 4-D tensors in torch's layout. Axes are swapped without a copy.

    Args:
        tensors: query [batch, num_heads_q, seqlen_q, head_dim], key [batch or 1, num_heads_kv,
            seqlen_k, head_dim] and value [batch or 1, num_heads_kv, seqlen_k, head_dim_v].
        mask: Which keys are visible to each query.
        scale: Factor on the scores, None for head_dim ** -0.5.
        enable_gqa: Whether num_heads_kv may be less than num_heads_q.
        bias: Tensor that is added to the scores; broadcasts to [batch, num_heads_q, seqlen_q,
            seqlen_k].
        dropout_p: As in `flash_attn_func`.
    """
    query, key, value = tensors
    require_bool("enable_gqa", enable_gqa)
    if query.shape[1] != key.shape[1] and not enable_gqa:
        message = (
            "query and key must have the same number of heads unless enable_gqa, got "
            f"{query.shape[1]} and {key.shape[1]}\n\nhint: `enable_gqa=True`"
        )
        raise ValueError(message)
    batch = query.shape[0]
    if key.shape[0] == value.shape[0] == 1 != batch:
        key, value = (x.expand(batch, -1, -1, -1) for x in (key, value))
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    q, k, v = prepare_inputs(q, k, v, DENSE, TORCH)
    softmax_scale = choose_scale(scale, q.shape[-1], "scale")
    scores = dropout = None
    if bias is not None:
        shape = batch, query.shape[1], query.shape[2], key.shape[2]
        scores = Scores(bias=read_bias("attn_mask", bias, q, shape))
    if type(dropout_p) is not float or dropout_p != 0.0:
        dropout = choose_dropout(q, dropout_p)
    problem = Problem.of(q, mask, softmax_scale, scores=scores, dropout=dropout)
    out, lse = attend(q, k, v, problem)
    return out.transpose(1, 2), lse


def check_tensors(query: Tensor, key: Tensor, value: Tensor, dims: tuple[int, ...]) -> None:
    """Raise TypeError if an argument is not a tensor, ValueError for a wrong number of axes.

    Args:
        query: Queries.
        key: Keys, with as many axes as the queries.
        value: Values, likewise.
        dims: The allowed numbers of axes.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        require_tensor(name, x)
        if x.dim() not in dims or x.dim() != query.dim():
            allowed = " or ".join(map(str, dims))
            message = (
                f"query, key and value must all have {allowed} dimensions [..., num_heads, seqlen, "
                f"head_dim], got {name} with shape {list(x.shape)}"
            )
            raise ValueError(message)
