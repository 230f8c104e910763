"""The operators of torch's flash backend, with our kernels.

The layers above them do not change: torch's selector, autocast, autograd and the meta kernels for
tracing. This module only replaces the CUDA kernels. Calls that our kernels do not support go to
torch's kernels.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch

from ...attention.decoding.varlen import Keys
from ...errors import FlashDistError
from .calls import Options, find_call, infer
from .order import Order

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
Triple = tuple[Tensor, Tensor, Tensor]
Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]

_OVERRIDING: Final = "(?s).*overriding a previously registered kernel"  # the filter ignores case


class Registration:
    """Registration of our kernels in torch's dispatcher, until `remove` is called."""

    def __init__(self, key: str = "CUDA") -> None:
        """Register our kernels for the devices of a dispatch key."""
        self._library: Any = torch.library.Library("aten", "IMPL", key)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_OVERRIDING)  # the override is intended
            for name, serve in _KERNELS.items():
                if hasattr(torch.ops.aten, name):  # torch before 2.12 lacks one of the names
                    kernel = _join(serve, _find_kernel(f"aten::{name}", key))
                    self._library.impl(name, kernel, key, with_keyset=True, allow_override=True)
        self._order = Order()

    def remove(self) -> None:
        """Restore the previous kernels of the operators."""
        if self._library is not None:
            self._library._destroy()  # noqa: SLF001 - as torch's own scoped library does
            self._library = None
            self._order.remove()


def _find_kernel(name: str, key: str) -> Callable[..., Any]:
    """Return a function that calls the current kernel of an operator, or raises if it has none."""
    try:
        call: Callable[..., Any] = torch.library.get_kernel(name, key).call_boxed
    except RuntimeError:  # a torch without CUDA, or built without its flash kernels
        return partial(_refuse, name)
    return call


def _refuse(name: str, *_: object, **__: object) -> NoReturn:
    message = f"torch has no kernel of its own for {name}, nor has flash_dist for the call"
    raise FlashDistError(message, hint="the logger `flash_dist` tells the reason at level INFO")


