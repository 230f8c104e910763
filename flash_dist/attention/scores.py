"""Checks the score modifications of a call: softcap, ALiBi slopes, sinks and bias."""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING, Any, Final

import torch

from ..kernels.scores import PLAIN, Scores
from ..toolkit.errors import show
from .arguments import require_tensor, to_float
from .layouts import DENSE, PACKED, dtype_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..kernels.problem import Packing

Tensor = torch.Tensor

SINKS: Final = ("learnable_sink", "s_aux")  # names in flash-attention 4 and in vLLM
# Limits of softcap. The gradient recovers tanh from lse, whose precision is too low for smaller
# caps. Larger caps would not change scores in float32.
_LEAST, _MOST = 2.0**-10, 2.0**40
_DIMENSIONS: Final = 4  # number of dimensions of a bias for the operators


def choose_scores(
    q: Tensor,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    others: Mapping[str, Any],
    cu_seqlens_q: Tensor | None = None,
) -> Scores | None:
    """Check softcap, slopes and sinks of a call; return them, or None if there are none.

    Args:
        q: Checked queries.
        softcap: As in `flash_attn_func`.
        alibi_slopes: Likewise.
        others: Contains the sinks, under one of their names.
        cu_seqlens_q: [batch + 1], if the queries are packed.

    Raises:
        TypeError: An argument has the wrong type, or slopes or sinks have an unsupported dtype.
        ValueError: A value, shape or device does not fit, or sinks are given under both names.
    """
    tokens, batch = (
        (DENSE, q.shape[0]) if cu_seqlens_q is None else (PACKED, cu_seqlens_q.shape[0] - 1)
    )
    heads = math.prod(q.shape[tokens:-1])
    cap = _read_softcap(softcap)
    slopes = None if alibi_slopes is None else _read_slopes(alibi_slopes, q, batch, heads)
    sinks = _read_sinks(q, heads, others)
    if cap == 0 and slopes is None and sinks is None:
        return None
    return Scores(cap, slopes, sinks)


def join_bias(scores: Scores | None, bias: Tensor, q: Tensor, seqlen_k: int) -> Scores:
    """Check the bias of `flash_attn_func`, and return score modifications that include it.

    Raises:
        TypeError: The bias is not a tensor, or has an unsupported dtype.
        ValueError: The bias has an unsuitable shape or device, or there is a soft cap.
    """
    shape = q.shape[0], math.prod(q.shape[DENSE:-1]), q.shape[1], seqlen_k
    return _replace_bias(scores, read_bias("bias", bias, q, shape))


def join_packed_bias(
    scores: Scores | None, bias: Tensor, q: Tensor, k: Tensor, packing: Packing
) -> Scores:
    """Check the bias of `flash_attn_varlen_func`, and return score modifications that include it.

    The bias becomes 4-D. Its axes of queries and keys are cut to the length that a sequence can
    have: the lesser of max_seqlen and the number of tokens.

    Raises:
        TypeError: The bias is not a tensor, or has an unsupported dtype.
        ValueError: The bias has an unsuitable shape or device, or there is a soft cap.
    """
    bias = _read_floats("bias", bias, q)
    wants = math.prod(q.shape[PACKED:-1]), *packing[2:]
    shape = (1,) * (_DIMENSIONS - bias.dim()) + tuple(bias.shape)
    fits = len(shape) == _DIMENSIONS and shape[0] == 1 and (shape[1] == 1 or shape[1] == wants[0])
    if not (
        fits and all(n == 1 or n >= most for n, most in zip(shape[2:], wants[1:], strict=True))
    ):
        message = (
            "bias must broadcast to [num_heads_q, max_seqlen_q, max_seqlen_k], "
            f"{list(wants)}, or have more queries or keys, got shape {list(bias.shape)}"
            "\n\nhint: query i and key j of each sequence, counted from its first token, get "
            "bias[:, i, j]"
        )
        raise ValueError(message)
    bias = bias.reshape(shape)
    for axis, tokens, longest in zip((2, 3), (q.shape[0], k.shape[0]), wants[1:], strict=True):
        length = min(longest, tokens)
        if bias.shape[axis] > max(length, 1):
            bias = bias.narrow(axis, 0, length)
    return _replace_bias(scores, bias)


def _replace_bias(scores: Scores | None, bias: Tensor) -> Scores:
    scores = scores or PLAIN
    if scores.softcap != 0:
        softcap = show(scores.softcap)
        message = f"bias must be None with a softcap, got a tensor and softcap {softcap}"
        raise ValueError(message)
    return scores._replace(bias=bias)


