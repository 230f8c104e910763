"""The autograd formulas of the operators, for direct calls of `torch.ops.flash_dist`.

Exported programs, AOTInductor packages and users make such calls. Our own functions use an
autograd.Function, attention/autograd.py, which is cheaper and uses more options: forward operators
have no argument for the budget, and `attention` has none for batch_invariant. So these formulas use
the current budget, and the formula of `attention` uses batch_invariant=False. Both the formulas and
the Function call `differentiate`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.autograd import forward_ad

from ..errors import FlashDistError
from ..masks import registry
from .budget import BUDGET_NOW
from .dropout.state import NOT_DROPPED

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
Gradients = tuple[Tensor, Tensor, Tensor, "Tensor | None"]  # dq, dk, dv, dsinks
Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k, v, out, lse
OfResults = tuple["Tensor | None", "Tensor | None"]  # dout and dlse


def differentiate(
    backward: Callable[[Tensor, Tensor | None], Gradients],
    saved: Saved,
    of_results: OfResults,
    *,
    sinks: Tensor | None,
    max_seqlen_k: int | None = None,
) -> Gradients:
    """Return dq, dk, dv and the gradient of the sinks for one call of a forward operator.

    Args:
        backward: The backward of that call, as a function of dout and dlse. It returns dsinks with
            an entry per query and head, like lse.
        saved: The inputs and results of the forward.
        of_results: Autograd's gradients of out and lse, in any layout; None: nothing depends on
            that result.
        sinks: The sinks of the call.
        max_seqlen_k: Upper bound of the number of keys of a packed sequence; None: not packed.

    Returns:
        dq, dk, dv: Like q, k, v.
        dsinks: [num_heads_q]; None without sinks. Summed by torch, in an order that depends on the
            shape and the device.
    """
    q, k, _, out, _ = saved
    dout, dlse = of_results
    dout = torch.zeros_like(out) if dout is None else dout
    if sinks is not None:
        dq, dk, dv, dsinks = backward(dout, dlse)
        if dsinks is not None:
            dsinks = dsinks.sum(-1) if dsinks.dim() == 2 else dsinks.sum((0, 2))  # noqa: PLR2004
        return dq, dk, dv, dsinks
    if not _has_one_key(k, max_seqlen_k):
        dq, dk, dv, _ = backward(dout, dlse)
        return dq, dk, dv, None
    # The weight of a single key is 1 or 0, whatever the score. So q and k get gradients only from
    # lse. The kernels would compute dP - delta, which is 0 only up to rounding.
    dv = backward(dout, None)[2]
    if dlse is None:
        return q.new_zeros(q.shape), k.new_zeros(k.shape), dv, None
    dq, dk, _, _ = backward(torch.zeros_like(out), dlse)
    return dq, dk, dv, None


def differentiate_bias(
    backward: Callable[[Tensor, Tensor | None], Tensor],
    saved: Saved,
    of_results: OfResults,
    *,
    sinks: Tensor | None,
    max_seqlen_k: int | None = None,
) -> Tensor:
    """Return the gradient of the bias for one call; arguments as in `differentiate`."""
    _, k, _, out, _ = saved
    dout, dlse = of_results
    # With one key, the weight is constant, so dout has no effect.
    if dout is None or (sinks is None and _has_one_key(k, max_seqlen_k)):
        dout = torch.zeros_like(out)
    return backward(dout, dlse)


def _has_one_key(k: Tensor, max_seqlen_k: int | None) -> bool:
    """Return whether each sequence is known to have at most one key.

    max_seqlen_k: None for k with a batch axis.
    """
    return _is_one(k.shape[1]) if max_seqlen_k is None else _is_one(k.shape[0], max_seqlen_k)


def _is_one(*numbers: int) -> bool:
    """Return whether the smallest size is 1; False while tracing, if no size is known to be 1."""
    if not torch.compiler.is_compiling():
        return min(numbers) == 1
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # noqa: PLC0415 - slow

    return any(guard_or_false(number == 1) for number in numbers)


def refuse_second(*_: object) -> NoReturn:
    """Raise if a second derivative is requested."""
    message = "attention has first derivatives only, got a gradient of its gradient"
    raise FlashDistError(
        message,
        hint="`torch.nn.functional.scaled_dot_product_attention` with SDPBackend.MATH has more",
    )


def refuse_forward_mode(*_: object) -> NoReturn:
    """Raise FlashDistError: attention has no forward-mode derivative."""
    message = "attention has gradients only, got forward-mode differentiation (jvp, jacfwd)"
    raise FlashDistError(message, hint="`torch.func.vjp` and `torch.func.jacrev` work backwards")


def require_no_tangents(*tensors: Any) -> None:  # noqa: ANN401 - all arguments of an operator
    """Raise if an input has a tangent: operators of torch.library would ignore it, or fail."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:  # noqa: SLF001 - no public equivalent
        return
    for x in tensors:
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            refuse_forward_mode()


