"""Attention over packed sequences of different lengths, in flash-attention's terms."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from ..kernels.boundaries import BoundariesError, check_boundaries
from ..kernels.cache import Packed
from ..kernels.problem import Packing, Problem
from ..masks import Band, BlockMask
from ..masks.inputs import MAX_SEQLEN, Shape, require_bools
from ..toolkit.errors import show
from .arguments import (
    choose_band,
    choose_mask,
    choose_scale,
    describe_value,
    is_known,
    is_within,
    may_look,
    prepare_inputs,
    read_cu_seqlens,
    read_whole,
    require_tensor,
)
from .autograd import attend
from .decoding.used import check_used, repeat, split
from .decoding.varlen import Keys, attend_to_cache, check_packed
from .dropout.choice import NOT_CACHED, choose_dropout, refuse_dropout
from .dropout.dropped import find_probs
from .layouts import NAMES, PACKED, Names
from .results import choose_result, returns_lse
from .scores import choose_scores, join_packed_bias
from .transforms import find_differentiated
from .unsupported import are_defaults, check_others

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Unpack

    from ..kernels.choices import Precision
    from ..kernels.scores import Scores
    from ..masks import IntervalMask
    from .arguments import Triple, Window
    from .results import Flag, Result
    from .unsupported import Others

Tensor = torch.Tensor


@returns_lse
def flash_attn_varlen_func(  # noqa: D417, PLR0913, PLR0917 - flash-attention's signature
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float | None = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,  # noqa: ARG001 - every call is
    return_attn_probs: Flag = False,
    block_table: Tensor | None = None,
    *,
    return_lse: Flag = False,
    return_max_logit: Flag = False,
    batch_invariant: bool = False,
    float32_precision: Precision | None = None,
    match_kvcache: bool | None = None,
    mask: BlockMask | IntervalMask | None = None,
    bias: Tensor | None = None,
    **others: Unpack[Others],
) -> Result:
    """Attention within each of several sequences that are packed one after the other.

    Sequence b has the queries from cu_seqlens_q[b] up to but excluding cu_seqlens_q[b + 1], and
    keys likewise. Either may be empty. Tokens after the last sequence are allowed: their out and
    gradients are 0, their lse is -inf. Everything else is as in `flash_attn_func`.

    With block_table, keys and values are read from pages. With seqused_k (keyword-only), sequence b
    has only its first seqused_k[b] keys. Both give the bits of `flash_attn_with_kvcache`. Pages
    have no gradients: a call with block_table that needs gradients raises an error. A call without
    block_table that needs gradients gives the bits of packed sequences instead. With seqused_k, the
    gradients of unused keys are 0.

    cu_seqlens must begin with 0 and must not decrease. They must not exceed total_q and total_k,
    and no sequence may be longer than max_seqlen. This is checked on the CPU, and on a GPU with
    `FLASH_DIST_CHECK=1`, which waits. Without this check, longer sequences are cut off at
    max_seqlen and at the ends of the tensors. Decreasing cu_seqlens give undefined results, but
    nothing outside of the tensors is accessed.

    A max_seqlen may be a tensor of one integer, which is read in every call. If the tensor is on a
    GPU, this waits, and fails while a CUDA graph is captured, so prefer ints.

    Args:
        q: [total_q, num_heads_q, head_dim] or [total_q, num_heads_kv, heads_per_kv, head_dim], the
            latter not with block_table or seqused_k.
        k: [total_k, num_heads_kv, head_dim], same dtype and device; a heads_per_kv axis before
            head_dim must be expanded (stride 0). With block_table [num_pages, page_size,
            num_heads_kv, head_dim], page_size a multiple of 16.
        v: [total_k, num_heads_kv, head_dim_v], otherwise like k.
        cu_seqlens_q: [batch + 1], int32 on q's device.
        cu_seqlens_k: [batch + 1], int32 on q's device. With block_table, the differences between
            its elements are the numbers of keys; it may be None if seqused_k is given, too.
        max_seqlen_q: At least the number of queries of the longest sequence; an int, or a tensor of
            one integer.
        max_seqlen_k: At least the number of keys of the longest sequence, likewise.
        dropout_p: As in `flash_attn_func`; 0 with block_table or seqused_k.
        softmax_scale: Factor on the scores, positive. Defaults to head_dim ** -0.5.
        causal: Aligned to the bottom right of each sequence.
        window_size: (left, right), -1 or None for no bound, aligned to the bottom right of each
            sequence.
        softcap: As in `flash_attn_func`.
        alibi_slopes: Likewise, with the distances within each sequence.
        block_table: [batch, pages], int32: the pages of each sequence, one after the other.
        return_attn_probs: As in `flash_attn_func`; S_dmask is [batch, num_heads_q, max_seqlen_q,
            max_seqlen_k].
        return_lse: Return (out, lse).
        return_max_logit: Also return max_logit, as `flash_attn_func` does. Not supported with
            block_table or seqused_k.
        batch_invariant: Whether the gradients of a sequence must not depend on the other sequences.
            Not supported with a packed mask.
        mask: A result of `BlockMask.packed` or `IntervalMask.packed` for the same cu_seqlens, or a
            BlockMask that is a band, which applies to each sequence. With a packed mask, the
            kernels process the pack as one sequence: the bits of a sequence depend on where it
            begins in the pack, a NaN may spread to sequences within 64 keys, and the lse of a token
            that belongs to no sequence is the sink of the head, if there is one. alibi_slopes,
            bias, block_table and seqused_k must then be None, and dropout_p 0.
        float32_precision: As in `flash_attn_func`.
        match_kvcache: Likewise.
        bias: Tensor that broadcasts to [num_heads_q, max_seqlen_q, max_seqlen_k]: query i and key j
            of each sequence, counted from its first token, get bias[:, i, j]. It may have more
            queries and keys, which are not read. Otherwise as in `flash_attn_func`: the gradient is
            also summed over all sequences, and is 0 where no sequence has scores. A NaN or inf in
            the bias may spread to gradients of sequences too short to use it. Not supported with
            block_table or seqused_k.
        learnable_sink: Keyword-only, as in `flash_attn_func`. `s_aux` is another name for it.

    Returns:
        out: Like q, with head_dim_v, contiguous.
        lse: [num_heads_q, total_q], float32 (float64 for float64 inputs), only if `return_lse` or
            `return_attn_probs`.
        max_logit: [num_heads_q], over all sequences, only if `return_max_logit`; as in
            `flash_attn_func`.

    Raises:
        TypeError: An argument is not a tensor, max_seqlen is not an integer, or a dtype is not
            supported.
        ValueError: Shapes, devices, alignment, window_size or softmax_scale do not fit, checked
            values of cu_seqlens are wrong, or an unsupported argument has a value with an effect.
        FlashDistError: This build has no code that runs on the GPU (the message names the arch set
            to install), or a call with block_table needs gradients.
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
    plain = bias is None and are_defaults(dropout_p, softcap, alibi_slopes)
    seqused_k = others.pop("seqused_k", None)
    if others:
        check_others(flash_attn_varlen_func, others)
    if block_table is not None or seqused_k is not None:
        _require_no_mask(mask)
        _require_no_max_logit(return_max_logit=return_max_logit)
        _require_no_bias(bias)
        refuse_dropout(dropout_p, "block_table" if seqused_k is None else "seqused_k", NOT_CACHED)
        check_packed(q, k, v, paged=block_table is not None)
        if block_table is not None or _reads_cache(q, k, v, others):
            keys = Keys(cu_seqlens_k, seqused_k, block_table)
            packed = _read_queries(q, cu_seqlens_q, max_seqlen_q, max_seqlen_k)
            band = choose_band(window_size, causal=causal)
            scale = choose_scale(softmax_scale, q.shape[-1])
            scores = choose_scores(q, softcap, alibi_slopes, others, packed.cu_seqlens_q)
            out, lse = attend_to_cache((q, k, v), packed, keys, band, (scale, scores))
            return choose_result(
                out, lse, return_lse=return_lse, return_attn_probs=return_attn_probs
            )
    q, k, v = prepare_inputs(q, k, v, PACKED)
    arguments = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    packing = read_packing(q, k, arguments, used=seqused_k is not None)
    dropout = None if plain else choose_dropout(q, dropout_p)
    scores = None
    if others or not plain:
        scores = choose_scores(q, softcap, alibi_slopes, others, packing.cu_seqlens_q)
    if bias is not None:
        scores = join_packed_bias(scores, bias, q, k, packing)
    if seqused_k is not None:
        require_tensor("seqused_k", seqused_k)
        check_used(seqused_k, packing, q, looks=may_look(q))
        packing, scores = split(packing, seqused_k, k), repeat(scores)
    softmax_scale = choose_scale(softmax_scale, q.shape[-1])
    chosen = _choose_mask(mask, window_size, causal=causal)
    is_one = mask is not None and not isinstance(chosen, Band)
    if is_one:
        _check_mask(chosen, packing, scores, batch_invariant=batch_invariant)
        refuse_dropout(dropout_p, "a mask of packed sequences", "it would go by places in the pack")
        q, k, v = _join(q, k, v, chosen, packing)
    problem = Problem.of(
        q,
        chosen,
        softmax_scale,
        packing=None if is_one else packing,
        scores=scores,
        batch_invariant=batch_invariant,
        float32_precision=float32_precision,
        match_kvcache=match_kvcache,
        max_logit=return_max_logit,
        dropout=dropout,
    )
    wants_lse = return_lse or return_attn_probs
    out, lse, *rest = attend(q, k, v, problem, wants_lse=wants_lse)
    probs = find_probs(q, k, lse, problem) if return_attn_probs else None
    if is_one:
        out, lse = out.squeeze(0), lse.squeeze(0) if wants_lse else lse
    return choose_result(
        out, lse, *rest, return_lse=return_lse, return_attn_probs=return_attn_probs, probs=probs
    )