def read_bias(name: str, bias: Tensor, q: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """Return a bias for the operators: 4-D, with the dtype of q or float32.

    Args:
        name: The name of the argument.
        bias: Tensor that broadcasts to `shape`.
        q: Checked queries.
        shape: [batch, num_heads_q, seqlen_q, seqlen_k].

    Raises:
        TypeError: The bias is not a tensor, or does not have a floating point dtype.
        ValueError: The shape or device of the bias does not fit.
    """
    bias = _read_floats(name, bias, q)
    sizes = zip(reversed(bias.shape), reversed(shape), strict=False)
    fits = all(has == 1 or has == wants for has, wants in sizes)  # noqa: PLR1714 - may be symbolic
    if bias.dim() > len(shape) or not fits:
        message = (
            f"{name} must broadcast to [batch, num_heads_q, seqlen_q, seqlen_k], {list(shape)}, "
            f"got shape {list(bias.shape)}"
        )
        raise ValueError(message)
    return bias.reshape((1,) * (len(shape) - bias.dim()) + bias.shape)


def _read_floats(name: str, bias: Tensor, q: Tensor) -> Tensor:
    """Return a bias in the dtype of q or float32; raise unless it has floats on q's device."""
    require_tensor(name, bias)
    if type(bias).__module__ == "torch.nn.attention.bias":  # whose import takes a second
        message = f"{name} must be a tensor of numbers, got torch's CausalBias, which has none"
        message += "\n\nhint: `causal=True`"
        raise TypeError(message)
    if not bias.is_floating_point():
        message = f"{name} must be of floating point, got {dtype_name(bias.dtype)}"
        if bias.dtype == torch.bool:
            message += f"\n\nhint: `mask=BlockMask.from_dense({name})` hides keys"
        raise TypeError(message)
    _require_device(name, bias, q)
    if bias.dtype in {q.dtype, torch.float32}:
        return bias
    return bias.to(torch.float64 if q.dtype == torch.float64 else torch.float32)


def _read_softcap(softcap: float | None) -> float:
    if softcap is None:
        return 0.0
    if isinstance(softcap, bool) or not isinstance(softcap, (float, int, torch.SymFloat, Real)):
        message = f"softcap must be a float or None, got {type(softcap).__name__}"
        raise TypeError(message)
    cap = to_float(softcap)
    if softcap != 0 and not _LEAST <= cap <= _MOST:
        message = (
            f"softcap must be 0 or None for none, or from {_LEAST:g} to {_MOST:g}, "
            f"got {show(softcap)}"
        )
        raise ValueError(message)
    return cap


def _read_slopes(slopes: Tensor, q: Tensor, batch: int, heads: int) -> Tensor:
    require_tensor("alibi_slopes", slopes)
    allowed = (torch.float32, torch.float64) if q.dtype == torch.float64 else (torch.float32,)
    if slopes.dtype not in allowed:
        message = (
            f"alibi_slopes must be float32, got {dtype_name(slopes.dtype)}"
            "\n\nhint: `alibi_slopes.float()`"
        )
        raise TypeError(message)
    _require_device("alibi_slopes", slopes, q)
    # NOTE: sizes may be symbolic. A set would hash them, and comparing tuples of different lengths
    # would compare the batch with the heads. Either would make a size a constant of the graph.
    wanted = (heads,) if slopes.dim() == 1 else (batch, heads)
    if tuple(slopes.shape) != wanted:
        message = (
            f"alibi_slopes must have shape [num_heads_q] or [batch, num_heads_q], [{heads}] or "
            f"[{batch}, {heads}], got {list(slopes.shape)}"
        )
        raise ValueError(message)
    if slopes.requires_grad and torch.is_grad_enabled():
        message = (
            "alibi_slopes must not require gradients, got slopes that do: they have none"
            "\n\nhint: `alibi_slopes.detach()`"
        )
        raise ValueError(message)
    return slopes.contiguous()


def _read_sinks(q: Tensor, heads: int, others: Mapping[str, Any]) -> Tensor | None:
    given = [name for name in SINKS if others.get(name) is not None]
    if not given:
        return None
    if len(given) > 1:
        message = "learnable_sink and s_aux are two names of one argument, got both"
        raise ValueError(message)
    name, sinks = given[0], others[given[0]]
    require_tensor(name, sinks)
    if not sinks.is_floating_point():
        message = f"{name} must be of floating point, got {dtype_name(sinks.dtype)}"
        raise TypeError(message)
    _require_device(name, sinks, q)
    if tuple(sinks.shape) != (heads,):
        message = f"{name} must have shape [num_heads_q], [{heads}], got {list(sinks.shape)}"
        raise ValueError(message)
    upcast: Tensor = sinks.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
    return upcast.contiguous()


def _require_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        message = f"{name} must be on {q.device}, where the queries are, got {x.device}"
        raise ValueError(message)
