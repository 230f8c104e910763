"""Operators under the names that earlier versions used; each calls a current operator.

torch.export, AOTInductor and Inductor's disk cache save an operator by its name and schema.
flash_dist itself does not call the operators of this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from .budget import BUDGET_NOW
from .scores import OF_CACHES, PLAIN

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor

_QKV: Final = "Tensor q, Tensor k, Tensor v, "
_SAVED: Final = f"Tensor dout, {_QKV}Tensor out, Tensor lse, Tensor? dlse, "
_BAND: Final = (
    "int[] mask, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, "
)
_PLAN: Final = "Tensor plan, SymInt batches, SymInt heads, bool causal, "
_SCORES: Final = ", float softcap, Tensor? alibi_slopes, Tensor? sinks"
_OUT: Final = " -> (Tensor out, Tensor lse)"
_GRADIENTS: Final = " -> (Tensor dq, Tensor dk, Tensor dv)"
_WITH_SINKS: Final = " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)"
_NO: Final = False


def register(library: torch.library.Library) -> None:
    """Declare the operators as CompositeImplicitAutograd, so that they need no other kernels."""
    for schema, call in OPERATORS.items():
        library.define(schema)
        library.impl(schema.partition("(")[0], call, "CompositeImplicitAutograd")


def _now(name: str) -> Any:  # noqa: ANN401 - torch.ops.X.Y
    return getattr(torch.ops.flash_dist, name)


def _fwd(*call: Any) -> Any:  # noqa: ANN401 - the operator's schema, as below
    return _now("attention")(*call)


def _bwd(*call: Any) -> Any:  # noqa: ANN401
    return _now("attention_backward")(*call)[:3]


def _scored_bwd(*call: Any) -> Any:  # noqa: ANN401
    return _now("attention_backward")(*call)


def _of(handle: int) -> tuple[Any, ...]:
    """Return the masked operators' arguments from `plan` to `causal`, for a BlockMask."""
    return None, handle, 1, 1, False


def _masked_fwd(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> Any:  # noqa: ANN401
    handle, softmax_scale, keep, *how = call
    return _now("attention_masked")(q, k, v, *_of(handle), softmax_scale, keep, _NO, *how)


def _masked_scored_bwd(*call: Any) -> Any:  # noqa: ANN401
    handle, *how = call[7:]
    return _now("attention_masked_backward")(*call[:7], *_of(handle), *how)


def _masked_bwd(*call: Any) -> Any:  # noqa: ANN401
    return _masked_scored_bwd(*call)[:3]


def _interval_fwd(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> Any:  # noqa: ANN401
    plan, batches, heads, causal, softmax_scale, batch_invariant, *how = call
    mask = plan, 0, batches, heads, causal
    return _now("attention_masked")(q, k, v, *mask, softmax_scale, _NO, batch_invariant, *how)


def _interval_scored_bwd(*call: Any) -> Any:  # noqa: ANN401
    plan, batches, heads, causal, softmax_scale, *how = call[7:]
    mask = plan, 0, batches, heads, causal
    return _now("attention_masked_backward")(*call[:7], *mask, softmax_scale, BUDGET_NOW, *how)


def _interval_bwd(*call: Any) -> Any:  # noqa: ANN401
    return _interval_scored_bwd(*call)[:3]


def _decode_mla(q: Tensor, k_cache: Tensor, head_dim_v: int, *call: Any) -> Any:  # noqa: ANN401
    cache_seqlens, block_table, softmax_scale, causal, budget = call
    where = cache_seqlens, None, None, block_table, None, 0, 0
    band = -1, 0 if causal else -1
    numbers = softmax_scale, *band, budget, *PLAIN[:OF_CACHES], head_dim_v
    return _now("decode")(q, k_cache, None, *where, *numbers)


OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    f"fwd({_QKV}Tensor? mask_data, {_BAND}float softmax_scale, bool ieee=False){_OUT}": _fwd,
    f"scored_fwd({_QKV}Tensor? mask_data, {_BAND}float softmax_scale, bool ieee{_SCORES}){_OUT}": (
        _fwd
    ),
    f"bwd({_SAVED}Tensor? mask_data, Tensor? mask_slots, {_BAND}float softmax_scale, int budget, "
    f"bool batch_invariant, bool ieee=False){_GRADIENTS}": _bwd,
    f"scored_bwd({_SAVED}Tensor? mask_data, Tensor? mask_slots, {_BAND}float softmax_scale, "
    f"int budget, bool batch_invariant, bool ieee{_SCORES}){_WITH_SINKS}": _scored_bwd,
    f"masked_fwd({_QKV}SymInt handle, float softmax_scale, bool keep, bool ieee=False){_OUT}": (
        _masked_fwd
    ),
    f"masked_scored_fwd({_QKV}SymInt handle, float softmax_scale, bool keep, bool ieee{_SCORES})"
    f"{_OUT}": _masked_fwd,
    f"masked_bwd({_SAVED}SymInt handle, float softmax_scale, int budget, bool batch_invariant, "
    f"bool ieee=False){_GRADIENTS}": _masked_bwd,
    f"masked_scored_bwd({_SAVED}SymInt handle, float softmax_scale, int budget, "
    f"bool batch_invariant, bool ieee{_SCORES}){_WITH_SINKS}": _masked_scored_bwd,
    f"interval_fwd({_QKV}{_PLAN}float softmax_scale, bool batch_invariant, bool ieee){_OUT}": (
        _interval_fwd
    ),
    f"interval_scored_fwd({_QKV}{_PLAN}float softmax_scale, bool batch_invariant, bool ieee"
    f"{_SCORES}){_OUT}": _interval_fwd,
    f"interval_bwd({_SAVED}{_PLAN}float softmax_scale, bool batch_invariant, bool ieee)"
    f"{_GRADIENTS}": _interval_bwd,
    f"interval_scored_bwd({_SAVED}{_PLAN}float softmax_scale, bool batch_invariant, bool ieee"
    f"{_SCORES}){_WITH_SINKS}": _interval_scored_bwd,
    "decode_mla(Tensor q, Tensor k_cache, SymInt head_dim_v, Tensor? cache_seqlens, "
    "Tensor? block_table, float softmax_scale, bool causal, int budget) -> (Tensor out, "
    "Tensor lse)": _decode_mla,
}