def _refuse_transform(name: str) -> NoReturn:
    message = f"`flash_dist::{name}` must be used outside of torch.func.grad and vjp, got one"
    raise FlashDistError(message, hint="`flash_attn_func` has gradients within them")


def register(library: torch.library.Library) -> None:
    """Register the operators' autograd formulas in `library`, which has their namespace."""
    in_front: Any = _Shortcut(library)
    for name, formula, save in (
        ("attention", _differentiate, _save),
        ("attention_max_logit", _differentiate_max_logit, _save_max_logit),
        ("attention_backward", refuse_second, None),
        ("attention_masked", _differentiate_masked, _save_masked),
        ("attention_masked_max_logit", _differentiate_masked_max_logit, _save_masked_max_logit),
        ("attention_masked_backward", refuse_second, None),
        ("attention_bias_backward", refuse_second, None),
        ("attention_masked_bias_backward", refuse_second, None),
    ):
        operator = f"flash_dist::{name}"
        torch.library.register_autograd(operator, formula, setup_context=save, lib=in_front)


class _Shortcut:
    """Registers a formula in a library so that it runs only if gradients are needed.

    torch also checks whether they are, but only after Python code that takes half as long as a
    small attention call. torch's errors for forward mode and torch.func transforms have no message.
    """

    def __init__(self, library: torch.library.Library) -> None:
        self._library = library

    def impl(self, name: str, formula: Callable[..., Any], key: str, *, with_keyset: bool) -> None:
        """Register a formula; torch's register_autograd calls this in place of Library.impl."""
        redispatch = getattr(torch.ops.flash_dist, name).default.redispatch
        is_wanted = torch._C._any_requires_grad  # noqa: SLF001 - torch's own check
        below = torch._C._after_autograd_keyset  # noqa: SLF001

        def kernel(keyset: Any, *args: Any) -> Any:  # noqa: ANN401 - torch's protocol
            if forward_ad._current_level >= 0:  # noqa: SLF001 - no public equivalent
                require_no_tangents(*args)
            if torch.is_grad_enabled() and is_wanted(*args):
                if torch._C._are_functorch_transforms_active():  # noqa: SLF001 - as torch.autograd
                    _refuse_transform(name)
                return formula(keyset, *args)
            return redispatch(keyset & below, *args)

        self._library.impl(name, kernel, key, with_keyset=with_keyset)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401
    q, k, v, mask_data, ctx.mask, cu_seqlens_q, cu_seqlens_k, *numbers = inputs
    *numbers, alibi_slopes, sinks, _, bias, ctx.dropout_p, rng_state = numbers  # _ is match_kvcache
    *ctx.numbers, ctx.softcap = numbers
    kept = mask_data, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, bias, rng_state
    ctx.save_for_backward(q, k, v, *output, *kept)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    if dout is None and dlse is None:
        return (None,) * 18
    *saved, mask_data, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, bias, rng_state = (
        ctx.saved_tensors
    )
    max_seqlen_q, max_seqlen_k, softmax_scale, ieee = ctx.numbers
    mask = mask_data, None, ctx.mask  # without mask_slots, dS is stored only for bands
    packed = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    scores = ctx.softcap, alibi_slopes, sinks, bias
    how = softmax_scale, BUDGET_NOW, False, ieee, *scores, ctx.dropout_p, rng_state

    def backward(one_dout: Tensor, one_dlse: Tensor | None) -> Gradients:
        operator = torch.ops.flash_dist.attention_backward
        return operator(one_dout, *saved, one_dlse, *mask, *packed, *how)  # type: ignore[no-any-return]

    def backward_bias(one_dout: Tensor, one_dlse: Tensor | None) -> Tensor:
        operator = torch.ops.flash_dist.attention_bias_backward
        last = softmax_scale, ieee, alibi_slopes, bias, ctx.dropout_p, rng_state
        return operator(one_dout, *saved, one_dlse, mask_data, ctx.mask, *last, *packed)  # type: ignore[no-any-return]

    call = tuple(saved), (dout, dlse)
    longest = None if cu_seqlens_q is None else max_seqlen_k
    dq, dk, dv, dsinks = differentiate(backward, *call, sinks=sinks, max_seqlen_k=longest)
    dbias = None
    if bias is not None and bias.requires_grad:
        dbias = differentiate_bias(backward_bias, *call, sinks=sinks, max_seqlen_k=longest)
    return dq, dk, dv, *(None,) * 10, dsinks, None, dbias, None, None


