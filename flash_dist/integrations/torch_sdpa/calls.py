"""Translate calls of torch's flash operators into calls of ours."""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

import torch

from ...attention.arguments import SCALES, may_look, read_cu_seqlens
from ...attention.decoding.varlen import Keys, attend_to_cache, check_packed
from ...attention.layouts import (
    DENSE,
    HEAD_DIM_STEP,
    PACKED,
    TORCH,
    Layout,
    Names,
    check_layouts,
)
from ...attention.packed import check_values
from ...attention.support import require_kernels
from ...kernels import operators
from ...kernels.boundaries import BoundariesError, check_boundaries
from ...kernels.cache import Packed
from ...kernels.problem import Packing, Problem
from ...masks import Band
from ...masks.inputs import MAX_SEQLEN
from .reasons import tell

Tensor = torch.Tensor
Triple = tuple[Tensor, Tensor, Tensor]
Bounds = tuple[Tensor | None, Tensor | None, int, int]

_NAMES: Final = Names(
    "query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"
)  # argument names of `varlen_attn`


class Call(NamedTuple):
    """The arguments of a call of our operators."""

    q: Tensor  # [batch, seqlen_q, num_heads_q, head_dim], or [total_q, ...] if packed
    k: Tensor  # [batch, seqlen_k, num_heads_kv, head_dim], or [total_k, ...]
    v: Tensor
    problem: Problem

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return out, which is contiguous, and lse.

        lse is [batch, num_heads_q, seqlen_q], or [num_heads_q, total_q] if packed.
        """
        out, lse = operators.attend(*self)
        return out, lse

    def backward(self, dout: Tensor, out: Tensor, lse: Tensor) -> Triple:
        """Return contiguous dq, dk and dv."""
        saved = *self[:3], out, lse
        dq, dk, dv, _ = operators.differentiate(dout, saved, None, self.problem)
        return dq, dk, dv


class Options(NamedTuple):
    """Arguments of torch's operators that do not belong to a single tensor."""

    dropout_p: float  # only 0 is supported
    is_causal: bool  # aligned to the bottom right
    scale: float | None  # factor on the scores, None for head_dim ** -0.5
    window: tuple[int | None, int | None]  # keys to the left and right, None or -1 for all

    @property
    def band(self) -> Band:
        """The mask that `is_causal` and `window` describe."""
        left, right = (_read_side(side) for side in self.window)
        return Band(left, 0 if self.is_causal else right)

    def choose_scale(self, head_dim: int) -> float:
        """Return the factor on the scores."""
        return head_dim**-0.5 if self.scale is None else self.scale


def find_call(tensors: Triple, bounds: Bounds, options: Options, **others: object) -> Call | None:
    """Translate a call of torch's operators into a call of ours; return None if unsupported.

    Args:
        tensors: query [batch, seqlen_q, num_heads_q, head_dim], or [total_q, num_heads_q,
            head_dim]; key and value likewise, with seqlen_k and num_heads_kv.
        bounds: cum_seq_q and cum_seq_k (None for tensors with a batch axis), max_q and max_k.
        options: Further arguments.
        others: Arguments that are supported only if None or False.

    Raises:
        BoundariesError: Values of cum_seq are wrong; on a GPU only checked if FLASH_DIST_CHECK=1.
        FlashDistError: This build has no code that runs on the GPU.
    """
    query, key, value = tensors
    packing = _read_packing(query, *bounds)
    tokens = DENSE if packing is None else PACKED
    reason = _find_reason(options, others)
    if not reason and packing is None and (bounds[0] is not None or bounds[1] is not None):
        reason = "cum_seq that are no two int32 tensors of one length"
    readable = None if reason else _make_supported(query, key, value, tokens)
    if readable is None:
        tell(reason or "shapes or dtypes such as it was given")
        return None
    if packing is not None and may_look(query):
        check_values(packing, query, key, _NAMES)
    head_dim = query.shape[-1]
    if query.device.type == "cuda":
        require_kernels(query.device.index, query.dtype, head_dim, head_dim)
    scale = options.choose_scale(head_dim)
    return Call(*readable, Problem.of(readable[0], options.band, scale, packing=packing))


