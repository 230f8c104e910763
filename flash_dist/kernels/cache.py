"""The operators on a cache of keys and values: `decode` and `append`.

csrc/binding/decode.cpp declares them and their CUDA kernels; cache_cpu.py has the CPU kernels. The
operators have no autograd formula: calls here have no gradients. `decode_no_lse` is `decode`
without lse and without rarely used arguments, which is cheaper in eager mode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.autograd.graph import increment_version

from . import cache_cpu, operators  # noqa: F401 - operators loads the extension
from .memory import raise_out_of_memory, warn_of_copies
from .scores import OF_CACHES, PLAIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..masks.band import Band
    from .cache_values import Cache
    from .scores import Scores

Tensor = torch.Tensor

_decode: Final[Any] = torch.ops.flash_dist.decode.default
_decode_no_lse: Final[Any] = torch.ops.flash_dist.decode_no_lse.default
_append: Final[Any] = torch.ops.flash_dist.append.default

for _name in ("decode", "decode_no_lse", "append"):
    torch.library.impl(f"flash_dist::{_name}", "CPU", getattr(cache_cpu, _name))


class Packed(NamedTuple):
    """Packed queries: where each sequence begins, and the maximum number of queries in one."""

    cu_seqlens_q: Tensor  # [batch + 1]
    max_seqlen_q: int


class Rotary(NamedTuple):
    """Rotary embeddings: cosines and sines of the angles of each position."""

    cos: Tensor  # [positions, rotary_dim / 2]
    sin: Tensor
    interleaved: bool  # columns 2j and 2j + 1 are a pair; else j and j + rotary_dim / 2


def decode(  # noqa: PLR0913 - one attention problem
    q: Tensor,
    cache: Cache,
    *,
    band: Band,
    softmax_scale: float,
    seqlen_new: int,
    budget: int,
    packed: Packed | None = None,
    scores: Scores | None = None,
    head_dim_v: int = 0,
    wants_lse: bool = True,
) -> tuple[Tensor, Any]:
    """Return out and lse of queries that attend to the keys of a cache.

    Args:
        q: [batch, seqlen_q, num_heads_q, head_dim]; packed, [total_q, num_heads_q, head_dim].
        cache: The cache, already with the new keys.
        band: Aligned to the bottom right.
        softmax_scale: Factor on the scores.
        seqlen_new: Number of keys just appended to each sequence, which cache.seqlens excludes.
        budget: Bytes of workspace, or BUDGET_NOW.
        packed: Where the queries of each sequence are; None: not packed.
        scores: Score modifications and sinks; None: none.
        head_dim_v: The first head_dim_v columns of the keys are the values (latent keys); 0: the
            values are in cache.v.
        wants_lse: If False, lse may be None.

    Returns:
        out: Like q with head_dim_v, contiguous.
        lse: [batch, num_heads_q, seqlen_q]; packed, [num_heads_q, total_q].
    """
    bare = packed is None and scores is None and not head_dim_v
    bare = bare and cache.batch_idx is None and cache.leftpad is None
    if bare and not wants_lse and not _is_watched():
        numbers = softmax_scale, band.left, band.right, seqlen_new, budget
        few = q, cache.k, cache.v, cache.seqlens, cache.block_table, *numbers
        return _call_eagerly(_decode_no_lse, few), None
    all_numbers = seqlen_new, softmax_scale, band.left, band.right, budget
    last: tuple[Any, ...] = (scores or ())[:OF_CACHES]
    values = cache.v if head_dim_v == 0 else None
    if values is None:
        last = *(scores or PLAIN)[:OF_CACHES], head_dim_v
    arguments = q, cache.k, values, *cache[2:], *(packed or (None, 0)), *all_numbers, *last
    out, lse = _call(_decode, arguments)
    return out, lse


def append(
    q: Tensor, cache: Cache, new: tuple[Tensor, Tensor], rotary: Rotary | None, *, advances: bool
) -> Tensor:
    """Append new keys and values to the sequences of a cache; return q, rotated if `rotary` is set.

    Args:
        q: [batch, seqlen_q, num_heads_q, head_dim].
        cache: The cache; it must have seqlens.
        new: k [batch, seqlen_new, num_heads_kv, head_dim] and v, with head_dim_v.
        rotary: Rotary embeddings; None: none. New key i has position cache.seqlens + i.
        advances: Whether query i has position cache.seqlens + i. If False, each query has position
            cache.seqlens.
    """
    angles = (None, None, False) if rotary is None else rotary
    where = cache.seqlens, cache.batch_idx, cache.block_table
    arguments = q, cache.k, cache.v, *new, *where, *angles, advances
    rotated: Tensor
    if torch.compiler.is_compiling():
        rotated = _call(_append, arguments)
    else:
        with torch._C._AutoDispatchBelowADInplaceOrView():  # noqa: SLF001 - faster than a redispatch by `_append_in_place`
            rotated = _call_eagerly(_append, arguments)
        increment_version((cache.k, cache.v))
    return q if rotary is None else rotated


def _append_in_place(keys: Any, *arguments: Any) -> Tensor:  # noqa: ANN401 - the operator's schema
    """Call `append`, then increment the versions of k_cache and v_cache.

    A backward that has saved one of these tensors then raises. torch generates such a kernel for
    its own in-place operators. This kernel runs in compiled graphs and in direct operator calls.
    """
    with torch._C._AutoDispatchBelowADInplaceOrView():  # noqa: SLF001 - as torch.library.custom_op
        below = keys & torch._C._after_ADInplaceOrView_keyset  # noqa: SLF001
        rotated: Tensor = _append.redispatch(below, *arguments)
    increment_version(arguments[1:3])
    return rotated


_library: Final = torch.library.Library("flash_dist", "FRAGMENT")
_library.impl("append", _append_in_place, "ADInplaceOrView", with_keyset=True)


def _is_watched() -> bool:
    """Return whether torch.compile, torch.jit.trace or a torch.dispatch mode may see the operator.

    Graphs and modes should get `decode`, not its variant `decode_no_lse`.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:  # noqa: SLF001
        return True
    return torch._C._get_tracing_state() is not None  # noqa: SLF001