def _require_no_mask(mask: object) -> None:
    if mask is not None:
        message = (
            f"mask must be None with block_table and seqused_k, got {show(mask)}"
            "\n\nhint: an IntervalMask may hide keys itself"
        )
        raise ValueError(message)


def _require_no_max_logit(*, return_max_logit: bool) -> None:
    if return_max_logit:
        message = (
            "return_max_logit must be False with block_table and seqused_k, got True"
            "\n\nhint: packed keys, without these, have max_logit"
        )
        raise ValueError(message)


def _require_no_bias(bias: object) -> None:
    if bias is not None:
        message = (
            f"bias must be None with block_table and seqused_k, got {describe_value(bias)}"
            "\n\nhint: packed keys, without these, have a bias"
        )
        raise ValueError(message)


def _choose_mask(
    mask: BlockMask | IntervalMask | None, window_size: Window, *, causal: bool
) -> Band | BlockMask | IntervalMask:
    """Return the band that applies to each sequence, or a mask of the whole pack."""
    if mask is None:
        return choose_band(window_size, causal=causal)
    chosen = choose_mask(mask, window_size, causal=causal)
    if isinstance(chosen, BlockMask) and chosen.band is not None:
        return chosen.band
    return chosen


def _check_mask(
    mask: Any,  # noqa: ANN401 - any mask but a band
    packing: Packing,
    scores: Scores | None,
    *,
    batch_invariant: bool,
) -> None:
    """Raise ValueError if the mask does not separate sequences, or excludes another argument."""
    if not mask.is_packed:
        message = (
            f"mask must keep {packing.cu_seqlens_q.shape[0] - 1} packed sequences apart, got one "
            f"that does not: {mask!r}\n\nhint: `{type(mask).__name__}.packed` makes one, once"
        )
        raise ValueError(message)
    if batch_invariant:
        message = (
            "batch_invariant must be False with a mask of packed sequences, got True: tiles of 64 "
            "begin with the pack\n\nhint: `flash_attn_func` on each sequence has such bits"
        )
        raise ValueError(message)
    if scores is not None and scores.alibi_slopes is not None:
        message = (
            "alibi_slopes must be None with a mask of packed sequences, got slopes"
            "\n\nhint: `flash_attn_func` on each sequence takes both"
        )
        raise ValueError(message)
    if scores is not None and scores.bias is not None:
        message = (
            "bias must be None with a mask of packed sequences, got a tensor: the kernels then "
            "know no sequence\n\nhint: a mask that is a band, or `flash_attn_func` on each "
            "sequence, takes both"
        )
        raise ValueError(message)


