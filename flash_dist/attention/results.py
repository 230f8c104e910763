"""Results of the public functions: out and, if requested, lse and other tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, ParamSpec, Protocol, overload

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]
Result = Tensor | Any  # result if the flags are not literals; Any stands for the tuples
P = ParamSpec("P")

# Types of flags in signatures. For type checkers, a signature describes the calls that return only
# out; the classes below add the other calls. For `inspect` and `help`, FLAGS has the flags' types.
Flag = Literal[False]
FLAGS: Final = {
    **dict.fromkeys(
        ("return_lse", "return_attn_probs", "return_softmax_lse", "return_max_logit"), "bool"
    ),
    "return_aux": "torch_flex.AuxRequest | None",
}


class ReturnsLse(Protocol[P]):
    """Type of functions with the flags return_lse, return_attn_probs and return_max_logit.

    Such a function returns only out if all these flags are False, else a tuple.
    """

    @overload
    def __call__(self, *args: P.args, **options: P.kwargs) -> Tensor: ...
    @overload
    def __call__(
        self, *args: object, return_max_logit: Literal[True], **options: object
    ) -> Result: ...
    @overload
    def __call__(
        self,
        *args: object,
        return_lse: Literal[True],
        return_attn_probs: Flag = False,
        return_max_logit: Flag = False,
        **options: object,
    ) -> Pair: ...
    @overload
    def __call__(self, *args: object, return_lse: bool, **options: object) -> Result: ...
    @overload
    def __call__(self, *args: object, return_attn_probs: bool, **options: object) -> Result: ...


class ReturnsSoftmaxLse(Protocol[P]):
    """Type of functions that return (out, lse) if return_softmax_lse is True, else out."""

    @overload
    def __call__(self, *args: P.args, **options: P.kwargs) -> Tensor: ...
    @overload
    def __call__(
        self, *args: object, return_softmax_lse: Literal[True], **options: object
    ) -> Pair: ...
    @overload
    def __call__(self, *args: object, return_softmax_lse: bool, **options: object) -> Result: ...


class ReturnsAux(Protocol[P]):
    """Type of functions that return out, (out, lse) or, with return_aux, (out, AuxOutput)."""

    @overload
    def __call__(self, *args: P.args, **options: P.kwargs) -> Tensor: ...
    @overload
    def __call__(
        self, *args: object, return_lse: Literal[True], return_aux: None = None, **options: object
    ) -> Pair: ...
    @overload
    def __call__(
        self, *args: object, return_aux: AuxRequest, **options: object
    ) -> tuple[Tensor, AuxOutput]: ...


def returns_lse(function: Callable[P, Result]) -> ReturnsLse[P]:
    """Return the function itself, with a type that depends on the flags of a call."""
    typed: ReturnsLse[P] = _annotate(function)
    return typed


def returns_softmax_lse(function: Callable[P, Result]) -> ReturnsSoftmaxLse[P]:
    """Return the function itself, with a type that depends on return_softmax_lse."""
    typed: ReturnsSoftmaxLse[P] = _annotate(function)
    return typed


def returns_aux(function: Callable[P, Result]) -> ReturnsAux[P]:
    """Return the function itself, with a type that depends on return_lse and return_aux."""
    typed: ReturnsAux[P] = _annotate(function)
    return typed


def _annotate(function: Callable[..., Result]) -> Any:  # noqa: ANN401
    """Give the flags their types for inspect and help, and return the function."""
    annotations = function.__annotations__
    annotations.update({name: kind for name, kind in FLAGS.items() if name in annotations})
    return function


def choose_result(
    out: Tensor,
    lse: Tensor | None,
    *max_logit: Tensor,
    return_lse: bool,
    return_attn_probs: bool = False,
    probs: Tensor | None = None,
) -> Result:
    """Return out, (out, lse), or (out, lse, probs); probs is None without dropout.

    max_logit, if given, is appended to the tuple: (out, max_logit) without lse.
    """
    if return_attn_probs:
        return out, lse, probs, *max_logit
    if return_lse:
        return out, lse, *max_logit
    return (out, *max_logit) if max_logit else out