def infer(
    tensors: Triple, bounds: Bounds, keys: Keys, options: Options, **others: object
) -> tuple[Tensor, Tensor] | None:
    """Return out and lse of packed queries; None if our operators do not support the call.

    The keys are in pages, or they are packed and each sequence uses its first seqused_k keys.

    Args:
        tensors: query [total_q, num_heads_q, head_dim]; key [num_pages, page_size, num_heads_kv,
            head_dim], or [total_k, num_heads_kv, head_dim]; value like key.
        bounds: As in `find_call`; its cum_seq_k is ignored.
        keys: cum_seq_k, and at least one of seqused_k and block_table.
        options: Further arguments.
        others: Arguments that are supported only if None or False.

    Raises:
        BoundariesError: As in `find_call`.
        FlashDistError: This build has no code that runs on the GPU.
    """
    query = tensors[0]
    cum_seq_q, _, max_q, _ = bounds
    reason = _find_reason(options, others)
    if not reason and cum_seq_q is None:
        reason = "keys in pages without cum_seq_q"
    if reason:
        tell(reason)
        return None
    try:
        check_packed(*tensors, paged=keys.block_table is not None, names=TORCH)
        ends = read_cu_seqlens("cum_seq_q", cum_seq_q, query, TORCH)
        packed = Packed(ends, min(max(max_q, 0), MAX_SEQLEN))
        if may_look(query):
            tokens = query.shape[0]
            check_boundaries("query", ends.tolist(), tokens, packed[1], ("cu_seq_q", "max_q"))
        how = options.choose_scale(query.shape[-1]), None
        return attend_to_cache(tensors, packed, keys, options.band, how)
    except BoundariesError:  # torch's kernel would compute wrong results without an error
        raise
    except (TypeError, ValueError) as error:
        tell(str(error))
        return None


def _find_reason(options: Options, others: dict[str, object]) -> str:
    """Return a phrase for an argument that our operators do not support; empty if there is none."""
    if options.dropout_p != 0.0:
        return "dropout"
    scale = options.scale
    if scale is not None and not SCALES[0] < scale < SCALES[1]:
        return f"a scale of {scale}"
    unsupported = (
        name for name, value in others.items() if value is not None and value is not False
    )
    return next(unsupported, "")


def _read_side(side: int | None) -> int:
    return -1 if side is None or not 0 <= side <= MAX_SEQLEN else side


def _read_packing(
    query: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int
) -> Packing | None:
    if cum_seq_q is None or cum_seq_k is None or cum_seq_q.shape != cum_seq_k.shape:
        return None
    for x in (cum_seq_q, cum_seq_k):
        if x.dtype != torch.int32 or x.dim() != 1 or len(x) == 0 or x.device != query.device:
            return None
    longest = (min(max(number, 0), MAX_SEQLEN) for number in (max_q, max_k))
    return Packing(cum_seq_q.contiguous(), cum_seq_k.contiguous(), *longest)


def _make_supported(query: Tensor, key: Tensor, value: Tensor, tokens: int) -> Triple | None:
    """Return the tensors, copied if kernels cannot read them in place; None if unsupported."""
    if query.dim() != tokens + 2 or query.shape[-1] != value.shape[-1]:
        return None  # torch's meta kernels report a result with the head_dim of query
    if query.shape[-1] % HEAD_DIM_STEP:  # torch's function pads head_dim before it calls operators
        return None
    tensors = query, key, value
    if not _are_supported(*map(Layout.of, tensors), tokens):
        tensors = query.contiguous(), key.contiguous(), value.contiguous()
        if not _are_supported(*map(Layout.of, tensors), tokens):
            return None
    return tensors


@lru_cache(maxsize=4096)
def _are_supported(q: Layout, k: Layout, v: Layout, tokens: int) -> bool:
    """Return whether our operators support tensors of these layouts."""
    try:
        check_layouts(q, k, v, tokens)
    except (TypeError, ValueError):
        return False
    return True
