"""The choice for float32 reaches the operators in calls, gradients, graphs and programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.utils._python_dispatch import TorchDispatchMode

from flash_dist import (
    BlockMask,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flex_attention,
    float32_precision,
    scaled_dot_product_attention,
)
from flash_dist.kernels.problem import NOT_PACKED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flash_dist.kernels.choices import Precision

Tensor = torch.Tensor
SCALE = 0.25
YES, NO = (True,), (False,)  # flags of an operator
FORWARD, BACKWARD = "attention", "attention_backward"
BUDGET = 1 << 20


def is_ieee(operator: Any, args: Sequence[Any]) -> bool:  # noqa: ANN401 - torch.ops.X.Y
    place = [argument.name for argument in operator._schema.arguments].index("ieee")
    return len(args) > place and bool(args[place])  # torch omits arguments equal to their default


class Calls(TorchDispatchMode):
    """Records the names of our operators that ran, and whether each used FFMA."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.seen: list[tuple[str, bool]] = []

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: object,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        name = str(func).removesuffix(".default")
        if name.startswith("flash_dist."):
            self.seen.append((name.removeprefix("flash_dist."), is_ieee(func, args)))
        return func(*args, **(kwargs or {}))


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()


def starts(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()


ENDS = starts(4, 5)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "flash_attn_func": lambda **options: flash_attn_func(
        draw(1, 5, 4, 16), draw(1, 7, 2, 16), draw(1, 7, 2, 16), **options
    ),
    "qkvpacked": lambda **options: flash_attn_qkvpacked_func(draw(1, 5, 3, 2, 16), **options),
    "kvpacked": lambda **options: flash_attn_kvpacked_func(
        draw(1, 5, 2, 16), draw(1, 7, 2, 2, 16), **options
    ),
    "varlen": lambda **options: flash_attn_varlen_func(
        draw(9, 4, 16), draw(9, 2, 16), draw(9, 2, 16), ENDS, ENDS, 5, 5, **options
    ),
    "varlen_qkvpacked": lambda **options: flash_attn_varlen_qkvpacked_func(
        draw(9, 3, 2, 16), ENDS, 5, **options
    ),
    "varlen_kvpacked": lambda **options: flash_attn_varlen_kvpacked_func(
        draw(9, 2, 16), draw(9, 2, 2, 16), ENDS, ENDS, 5, 5, **options
    ),
}


def heads_first() -> tuple[Tensor, Tensor, Tensor]:
    return draw(1, 2, 5, 16), draw(1, 2, 5, 16), draw(1, 2, 5, 16)


