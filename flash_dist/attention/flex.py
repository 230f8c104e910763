"""Attention with the signature and layout of torch's flex_attention, without score_mod."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..masks import Band, BlockMask
from ..masks.inputs import require_bool
from .conversions import convert_flex
from .heads_first import attend_heads_first, check_tensors
from .results import returns_aux
from .unsupported import refuse_unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.nn.attention import flex_attention as torch_flex

    from .results import Flag

    AnyBlockMask = BlockMask | torch_flex.BlockMask

Tensor = torch.Tensor


@returns_aux
def flex_attention(  # noqa: PLR0913, PLR0917 - torch's signature
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: AnyBlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002
    return_lse: Flag = False,  # noqa: FBT002
    kernel_options: Mapping[str, object] | None = None,  # noqa: ARG001
    *,
    return_aux: None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, torch_flex.AuxOutput]:
    """Deterministic replacement for torch's `flex_attention`, without score_mod.

    It is fast without torch.compile, and the mask may be on another device than the tensors.
    `flash_attn_func` describes dtypes, strides, the workspace of the backward and what may change
    the bits of results.

    A BlockMask of torch is converted in the first call that uses it. The conversion calls mask_mod,
    on the device of the BlockMask. After an in-place change to a tensor that mask_mod captured, the
    next call converts again; `refresh_mask` is for changes that torch does not count. A BlockMask
    of torch cannot be converted under torch.compile or during the capture of a CUDA graph: pass
    `BlockMask.from_flex(block_mask)` of this package, made once.

    Args:
        query: [batch, num_heads_q, seqlen_q, head_dim].
        key: [batch, num_heads_kv, seqlen_k, head_dim].
        value: [batch, num_heads_kv, seqlen_k, head_dim_v], head_dim_v at most head_dim.
        score_mod: Must be None.
        block_mask: Which keys are visible to each query: a BlockMask of this package or of torch.
        scale: Factor on the scores, positive. Defaults to head_dim ** -0.5.
        enable_gqa: Whether num_heads_kv may be less than num_heads_q. num_heads_kv must divide
            num_heads_q, and query head h reads kv head h // (num_heads_q // num_heads_kv).
        return_lse: Return (out, lse).
        kernel_options: Ignored: they tune torch's kernels.
        return_aux: torch's AuxRequest, for lse only: return (out, AuxOutput).

    Returns:
        out: [batch, num_heads_q, seqlen_q, head_dim_v], in memory [batch, seqlen_q, num_heads_q,
            head_dim_v]. A row without visible keys is zero.
        lse: [batch, num_heads_q, seqlen_q], float32 (float64 for float64 inputs), only if
            `return_lse`, or in torch's AuxOutput: the natural logarithm of the sum of exp(scores).
            Differentiable.

    Raises:
        TypeError: An argument is not a tensor, block_mask is not a BlockMask, return_aux is not an
            AuxRequest, or a dtype is not supported.
        ValueError: Shapes, devices, alignment or scale do not fit, a score_mod is given,
            return_aux requests the largest scores, or both return_lse and return_aux are given.
        FlashDistError: This build has no code that runs on the GPU.
    """
    check_tensors(query, key, value, (4,))
    refuse_unsupported(score_mod=score_mod)
    require_bool("return_lse", return_lse)
    if return_aux is not None:
        _check_aux(return_aux, return_lse=return_lse)
    mask = _read_mask(block_mask)
    out, lse = attend_heads_first((query, key, value), mask, scale, enable_gqa=enable_gqa)
    if return_aux is not None:
        return out, _make_aux(return_aux, lse)
    return (out, lse) if return_lse else out


def _read_mask(block_mask: AnyBlockMask | None) -> Band | BlockMask:
    if block_mask is None:
        return Band()
    return block_mask if isinstance(block_mask, BlockMask) else convert_flex(block_mask)


def _check_aux(return_aux: torch_flex.AuxRequest, *, return_lse: bool) -> None:
    from torch.nn.attention.flex_attention import AuxRequest  # noqa: PLC0415 - slow to import

    if not isinstance(return_aux, AuxRequest):
        message = (
            "return_aux must be an AuxRequest of torch.nn.attention.flex_attention or None, "
            f"got {type(return_aux).__name__}"
        )
        raise TypeError(message)
    if return_lse:
        message = (
            f"return_lse cannot be given together with return_aux={return_aux}\n\n"
            "hint: `return_aux=AuxRequest(lse=True)` alone returns lse"
        )
        raise ValueError(message)
    if return_aux.max_scores:
        message = "return_aux.max_scores must be False, got True: of scores only lse is kept"
        raise ValueError(message)


def _make_aux(return_aux: torch_flex.AuxRequest, lse: Tensor) -> torch_flex.AuxOutput:
    from torch.nn.attention.flex_attention import AuxOutput  # noqa: PLC0415

    return AuxOutput(lse=lse if return_aux.lse else None)
