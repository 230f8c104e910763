"""Attention under torch.func: grad, vjp, vmap, and transforms composed of them.

These transforms need an autograd.Function with `setup_context`, which makes every call slower. So
calls without transforms use another Function, see autograd.py. The vmapped axis becomes part of the
batch, so one launch computes all its entries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch._C import _functorch as functorch
from torch.autograd import forward_ad

from ..errors import FlashDistError
from ..kernels import operators
from ..kernels.derivatives import refuse_forward_mode, refuse_second
from ..kernels.problem import OTHERS, TENSORS, Problem
from ..masks import BlockMask
from .arguments import is_transformed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..masks import Band

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]


def require_no_gradients(name: str, **tensors: Tensor | None) -> None:
    """Raise if a tensor needs gradients that the result cannot have.

    Args:
        name: The function without gradients.
        tensors: All inputs of the function, by the caller's names.

    Raises:
        FlashDistError: autograd or torch.func differentiates with respect to one of the tensors, in
            reverse or forward mode.
        ValueError: Likewise, under torch.compile.
    """
    found = find_differentiated(**tensors)
    if found is None:
        return
    hint = "`flash_attn_func` has them; `torch.no_grad()` around this call leaves it out"
    if _has_tangent(tensors[found]):
        how, hint = "with a tangent, in forward mode (jvp, jacfwd)", f"`{found}.detach()` has none"
    elif is_transformed():
        how = "within torch.func.grad, vjp or jacrev"
    else:
        how = "that requires them, with grad mode on"
    message = f"{name} has no gradients, got {found} {how}"
    if torch.compiler.is_compiling():  # torch.compile shows only the text of built-in exceptions
        message += f"\n\nhint: {hint}"
        raise ValueError(message)
    raise FlashDistError(message, hint=hint)


def find_differentiated(**tensors: Tensor | None) -> str | None:
    """Return the name of the first tensor that autograd or torch.func tracks; None if none is."""
    has_levels = forward_ad._current_level >= 0 or is_transformed()  # noqa: SLF001 - no public equivalent
    follows = torch.is_grad_enabled()
    if not (follows or has_levels):
        return None
    for name, x in tensors.items():
        if x is None:
            continue
        if follows and x.requires_grad:
            return name
        if has_levels and (_has_tangent(x) or (follows and _is_tracked(x))):
            return name
    return None


def _is_tracked(x: Tensor) -> bool:
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_gradtrackingtensor(x) and x.requires_grad:
            return True
        x = functorch.get_unwrapped(x)
    return False


def _has_tangent(x: Tensor | None) -> bool:
    """Return whether a tensor has a forward-mode tangent, at any level of torch.func."""
    if x is None or forward_ad._current_level < 0 or torch.compiler.is_compiling():  # noqa: SLF001 - no public equivalent
        return False
    while functorch.is_batchedtensor(x) or forward_ad.unpack_dual(x).tangent is None:
        if not functorch.is_functorch_wrapped_tensor(x):
            return False
        x = functorch.get_unwrapped(x)
    return True


def refuse_compilation() -> NoReturn:
    """Raise TypeError: torch.compile cannot trace a transform of operators that have gradients."""
    message = (  # torch.compile shows only the text of built-in exceptions
        "torch.compile must find no torch.func.grad, vjp or vmap around attention, got one"
        "\n\nhint: without fullgraph=True the code inside of it runs eagerly"
    )
    raise TypeError(message)


def refuse_intervals() -> NoReturn:
    """Raise FlashDistError for an IntervalMask, whose fixed batch vmap would change."""
    message = "torch.func.grad, vjp and vmap take a BlockMask as mask, got an IntervalMask"
    raise FlashDistError(message, hint="`BlockMask.from_intervals`, made once outside")


def refuse_max_logit() -> NoReturn:
    """Raise ValueError for return_max_logit: the maximum would include the vmapped axis."""
    message = (  # see refuse_compilation()
        "return_max_logit must be False within torch.func.grad, vjp and vmap, got True"
        "\n\nhint: the same call outside of them returns max_logit"
    )
    raise ValueError(message)


class Attention(torch.autograd.Function):
    """Computes out and lse from q, k, v and the flattened fields of a Problem.

    `scores` of the Problem must be None.
    """

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, *call: Any) -> Pair:  # noqa: ANN401
        """Return out and lse."""
        out, lse = operators.attend(q, k, v, Problem.unflatten(call[:TENSORS], call[TENSORS:]))
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:  # noqa: ANN401
        """Save the arguments and results for the backward."""
        tensors, ctx.others = inputs[: 3 + TENSORS], inputs[3 + TENSORS :]
        ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Return the gradients of q, k and v."""
        if dout is None and dlse is None:
            return (None,) * (3 + TENSORS + OTHERS)
        dq, dk, dv = Backward.apply(dout, dlse, *ctx.saved_tensors, *ctx.others)  # type: ignore[no-untyped-call]
        return dq, dk, dv, *(None,) * (TENSORS + OTHERS)

    @staticmethod
    def vmap(
        info: Any,  # noqa: ANN401
        in_dims: Sequence[int | None],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *call: Any,  # noqa: ANN401
    ) -> tuple[Pair, tuple[int, int]]:
        """Compute all entries of the vmapped axis at once."""
        _require_same_for_all(info.batch_size, *call)
        axis_of_vmap = _VmapAxis(info.batch_size)
        q, k, v = map(axis_of_vmap.merge, (q, k, v), in_dims)
        out, lse = Attention.apply(q, k, v, *call)  # type: ignore[no-untyped-call]
        return (axis_of_vmap.split(out), axis_of_vmap.split(lse)), (0, 0)

    @staticmethod
    def jvp(*_: object) -> NoReturn:
        """Raise an error: forward mode is not supported."""
        refuse_forward_mode()