OF_TORCH: dict[str, Callable[[], Any]] = {
    "scaled_dot_product_attention": lambda: scaled_dot_product_attention(*heads_first()),
    "flex_attention": lambda: flex_attention(*heads_first()),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_an_argument_reaches_forward_and_backward(function: Callable[..., Any]) -> None:
    with Calls() as calls:
        function(float32_precision="ieee").sum().backward()
        with float32_precision("ieee"):
            function(float32_precision="tf32x3").sum().backward()
    assert calls.seen == [(FORWARD, True), (BACKWARD, True), (FORWARD, False), (BACKWARD, False)]


@pytest.mark.parametrize(
    "function", [*FUNCTIONS.values(), *OF_TORCH.values()], ids=[*FUNCTIONS, *OF_TORCH]
)
def test_a_block_goes_for_every_function(function: Callable[..., Any]) -> None:
    with Calls() as calls:
        with float32_precision("ieee"):
            function()
        function()
    assert calls.seen == [(FORWARD, True), (FORWARD, False)]


def test_a_backward_computes_as_its_forward_did() -> None:
    with Calls() as calls:
        with float32_precision("ieee"):
            inside = FUNCTIONS["flash_attn_func"]()
        outside = FUNCTIONS["flash_attn_func"]()
        inside.sum().backward()
        with float32_precision("ieee"):
            outside.sum().backward()
    assert calls.seen == [(FORWARD, True), (FORWARD, False), (BACKWARD, True), (BACKWARD, False)]


def test_a_call_with_a_mask_takes_it_along() -> None:
    q = draw(1, 3, 2, 16)
    mask = BlockMask.documents([0, 0, 1])
    with Calls() as calls:
        flash_attn_func(q, q, q, mask=mask, float32_precision="ieee").sum().backward()
    assert calls.seen == [("attention_masked", True), ("attention_masked_backward", True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_dtypes_have_one_way(dtype: torch.dtype) -> None:
    q = draw(1, 3, 2, 16, dtype=dtype)
    with Calls() as calls:
        flash_attn_func(q, q, q, float32_precision="ieee").sum().backward()
    assert calls.seen == [(FORWARD, False), (BACKWARD, False)]


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_another_precision_is_refused_before_anything_runs(function: Callable[..., Any]) -> None:
    with Calls() as calls, pytest.raises(ValueError, match='"tf32x3" or "ieee", got "highest"'):
        function(float32_precision="highest")
    assert not calls.seen


def test_transforms_take_it_along() -> None:
    q = draw(2, 3, 2, 16).detach()
    with Calls() as calls:
        torch.func.grad(lambda x: flash_attn_func(x, q, q, float32_precision="ieee").sum())(q)
        x = q.unsqueeze(0)
        torch.func.vmap(lambda x: flash_attn_func(x, x, x, float32_precision="ieee"))(x)
    assert calls.seen == [(FORWARD, True), (BACKWARD, True), (FORWARD, True)]


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True], ids=["band", "mask"])
def test_a_graph_holds_what_was_chosen_and_another_choice_compiles_another(*, masked: bool) -> None:
    mask = BlockMask.documents([0, 0, 1]) if masked else None
    name = "attention_masked" if masked else "attention"
    names = name, f"{name}_backward"
    seen: set[tuple[str, bool]] = set()

    def note(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        seen.update(
            (str(node.target).split(".")[1], is_ieee(node.target, node.args))
            for node in graph.graph.nodes
            if str(node.target).startswith("flash_dist.")
        )
        boxed: Callable[..., Any] = make_boxed_func(graph.forward)
        return boxed

    compiled = torch.compile(
        lambda x: flash_attn_func(x, x, x, mask=mask),
        fullgraph=True,
        backend=aot_autograd(fw_compiler=note, bw_compiler=note),
    )
    choices: tuple[tuple[Precision, set[bool]], ...]
    choices = ("tf32x3", {False}), ("ieee", {True}), ("tf32x3", set())
    for precision, noted in choices:
        seen.clear()
        with float32_precision(precision):
            out = compiled(draw(1, 3, 2, 16))
        out.sum().backward()
        assert seen == {(name, ieee) for name in names for ieee in noted}, precision


def test_an_operator_called_by_hand_takes_it_last_and_may_do_without() -> None:
    q = draw(1, 5, 2, 16)
    call = (q, q, q, None, [0, -1, 0, 1], *NOT_PACKED, SCALE)
    with Calls() as calls:
        for out, _ in (
            torch.ops.flash_dist.attention(*call),
            torch.ops.flash_dist.attention(*call, *YES),
            torch.ops.flash_dist.attention(*call, ieee=True),
        ):
            out.sum().backward()
    assert [ieee for _, ieee in calls.seen] == [False, True, True, False, True, True]
    mask = BlockMask.documents([0, 0, 1, 1, 1])
    with Calls() as calls:
        for rest in ((), YES):
            out, _ = torch.ops.flash_dist.attention_masked(
                q, q, q, None, mask.handle, 1, 1, *NO, SCALE, *NO, *NO, *rest
            )
            out.sum().backward()
    assert [ieee for _, ieee in calls.seen] == [False, False, True, True]


@pytest.mark.slow
def test_the_operators_pass_opcheck_with_it() -> None:
    q = draw(1, 5, 2, 16)
    call = (None, [0, -1, 0, 1], *NOT_PACKED, SCALE)
    mask = BlockMask.documents([0, 0, 1, 1, 1])
    ops = torch.ops.flash_dist
    torch.library.opcheck(ops.attention.default, (q, q, q, *call, True))
    masked = None, mask.handle, 1, 1, False, SCALE
    torch.library.opcheck(ops.attention_masked.default, (q, q, q, *masked, False, False, True))
    with torch.no_grad():
        out, lse = ops.attention(q, q, q, *call)
        saved = torch.ones_like(out), q.detach(), q.detach(), q.detach(), out, lse, None
    torch.library.opcheck(
        ops.attention_backward.default, (*saved, None, *call, BUDGET, False, True)
    )
    backward = ops.attention_masked_backward.default
    torch.library.opcheck(backward, (*saved, *masked, BUDGET, False, True))


class Layer(torch.nn.Module):
    """A model that consists of one call of attention."""

    def forward(self, x: Tensor) -> Tensor:
        """Return attention with x as queries, keys and values."""
        out: Tensor = flash_attn_func(x, x, x)
        return out


@pytest.mark.slow
def test_an_exported_program_keeps_what_was_chosen() -> None:
    x = draw(1, 3, 2, 16)
    with float32_precision("ieee"):
        exported = torch.export.export(Layer(), (x,)).module()
    with Calls() as calls:
        exported(x).sum().backward()
    assert calls.seen == [(FORWARD, True), (BACKWARD, True)]
