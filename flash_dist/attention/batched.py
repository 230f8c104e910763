"""Attention over a batch of sequences, in flash-attention's terms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..kernels.problem import Problem
from ..masks.inputs import require_bools
from .arguments import choose_mask, choose_scale, prepare_inputs
from .autograd import attend
from .dropout.choice import choose_dropout
from .dropout.dropped import find_probs
from .results import choose_result, returns_lse
from .scores import choose_scores, join_bias
from .unsupported import are_defaults, check_others

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..kernels.choices import Precision
    from ..masks import BlockMask, IntervalMask
    from .arguments import Window
    from .results import Flag, Result
    from .unsupported import Others

Tensor = torch.Tensor


@returns_lse
def flash_attn_func(  # noqa: D417, PLR0913, PLR0917 - flash-attention's signature
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,  # noqa: ARG001 - every call is
    return_attn_probs: Flag = False,
    *,
    mask: BlockMask | IntervalMask | None = None,
    return_lse: Flag = False,
    return_max_logit: Flag = False,
    batch_invariant: bool = False,
    float32_precision: Precision | None = None,
    match_kvcache: bool | None = None,
    bias: Tensor | None = None,
    **others: Unpack[Others],
) -> Result:
    """Attention without storing the score matrix: softmax(q @ k.T * softmax_scale) @ v.

    Differentiable once and deterministic: forward and backward give the same bits on every run. The
    order of summation depends only on shapes, the mask, the workspace budget and properties of the
    GPU (number of multiprocessors, shared memory). The rest of the batch never changes out or lse
    of a sequence. It may change the sequence's gradients, unless `batch_invariant` is True.

    The backward stores an intermediate result (dS, 16 bits per visible score) in a workspace of at
    most `FLASH_DIST_WORKSPACE_MB` MiB (1536 by default), and works in chunks if dS does not fit.
    With a budget of 0, or if chunks would leave the GPU idle, the backward recomputes dS instead.
    Another budget may give other bits. docs/memory.md has the formula for all memory of the
    backward.

    CPU tensors are computed in plain torch, which stores all scores.

    The arguments are those of flash-attention 2, in its order and with its defaults; mask,
    return_lse, return_max_logit, batch_invariant, float32_precision, match_kvcache and bias are
    our additions, keyword-only. Unsupported arguments are accepted if their values have no effect.
    This includes the arguments of flash-attention 3 and 4, as keywords (num_splits 0 or 1, pack_gqa
    and so on). Sinks are supported. Every call is deterministic, whatever `deterministic` is.

    Args:
        q: [batch, seqlen_q, num_heads_q, head_dim] or
            [batch, seqlen_q, num_heads_kv, heads_per_kv, head_dim]; float16, bfloat16 (not on
            compute capability 7.5) or float32, on the CPU also float64. head_dim is at most 512, in
            float32 on a GPU and on compute capability 7.5 at most 256. On a GPU the head_dim axis
            is contiguous, and all other strides are multiples of 16 bytes. If the address is not a
            multiple of 16 bytes, the tensor is copied. If head_dim is not a multiple of 8, any
            strides are allowed: q, k and v are copied and padded with columns of zeros. Under
            torch.autocast, q, k and v are cast to its dtype. If the groups come first, [batch,
            seqlen_q, groups, num_heads_kv, head_dim], pass `q.transpose(2, 3)`.
        k: [batch, seqlen_k, num_heads_kv, head_dim], same dtype and device. num_heads_kv divides
            num_heads_q; query head h reads kv head h // (num_heads_q // num_heads_kv). May have a
            heads_per_kv axis before head_dim, expanded (stride 0). autograd then sums the gradient
            over that axis, which takes memory, so prefer 4 dimensions.
        v: [batch, seqlen_k, num_heads_kv, head_dim_v], otherwise like k. head_dim_v is at most
            head_dim.
        dropout_p: Fraction of the weights that are set to 0, at least 0 and less than 1, rounded to
            a multiple of 1 / 65536. The other weights are divided by 1 - dropout_p. `dropout_mask`
            returns which weights are set to 0.
        softmax_scale: Factor on the scores, positive. Defaults to head_dim ** -0.5.
        causal: Query i attends to key j if j <= i + seqlen_k - seqlen_q: the mask is aligned to the
            bottom right.
        window_size: (left, right), -1 or None for no bound: query i attends to key j if i - left <=
            j - (seqlen_k - seqlen_q) <= i + right. If causal is True, right is 0. A tensor of two
            integers is read on the host, which waits if the tensor is on a GPU.
        softcap: A scaled score s becomes softcap * tanh(s / softcap), before the mask; 0 or None:
            no cap.
        alibi_slopes: [num_heads_q] or [batch, num_heads_q], float32, without a gradient. After the
            soft cap and before the mask, slope * abs(i + seqlen_k - seqlen_q - j) is subtracted
            from the score of query i and key j.
        mask: BlockMask or IntervalMask of the visible keys, instead of causal and window_size.
            `mask & BlockMask.causal()` is a mask that is also causal. torch.compile can make an
            IntervalMask within a graph.
        return_attn_probs: Return (out, lse, None); with dropout (out, lse, S_dmask), for tests:
            exp(score - lse), negative where dropped, [batch, num_heads_q, seqlen_q, seqlen_k].
        return_lse: Return (out, lse).
        return_max_logit: Also return max_logit, as the last value: (out, max_logit) or (out, lse,
            max_logit). This does not change the bits of out and lse. On Hopper the kernel that
            computes out also finds max_logit if q is bfloat16, head_dim is 64, 128 or 256 (or 192
            with head_dim_v 128), each query attends to one interval of keys, and softcap,
            alibi_slopes and bias are not used. Other calls compute the scores twice. Not supported
            with match_kvcache or dropout.
        batch_invariant: Whether the gradients of a sequence must not depend on the rest of the
            batch. out and lse never do. If True, the backward recomputes scores (seven matrix
            products instead of five), and leaves multiprocessors idle if a small batch has few kv
            heads.
        float32_precision: "tf32x3" or "ieee", for float32 matrix products; None: the choice of
            `flash_dist.float32_precision`.
        match_kvcache: Whether out and lse have the bits of `flash_attn_with_kvcache`; None: the
            choice of `flash_dist.match_kvcache`.
        bias: Tensor that broadcasts to [batch, num_heads_q, seqlen_q, seqlen_k] and is added to
            the scores after ALiBi and before the mask; dtype of q or float32, other dtypes are
            cast. A value of -65504 or less, also -inf, masks the key. NaN or inf makes the whole
            row NaN. Differentiable: its gradient is summed in float32 over the axes along which the
            bias is broadcast, in an order that depends only on the shapes and the device. Not
            supported with softcap or match_kvcache.
        learnable_sink: Keyword-only, [num_heads_q], any floating point dtype. It adds one score to
            the softmax of each row. The mask does not apply to this score, and it has no value
            vector. Differentiable: its gradient is summed in float32 over batch and queries, in an
            order that depends only on the shapes and the device. `s_aux` is another name for this
            argument.

    Returns:
        out: Like q, with head_dim_v, contiguous. A row without visible keys is zero.
        lse: [batch, num_heads_q, seqlen_q], float32 (float64 for float64 inputs), only if
            `return_lse` or `return_attn_probs`: the natural logarithm of the sum of exp(scores),
            including the sink as in flash-attention 4; -inf for a row without visible keys and
            without a sink. `lse + (-(sink - lse).exp()).log1p()` is the lse of the keys alone.
            Differentiable.
        max_logit: [num_heads_q], float32 (float64 for float64 inputs), only if `return_max_logit`,
            for MuonClip and QK-clip: the largest score of each query head over batch, queries and
            visible keys. Scores are the inputs of the softmax: scaled, after softcap, alibi_slopes
            and bias, without the sink. -inf for a head without visible keys, NaN if a score is NaN.
            It has no gradient. If batch or tokens are sharded, take the maximum over the ranks.

    Raises:
        TypeError: An argument is not a tensor, mask is neither a BlockMask nor an IntervalMask, a
            dtype is not supported, or a keyword argument is unknown.
        ValueError: Shapes, devices, strides, window_size, softmax_scale, softcap, slopes, sinks
            or bias do not fit, mask is for another shape, both a mask and causal or window_size are
            given, or an unsupported argument has a value with an effect.
        FlashDistError: This build has no code that runs on the GPU; the message names the arch
            set to install.
    """
    if (
        not type(return_lse)
        is type(return_attn_probs)
        is type(return_max_logit)
        is type(batch_invariant)
        is bool
    ):
        require_bools(
            return_lse=return_lse,
            return_attn_probs=return_attn_probs,
            return_max_logit=return_max_logit,
            batch_invariant=batch_invariant,
        )
    plain = not others and bias is None and are_defaults(dropout_p, softcap, alibi_slopes)
    if not plain:
        check_others(flash_attn_func, others)
    q, k, v = prepare_inputs(q, k, v)
    scores = dropout = None
    if not plain:
        scores = choose_scores(q, softcap, alibi_slopes, others)
        if bias is not None:
            scores = join_bias(scores, bias, q, k.shape[1])
        dropout = choose_dropout(q, dropout_p)
    mask_or_band = choose_mask(mask, window_size, causal=causal)
    softmax_scale = choose_scale(softmax_scale, q.shape[-1])
    problem = Problem.of(
        q,
        mask_or_band,
        softmax_scale,
        scores=scores,
        batch_invariant=batch_invariant,
        float32_precision=float32_precision,
        match_kvcache=match_kvcache,
        max_logit=return_max_logit,
        dropout=dropout,
    )
    wants_lse = return_lse or return_attn_probs
    out, lse, *rest = attend(q, k, v, problem, wants_lse=wants_lse)
    if not (wants_lse or return_max_logit):
        return out
    probs = find_probs(q, k, lse, problem) if return_attn_probs else None
    return choose_result(
        out, lse, *rest, return_lse=return_lse, return_attn_probs=return_attn_probs, probs=probs
    )