def _join(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,  # noqa: ANN401 - any mask but a band
    packing: Packing,
) -> Triple:
    """Return packed q, k and v as one sequence, with a batch axis of size 1.

    Raises:
        ValueError: The mask was made for other sizes; raised only if values are checked.
        BoundariesError: The mask was made for other sequences; likewise.
    """
    if may_look(q):
        ends_q, ends_k = packing.cu_seqlens_q, packing.cu_seqlens_k
        if isinstance(mask, BlockMask):
            mask.sizes.require(Shape(1, math.prod(q.shape[1:-1]), q.shape[0], k.shape[0]))
            fits = mask.has_ends(ends_q.tolist(), ends_k.tolist())
        else:
            fits = mask.seqlen_q != q.shape[0] or mask.is_within(ends_q, ends_k)
        if not fits:
            message = (
                "mask must be made for the sequences of the call, got one for others: "
                f"cu_seqlens_q is {show(ends_q.tolist())}, cu_seqlens_k {show(ends_k.tolist())}"
            )
            raise BoundariesError(message)
    return q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)


def _reads_cache(q: Tensor, k: Tensor, v: Tensor, others: Mapping[str, object]) -> bool:
    """Return whether a call has keys and needs no gradients, as attention to a cache requires.

    The only tensors in `others` are sinks: other tensors have already raised an error.
    """
    if not torch.compiler.is_compiling() and k.shape[0] == 0:
        return False
    sinks = {name: x for name, x in others.items() if isinstance(x, torch.Tensor)}
    return find_differentiated(q=q, k=k, v=v, **sinks) is None