def _save_max_logit(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ANN401
    *results, max_logit = output
    *first, bias = inputs
    _save(ctx, (*first, False, bias, *NOT_DROPPED), (results[0], results[1]))
    ctx.mark_non_differentiable(max_logit)


def _differentiate_max_logit(ctx: Any, *of_results: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    *first, _, dbias, _, _ = _differentiate(ctx, *of_results[:2])
    return *first, dbias


def _save_masked(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401
    q, k, v, plan, *numbers = inputs
    *numbers, alibi_slopes, sinks, bias, ctx.dropout_p, rng_state = numbers
    *ctx.mask, ctx.softmax_scale, _, invariant, ieee, softcap = numbers
    ctx.numbers = invariant, ieee, softcap
    ctx.save_for_backward(q, k, v, *output, plan, alibi_slopes, sinks, bias, rng_state)
    if plan is None and isinstance(ctx.mask[0], int):
        ctx.alive = registry.find(ctx.mask[0])  # keeps the mask alive until the backward
    ctx.set_materialize_grads(False)


def _differentiate_masked(
    ctx: Any,  # noqa: ANN401
    dout: Tensor | None,
    dlse: Tensor | None,
) -> tuple[Tensor | None, ...]:
    if dout is None and dlse is None:
        return (None,) * 18
    *saved, plan, alibi_slopes, sinks, bias, rng_state = ctx.saved_tensors
    mask = plan, *ctx.mask, ctx.softmax_scale, BUDGET_NOW
    how = *ctx.numbers, alibi_slopes, sinks, bias, ctx.dropout_p, rng_state

    def backward(one_dout: Tensor, one_dlse: Tensor | None) -> Gradients:
        operator = torch.ops.flash_dist.attention_masked_backward
        return operator(one_dout, *saved, one_dlse, *mask, *how)  # type: ignore[no-any-return]

    def backward_bias(one_dout: Tensor, one_dlse: Tensor | None) -> Tensor:
        operator = torch.ops.flash_dist.attention_masked_bias_backward
        numbers = ctx.softmax_scale, ctx.numbers[1]
        last = *numbers, alibi_slopes, bias, ctx.dropout_p, rng_state
        return operator(one_dout, *saved, one_dlse, plan, *ctx.mask, *last)  # type: ignore[no-any-return]

    dq, dk, dv, dsinks = differentiate(backward, tuple(saved), (dout, dlse), sinks=sinks)
    dbias = None
    if bias is not None and bias.requires_grad:
        dbias = differentiate_bias(backward_bias, tuple(saved), (dout, dlse), sinks=sinks)
    return dq, dk, dv, *(None,) * 11, dsinks, dbias, None, None


def _save_masked_max_logit(
    ctx: Any,  # noqa: ANN401
    inputs: tuple[Any, ...],
    output: tuple[Tensor, ...],
) -> None:
    *results, max_logit = output
    _save_masked(ctx, (*inputs, *NOT_DROPPED), (results[0], results[1]))
    ctx.mark_non_differentiable(max_logit)


def _differentiate_masked_max_logit(
    ctx: Any,  # noqa: ANN401
    *of_results: Tensor | None,
) -> tuple[Tensor | None, ...]:
    return _differentiate_masked(ctx, *of_results[:2])[: -len(NOT_DROPPED)]