class Backward(torch.autograd.Function):
    """Computes dq, dk and dv from dout, dlse, q, k, v, out, lse and the fields of a Problem."""

    @staticmethod
    def forward(dout: Tensor | None, dlse: Tensor | None, *inputs: Any) -> Gradients:  # noqa: ANN401
        """Return dq, dk, dv."""
        problem = Problem.unflatten(inputs[5 : 5 + TENSORS], inputs[5 + TENSORS :])
        return operators.differentiate(dout, inputs[:5], dlse, problem)[:3]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Gradients) -> None:  # noqa: ANN401
        """Save nothing: there is no second derivative."""

    @staticmethod
    def vmap(
        info: Any,  # noqa: ANN401
        in_dims: Sequence[int | None],
        *inputs: Any,  # noqa: ANN401
    ) -> tuple[Gradients, tuple[int, int, int]]:
        """Compute all entries of the vmapped axis at once."""
        tensors, call = inputs[:7], inputs[7:]
        _require_same_for_all(info.batch_size, *call)
        axis_of_vmap = _VmapAxis(info.batch_size)
        merged = map(axis_of_vmap.merge_any, tensors, in_dims)
        dq, dk, dv = Backward.apply(*merged, *call)  # type: ignore[no-untyped-call]
        return (axis_of_vmap.split(dq), axis_of_vmap.split(dk), axis_of_vmap.split(dv)), (0, 0, 0)

    @staticmethod
    def backward(*_: object) -> NoReturn:
        """Raise an error: second derivatives are not supported."""
        refuse_second()

    @staticmethod
    def jvp(*_: object) -> NoReturn:
        """Raise an error: forward mode over the backward would be a second derivative."""
        refuse_second()


class _VmapAxis:
    """A vmapped axis, merged into the batch."""

    def __init__(self, size: int) -> None:
        self.size = size

    def merge(self, x: Tensor, axis: int | None) -> Tensor:
        x = x.expand(self.size, *x.shape) if axis is None else x.movedim(axis, 0)
        return x.flatten(0, 1)

    def merge_any(self, x: Tensor | None, axis: int | None) -> Tensor | None:
        return None if x is None else self.merge(x, axis)

    def split(self, x: Tensor) -> Tensor:
        batch = x.shape[0] // self.size
        parts: Tensor = x.unflatten(0, (self.size, batch))
        return parts


def _require_same_for_all(
    size: int,
    cu_seqlens_q: Tensor | None,
    _cu_seqlens_k: Tensor | None,
    _alibi_slopes: None,
    _sinks: None,
    _bias: None,
    _rng_state: None,
    mask: Band | BlockMask,
    *_: object,
) -> None:
    """Raise FlashDistError for packed sequences, and for a mask that differs between batch entries.

    Neither is supported under vmap.
    """
    if cu_seqlens_q is not None:
        message = f"packed sequences have no batch for torch.vmap, got an axis of {size}"
        raise FlashDistError(message, hint="pack the sequences of all its entries")
    if isinstance(mask, BlockMask) and mask.sizes.batch not in {None, 1}:
        message = (
            "mask must be the same for all batch entries under torch.vmap, got one made for "
            f"{mask.sizes.batch}"
        )
        raise FlashDistError(message, hint="call it without vmap, on a batch of all entries")
