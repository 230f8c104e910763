"""The autograd formulas of the operators, for whoever calls `torch.ops.flash_dist` itself.

That is an exported program, an AOTInductor package, or a hand-written call. Our own functions have
an autograd.Function, attention/autograd.py, which costs less and knows more: a forward operator has
no argument for budget and batch_invariant, so that these formulas take the budget of the moment and
are not batch invariant. Both come to `differentiate`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from ..masks import registry
from ..toolkit.errors import FlashDistError
from .budget import BUDGET_NOW

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
Gradients = tuple[Tensor, Tensor, Tensor]
Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k, v, out, lse


def differentiate(
    bwd: Callable[..., Gradients],
    saved: Saved,
    dout: Tensor | None,
    dlse: Tensor | None,
    *,
    max_seqlen_k: int | None = None,
) -> Gradients:
    """Return dq, dk, dv of one call of a forward operator.

    Args:
        bwd: Its backward, of dout, q, k, v, out, lse and dlse.
        saved: Its inputs and what it returned for them.
        dout: What autograd has for out, in whatever layout; None: nothing depends on out.
        dlse: Likewise for lse.
        max_seqlen_k: Keys of the longest sequence or more, if packed.
    """
    q, k, _, out, _ = saved
    dout = torch.zeros_like(out) if dout is None else dout
    if not (_is_one(k.shape[1]) if max_seqlen_k is None else _is_one(k.shape[0], max_seqlen_k)):
        return bwd(dout, *saved, dlse)
    # With one key the weights are 1 or 0 whatever the score: only lse depends on q and k. The
    # kernels would find dP - delta, which is 0 only up to rounding.
    dv = bwd(dout, *saved, None)[2]
    if dlse is None:
        return q.new_zeros(q.shape), k.new_zeros(k.shape), dv
    dq, dk, _ = bwd(torch.zeros_like(out), *saved, dlse)
    return dq, dk, dv


def _is_one(*numbers: int) -> bool:
    """Whether the least of these is known to be 1; a graph may know it when it runs only."""
    if not torch.compiler.is_compiling():
        return min(numbers) == 1
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # noqa: PLC0415 - slow

    return any(guard_or_false(number == 1) for number in numbers)


def refuse_second(*_: object) -> NoReturn:
    """Raise where the gradient of a gradient is asked for."""
    message = "attention has first derivatives only, got a gradient of its gradient"
    raise FlashDistError(
        message,
        hint="`torch.nn.functional.scaled_dot_product_attention` with SDPBackend.MATH has more",
    )


def register(library: torch.library.Library) -> None:
    """Give all four operators their formulas, within the library that declares two of them."""
    for name, backward, save in (
        ("fwd", _backward, _save),
        ("bwd", refuse_second, None),
        ("masked_fwd", _masked_backward, _masked_save),
        ("masked_bwd", refuse_second, None),
    ):
        in_front: Any = _Shortcut(library) if name in {"fwd", "bwd"} else library
        operator = f"flash_dist::{name}"
        torch.library.register_autograd(operator, backward, setup_context=save, lib=in_front)


class _Shortcut:
    """Registers a formula in a library behind the question whether anybody wants it.

    torch asks so, too, but only behind layers of Python that take half as long as a call of an
    operator for a small problem.
    """

    def __init__(self, library: torch.library.Library) -> None:
        self._library = library

    def impl(self, name: str, formula: Callable[..., Any], key: str, *, with_keyset: bool) -> None:
        """Do as the method of a Library; it is torch's register_autograd that calls it."""
        redispatch = getattr(torch.ops.flash_dist, name).default.redispatch
        is_wanted = torch._C._any_requires_grad  # noqa: SLF001 - what torch asks, too
        below = torch._C._after_autograd_keyset  # noqa: SLF001

        def kernel(keyset: Any, *args: Any) -> Any:  # noqa: ANN401 - torch's protocol
            if torch.is_grad_enabled() and is_wanted(*args):
                return formula(keyset, *args)
            return redispatch(keyset & below, *args)

        self._library.impl(name, kernel, key, with_keyset=with_keyset)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401
    q, k, v, mask_data, mask, cu_seqlens_q, cu_seqlens_k, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, *output, mask_data, cu_seqlens_q, cu_seqlens_k)
    ctx.mask = mask
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    if dout is None and dlse is None:
        return (None,) * 11
    *saved, mask_data, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
    max_seqlen_q, max_seqlen_k, softmax_scale, ieee = ctx.numbers

    def bwd(*tensors: Tensor | None) -> Gradients:
        dq, dk, dv = torch.ops.flash_dist.bwd(
            *tensors,
            mask_data,
            None,  # mask_slots: without them dS is not stored
            ctx.mask,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            softmax_scale,
            BUDGET_NOW,
            False,  # noqa: FBT003 - the operator's schema
            ieee,
        )
        return dq, dk, dv

    longest = None if cu_seqlens_q is None else max_seqlen_k
    gradients = differentiate(bwd, tuple(saved), dout, dlse, max_seqlen_k=longest)
    return *gradients, *(None,) * 8


def _masked_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401
    q, k, v, ctx.handle, ctx.softmax_scale, _, ctx.ieee = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mask = registry.find(ctx.handle) if isinstance(ctx.handle, int) else None  # it lives on
    ctx.set_materialize_grads(False)


def _masked_backward(
    ctx: Any,  # noqa: ANN401
    dout: Tensor | None,
    dlse: Tensor | None,
) -> tuple[Tensor | None, ...]:
    if dout is None and dlse is None:
        return (None,) * 7

    def bwd(*tensors: Tensor | None) -> Gradients:
        plan = ctx.handle, ctx.softmax_scale, BUDGET_NOW, False, ctx.ieee
        dq, dk, dv = torch.ops.flash_dist.masked_bwd(*tensors, *plan)
        return dq, dk, dv

    return *differentiate(bwd, ctx.saved_tensors, dout, dlse), *(None,) * 4