def _read_queries(
    q: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor | None,
) -> Packed:
    """Return the boundaries of packed queries whose keys are in a cache.

    max_seqlen_k is checked unless it is a tensor or None, but has no other effect.
    """
    if not isinstance(max_seqlen_k, (torch.Tensor, type(None))):
        _read_max_seqlen("max_seqlen_k", max_seqlen_k)
    ends = read_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q)
    packed = Packed(ends, _read_max_seqlen("max_seqlen_q", max_seqlen_q))
    if may_look(q):
        check_boundaries("q", ends.tolist(), q.shape[0], packed.max_seqlen_q)
    return packed


def read_packing(
    q: Tensor,
    k: Tensor,
    packing: tuple[Tensor, Tensor | None, int | Tensor, int | Tensor],
    names: Names = NAMES,
    *,
    used: bool = False,
) -> Packing:
    """Check and return the boundaries of packed queries and keys.

    Args:
        q: Packed queries, already checked.
        k: Packed keys, already checked.
        packing: cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k of the call.
        names: The caller's names of all arguments.
        used: Whether seqused_k limits the keys of a sequence.

    Raises:
        TypeError: A cu_seqlens is not an int32 tensor, or a max_seqlen is not an integer.
        ValueError: Shapes or devices do not fit, or a checked value is wrong.
    """
    longest_q = _read_max_seqlen(names.max_seqlen_q, packing[2])
    longest_k = _read_max_seqlen(names.max_seqlen_k, packing[3])
    if torch.compiler.is_compiling() and is_known(longest_q == longest_k):
        longest_k = longest_q  # torch.compile treats equal integers as one argument
    checked = Packing(
        read_cu_seqlens(names.cu_seqlens_q, packing[0], q, names),
        read_cu_seqlens(names.cu_seqlens_k, packing[1], q, names),
        longest_q,
        longest_k,
    )
    _check_packing(checked, names)
    if may_look(q):
        longest_k = k.shape[0] if used else longest_k
        check_values(checked._replace(max_seqlen_k=longest_k), q, k, names)
    return checked


def _check_packing(packing: Packing, names: Names) -> None:
    cu_seqlens_q, cu_seqlens_k, *_ = packing
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        message = (
            f"{names.cu_seqlens_q} and {names.cu_seqlens_k} must have the same length, "
            f"got {cu_seqlens_q.shape[0]} and {cu_seqlens_k.shape[0]}"
        )
        raise ValueError(message)


def check_values(packing: Packing, q: Tensor, k: Tensor, names: Names) -> None:
    """Check the values of cu_seqlens; waits if they are on a GPU.

    Raises:
        BoundariesError: A value is wrong.
    """
    for name, x, ends, longest, arguments in (
        (names.q, q, packing[0], packing[2], (names.cu_seqlens_q, names.max_seqlen_q)),
        (names.k, k, packing[1], packing[3], (names.cu_seqlens_k, names.max_seqlen_k)),
    ):
        check_boundaries(name, ends.tolist(), x.shape[0], longest, arguments)


def _read_max_seqlen(name: str, value: int | Tensor) -> int:
    """Return a max_seqlen as an int; reading it from a GPU waits.

    Raises:
        TypeError: It is not an integer.
        ValueError: It is not from 0 to MAX_SEQLEN.
    """
    number = read_whole(value)
    if number is None:
        message = f"{name} must be an int or a tensor with one, got {describe_value(value)}"
        raise TypeError(message)
    if not is_within(number, MAX_SEQLEN):
        message = f"{name} must be from 0 to {MAX_SEQLEN}, got {show(number)}"
        raise ValueError(message)
    return number
