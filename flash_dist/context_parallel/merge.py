"""Merge attention over two sets of keys, for ring and context parallelism."""

from __future__ import annotations

import torch

from ..attention.arguments import require_tensor
from ..attention.layouts import CPU_DTYPES, dtype_name

Tensor = torch.Tensor


def merge_attention(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Return attention over the keys of a and b together, from attention over each alone.

    a and b must have the same queries and scale, and disjoint keys. The result is computed in the
    dtype of lse with plain torch operations, and out is rounded once to the dtype to which torch
    promotes those of out_a and out_b. The result is differentiable with respect to all four
    arguments, any number of times. A row with lse -inf had no visible key: it contributes nothing,
    whatever its out contains, and the other row's values are returned exactly. If both are -inf,
    the merged lse is -inf, and out and all gradients are 0. Swapping a and b changes no bit;
    merging three results in another order may.

    Args:
        out_a: [batch, seqlen_q, num_heads_q, head_dim_v], [batch, seqlen_q, num_heads_kv,
            heads_per_kv, head_dim_v], or either packed, without batch.
        lse_a: [batch, num_heads_q, seqlen_q]; packed [num_heads_q, total_q]. float32 or float64.
        out_b: Like out_a, but its dtype may differ.
        lse_b: Like lse_a.

    Returns:
        out: Like out_a, in the promoted dtype.
        lse: Like lse_a.

    Raises:
        TypeError: An argument is not a tensor, out has no floating point dtype, or lse is neither
            float32 nor float64.
        ValueError: Shapes or devices do not fit.
    """
    _check(out_a, lse_a, out_b, lse_b)
    weight_a, weight_b, lse = _find_weights(lse_a, lse_b)
    out = _weigh(out_a, weight_a) + _weigh(out_b, weight_b)
    return out.to(torch.promote_types(out_a.dtype, out_b.dtype)), lse


def add_attention(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge attention over other keys into out and lse, in place and without temporary tensors.

    Args:
        out: Like out_a of `merge_attention`, in the dtype of lse.
        lse: Like lse_a.
        other: Like out; its dtype may be narrower. Must be finite, also in rows without visible
            keys.
        other_lse: Like lse.
    """
    weight, other_weight, merged = _find_weights(lse, other_lse)
    out.mul_(_spread(weight, out)).addcmul_(other, _spread(other_weight, out))
    lse.copy_(merged)


def _find_weights(lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights of a and b, and lse over the keys of both."""
    largest = torch.maximum(lse_a, lse_b).detach()
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    share_a, share_b = _share(lse_a, largest), _share(lse_b, largest)
    total = share_a + share_b  # between 1 and 2; 0 if no key was visible
    masked = total == 0
    total = total.masked_fill(masked, 1.0)
    lse = (largest + total.log()).masked_fill(masked, -torch.inf)
    return share_a / total, share_b / total, lse


def _share(lse: Tensor, largest: Tensor) -> Tensor:
    """Return exp(lse - largest); 1 if both are +inf, as with a sink that takes all weight."""
    return (lse - largest).masked_fill(lse == torch.inf, 0.0).exp()


def _weigh(out: Tensor, weight: Tensor) -> Tensor:
    """Multiply rows by weights [..., num_heads_q, seqlen_q]; weight 0 removes even NaN."""
    weight = _spread(weight, out)
    return out.masked_fill(weight.detach() == 0, 0.0) * weight


def _spread(weight: Tensor, out: Tensor) -> Tensor:
    """Return weights [..., num_heads_q, seqlen_q] in the layout of out, with head_dim_v 1."""
    weight = weight.transpose(-1, -2).contiguous()  # [..., seqlen_q, num_heads_q]
    if out.dim() == weight.dim() + 2:
        weight = weight.unflatten(-1, out.shape[-3:-1])
    return weight.unsqueeze(-1)


def _check(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    named = (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b))
    for name, x in named:
        require_tensor(name, x)
        if x.device != out_a.device:
            message = (
                f"out_a and {name} must be on the same device, got {out_a.device} and {x.device}"
            )
            raise ValueError(message)
    for name, x in named[::2]:
        if x.dtype not in CPU_DTYPES:
            *names, last = map(dtype_name, CPU_DTYPES)
            message = f"{name} must be {', '.join(names)} or {last}, got {dtype_name(x.dtype)}"
            raise TypeError(message)
    for name, x in named[1::2]:
        if x.dtype not in {torch.float32, torch.float64}:
            message = f"{name} must be float32 or float64, got {dtype_name(x.dtype)}"
            raise TypeError(message)
    if out_a.shape != out_b.shape or lse_a.shape != lse_b.shape:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in named)
        message = f"a and b must have the same shapes, got {shapes}"
        raise ValueError(message)
    _check_rows(out_a, lse_a)


def _check_rows(out: Tensor, lse: Tensor) -> None:
    """Check that each row of out, [..., seqlen_q, heads..., head_dim_v], has an lse."""
    tokens = lse.dim() - 1
    fits = tokens in {1, 2} and out.dim() - tokens in {2, 3}
    if fits:
        heads = out.shape[tokens:-1].numel()
        fits = lse.shape == (*out.shape[: tokens - 1], heads, out.shape[tokens - 1])
    if not fits:
        message = (
            "lse_a must be [batch, num_heads_q, seqlen_q] where out_a is [batch, seqlen_q, "
            "num_heads_q, head_dim_v] (packed [num_heads_q, total_q] and [total_q, num_heads_q, "
            f"head_dim_v]), got shapes {list(lse.shape)} and {list(out.shape)}"
        )
        raise ValueError(message)