def _call(operator: Any, arguments: Sequence[object]) -> Any:  # noqa: ANN401 - torch.ops.X.Y.Z
    """Call an operator without gradients, even if its tensors require them."""
    if torch.compiler.is_compiling():
        with torch.no_grad():
            return operator(*arguments)
    return _call_eagerly(operator, arguments)


def _call_eagerly(operator: Any, arguments: Sequence[object]) -> Any:  # noqa: ANN401 - torch.ops.X.Y.Z
    """Call an operator in eager mode without gradients.

    It avoids `torch.no_grad` if possible, which would take a tenth of a call's time.
    """
    run = operator._op  # noqa: SLF001 - the C++ callable, without torch's Python wrapper
    try:
        if torch._C._are_functorch_transforms_active():  # noqa: SLF001 - as torch.autograd does
            with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():  # noqa: SLF001
                return run(*arguments)
        if not torch.is_grad_enabled():
            return run(*arguments)
        torch._C._set_grad_enabled(False)  # noqa: FBT003, SLF001
        try:
            return run(*arguments)
        finally:
            torch._C._set_grad_enabled(True)  # noqa: FBT003, SLF001
    except RuntimeError as error:
        raise_out_of_memory(error)
        raise


@torch.library.register_fake("flash_dist::decode")
def _decode_fake(
    q: Tensor,
    _k_cache: Tensor,
    v_cache: Tensor | None,
    *others: Any,  # noqa: ANN401 - the operator's schema
) -> tuple[Tensor, Tensor]:
    *batch, tokens, heads, _ = q.shape
    head_dim_v = others[-1] if v_cache is None else v_cache.shape[-1]  # the schema's last argument
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty((*batch, tokens, heads, head_dim_v))
    return out, q.new_empty((*batch, heads, tokens), dtype=lse_dtype)


@torch.library.register_fake("flash_dist::decode_no_lse")
def _decode_no_lse_fake(q: Tensor, _k_cache: Tensor, v_cache: Tensor, *_: object) -> Tensor:
    return q.new_empty((*q.shape[:-1], v_cache.shape[-1]))


@torch.library.register_fake("flash_dist::append")
def _append_fake(q: Tensor, k_cache: Tensor, v_cache: Tensor, *others: Any) -> Tensor:  # noqa: ANN401
    warn_of_copies(k_cache, v_cache)
    rotary_cos = others[5]
    batch = 0 if rotary_cos is None else q.shape[0]
    return q.new_empty((batch, *q.shape[1:]))
