"""Floating-point operations of a call, for torch.utils.flop_counter.

Counted as for torch's own attention: two operations per multiply-add of the matrix products, over
all (query, key) pairs, including masked ones.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from .late import when_imported

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Tensor = torch.Tensor


def _count_forward(q: Tensor, k: Tensor, v: Tensor, *call: Any, **_: object) -> int:  # noqa: ANN401
    """Count S = Q @ K.T and O = P @ V of `attention`."""
    count: int = 2 * _count_pairs(q, k, call[2:6]) * (q.shape[-1] + v.shape[-1])
    return count


def _count_backward(*call: Any, **_: object) -> int:  # noqa: ANN401
    """Count S (recomputed), dP = dO @ V.T, dV = P.T @ dO, dQ = dS @ K and dK = dS.T @ Q."""
    _, q, k, v = call[:4]
    return int(2 * _count_pairs(q, k, call[10:14]) * (3 * q.shape[-1] + 2 * v.shape[-1]))


def _count_masked(q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> int:
    return _count_forward(q, k, v)


def _count_masked_backward(*call: Any, **_: object) -> int:  # noqa: ANN401
    return _count_backward(*call[:4])


def _count_bias_backward(*call: Any, **_: object) -> int:  # noqa: ANN401
    """Count S (recomputed) and dP = dO @ V.T."""
    return _count_forward(*call[1:4], None, None, *call[15:])


def _count_masked_bias_backward(*call: Any, **_: object) -> int:  # noqa: ANN401
    return _count_bias_backward(*call[:4])


def _count_decode(q: Tensor, k: Tensor, v: Tensor | None, *call: Any, **_: object) -> int:  # noqa: ANN401
    """Count the products of `decode`, for a full cache if the host cannot read cache_seqlens."""
    seqlens, _, _, table, cu_seqlens_q, longest, seqlen_new = call[:7]
    capacity = k.shape[1] * (1 if table is None else table.shape[1])
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    keys = [capacity] * batch
    if seqlens is not None and _is_real(seqlens):
        keys = [n + seqlen_new for n in seqlens.tolist()]
    queries = [q.shape[1]] * batch
    if cu_seqlens_q is not None:
        queries = _lengths(cu_seqlens_q, longest)
    head_dim_v = call[14] if v is None else v.shape[-1]
    return 2 * _sum_pairs(q.shape[-2], queries, keys) * (q.shape[-1] + head_dim_v)


def _count_pairs(q: Tensor, k: Tensor, packed: Sequence[Any] = ()) -> int:
    cu_seqlens_q, cu_seqlens_k, *longest = packed or (None, None)
    if cu_seqlens_q is None:
        heads = math.prod(q.shape[2:-1])
        return _sum_pairs(heads, [q.shape[1]] * q.shape[0], [k.shape[1]] * q.shape[0])
    ends = zip((cu_seqlens_q, cu_seqlens_k), longest, strict=True)
    return _sum_pairs(math.prod(q.shape[1:-1]), *(_lengths(*one) for one in ends))


def _sum_pairs(heads: int, queries: Sequence[int], keys: Sequence[int]) -> int:
    return heads * sum(a * b for a, b in zip(queries, keys, strict=True))


def _lengths(cu_seqlens: Tensor, longest: int) -> list[int]:
    """Return the length of each sequence; `longest` for each if the host cannot read cu_seqlens."""
    if not _is_real(cu_seqlens):
        return [longest] * (cu_seqlens.shape[0] - 1)
    lengths: list[int] = cu_seqlens.diff().tolist()
    return lengths


def _is_real(x: Tensor) -> bool:
    return not isinstance(x, (FakeTensor, FunctionalTensor)) and not x.is_meta


def register() -> None:
    """Register the formulas as soon as torch's counter is imported.

    The counter is not imported here, because it imports triton. That takes long, and enables the
    GIL in free-threaded Python.
    """
    when_imported("torch.utils.flop_counter", _register)


def _register() -> None:
    from torch.utils.flop_counter import register_flop_formula  # noqa: PLC0415 - see `register`

    formulas: dict[str, Callable[..., int]] = {
        "attention": _count_forward,
        "attention_max_logit": _count_forward,
        "attention_backward": _count_backward,
        "attention_masked": _count_masked,
        "attention_masked_max_logit": _count_masked,
        "attention_masked_backward": _count_masked_backward,
        "attention_bias_backward": _count_bias_backward,
        "attention_masked_bias_backward": _count_masked_bias_backward,
        "decode": _count_decode,
    }
    for name, formula in formulas.items():
        register_flop_formula(getattr(torch.ops.flash_dist, name), get_raw=True)(formula)