def _join(serve: Callable[..., Any], previous: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that calls `serve`, and calls `previous` if `serve` returns None."""

    def kernel(keys: object, *args: object, **options: object) -> Any:  # noqa: ANN401
        results = serve(*args, **options)
        return previous(keys, *args, **options) if results is None else results

    return kernel


# The functions below have the operators' signatures. They return None for calls that we do not
# support. `others` holds arguments that newer versions of torch add.


def _forward(  # noqa: PLR0913, PLR0917
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,  # noqa: FBT001
    return_debug_mask: bool,  # noqa: FBT001
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,  # noqa: ARG001 - has no effect
    **others: object,
) -> Outputs | None:
    """Return out, lse, and results that only dropout uses.

    Tensors are [batch, seqlen, heads, head_dim], or packed [total, heads, head_dim].
    """
    bounds = cum_seq_q, cum_seq_k, max_q, max_k
    tensors = query, key, value
    options = Options(dropout_p, is_causal, scale, (window_size_left, window_size_right))
    others = {"return_debug_mask": return_debug_mask, **others}
    if block_table is None and seqused_k is None:
        call = find_call(tensors, bounds, options, **others)
        results = None if call is None else call.forward()
    else:
        _require_no_gradient(*tensors)
        keys = Keys(cum_seq_k, seqused_k, block_table)
        results = infer(tensors, bounds, keys, options, **others)
    if results is None:
        return None
    out, lse = results
    return lay_out(out, query), lse, *_make_unused(query)


def _require_no_gradient(*tensors: Tensor) -> None:
    """Raise ValueError if gradients are needed; torch has no backward for these arguments.

    This is for direct calls of the operator. `varlen_attn` itself raises in this case, and calls
    the operator with gradients disabled.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        message = (
            "query, key and value must want no gradient with seqused_k or block_table, got one "
            "with requires_grad=True\n\nhint: call it under `torch.no_grad()`"
        )
        raise ValueError(message)


def _forward_inplace(out: Tensor, *args: Any, **options: Any) -> Tensor | None:  # noqa: ANN401
    """Copy the result into `out`, and return lse; None if the call is not supported."""
    results = _forward(*args, **options)
    if results is None:
        return None
    out.copy_(results[0])
    return results[1]


def _backward(  # noqa: PLR0913, PLR0917
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,  # noqa: FBT001
    rng_state: Tensor,  # noqa: ARG001
    unused: Tensor,  # noqa: ARG001
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **others: object,
) -> Triple | None:
    """Return the gradients of query, key and value."""
    bounds = cum_seq_q, cum_seq_k, max_q, max_k
    options = Options(dropout_p, is_causal, scale, (window_size_left, window_size_right))
    call = find_call((query, key, value), bounds, options, **others)
    if call is None:
        return None
    dq, dk, dv = call.backward(grad_out, out, logsumexp)
    return lay_out(dq, query), lay_out(dk, key), lay_out(dv, value)


def _sdpa_forward(  # noqa: PLR0913, PLR0917
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002
    return_debug_mask: bool = False,  # noqa: FBT001, FBT002
    **options: Any,  # noqa: ANN401
) -> tuple[object, ...] | None:
    """Run `_forward` on [batch, heads, seqlen, head_dim].

    After lse, also return cum_seq_q and cum_seq_k, both None, and max_q and max_k.
    """
    longest = query.shape[2], key.shape[2]
    q, k, v = _swap(query, key, value)
    results = _forward(
        q, k, v, None, None, *longest, dropout_p, is_causal, return_debug_mask, **options
    )
    if results is None:
        return None
    out, lse, *others = results
    return out.transpose(1, 2), lse, None, None, *longest, *others


def _sdpa_backward(  # noqa: PLR0913, PLR0917
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    *numbers: Any,  # noqa: ANN401
    **options: Any,  # noqa: ANN401
) -> Triple | None:
    """Run `_backward` on [batch, heads, seqlen, head_dim]."""
    dout, q, k, v, saved = _swap(grad_out, query, key, value, out)
    bounds = cum_seq_q, cum_seq_k
    gradients = _backward(dout, q, k, v, saved, logsumexp, *bounds, *numbers, **options)
    if gradients is None:
        return None
    dq, dk, dv = _swap(*gradients)
    return dq, dk, dv


def _swap(*tensors: Tensor) -> list[Tensor]:
    """Swap the axes of heads and tokens, without a copy."""
    return [x.transpose(1, 2) for x in tensors]


def lay_out(made: Tensor, like: Tensor) -> Tensor:
    """Return `made` in the layout of `torch.empty_like(like)`.

    torch.compile relies on the strides that torch's meta kernels report. Our kernels write
    contiguous [batch, seqlen, num_heads, head_dim]. The strides are the same if query, key and
    value are views of that layout, as after linear layers. Otherwise the result is copied once.

    Args:
        made: The result, in any dense layout.
        like: A tensor of the same shape, with any strides.
    """
    if made.stride() == like.stride():
        return made
    strides = torch.empty_like(like, device="meta").stride()
    pairs = zip(made.shape, made.stride(), strides, strict=True)
    if all(size <= 1 or has == wants for size, has, wants in pairs):
        return made.as_strided(made.shape, strides)
    return torch.empty_strided(made.shape, strides, dtype=made.dtype, device=made.device).copy_(
        made
    )


def _make_unused(query: Tensor) -> Triple:
    """Return `rng_state`, `unused` and `debug_attn_mask`, which nothing reads without dropout."""
    state = torch.empty(2, dtype=torch.uint64, device=query.device)
    return state, state.new_empty(()), query.new_empty(0)


_KERNELS: Final[dict[str, Callable[..., Any]]] = {
    "_flash_attention_forward": _forward,
    "_flash_attention_forward_no_dropout_inplace": _forward_inplace,
    "_flash_attention_backward": _backward,
    "_scaled_dot_product_flash_attention": _sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
}
