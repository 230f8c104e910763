"""torch.func over attention: grad, vjp and vmap work, other transforms raise an error."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.autograd import forward_ad

from flash_dist import BlockMask, flash_attn_func, flash_attn_varlen_func
from flash_dist.errors import FlashDistError
from flash_dist.kernels import operators  # noqa: F401 - registers them

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
ENTRIES = 3
DOCUMENTS = BlockMask.documents([0, 0, 1, 1, 1])
Triple = tuple[Tensor, Tensor, Tensor]


@pytest.fixture
def inputs() -> Triple:
    """Return q, k, v with an additional first axis."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, ENTRIES, 2, 5, 2, 8, dtype=torch.float64, generator=generator).unbind()  # type: ignore[return-value]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn_func(q, k, v, causal=True)


def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, lse = flash_attn_func(q, k, v, mask=DOCUMENTS, return_lse=True)
    return out.square().sum() + (lse * lse).sum()


def small(q: Tensor) -> Tensor:
    return flash_attn_func(q, q, q)


def differentiate(*tensors: Tensor) -> tuple[Tensor, ...]:
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    return torch.autograd.grad(loss(*leaves), leaves)


def first(inputs: Triple) -> Triple:
    q, k, v = (x[0] for x in inputs)
    return q, k, v


def test_grad_and_vjp_give_the_gradients_of_autograd(inputs: Triple) -> None:
    want = differentiate(*first(inputs))
    got = torch.func.grad(loss, argnums=(0, 1, 2))(*first(inputs))
    assert all(map(torch.equal, got, want))
    value, pull, *_ = torch.func.vjp(loss, *first(inputs))
    assert all(map(torch.equal, pull(torch.ones_like(value)), want))


def test_vmap_is_a_loop_over_its_axis(inputs: Triple) -> None:
    q, k, v = inputs
    want = torch.stack([attention(*one) for one in zip(q, k, v, strict=True)])
    assert torch.equal(torch.vmap(attention)(q, k, v), want)
    got = torch.vmap(attention, in_dims=(2, 0, 1))(q.movedim(0, 2), k, v.movedim(0, 1))
    assert torch.equal(got, want)
    got = torch.vmap(attention, in_dims=(0, None, None))(q, k[1], v[1])
    assert torch.equal(got, torch.stack([attention(one, k[1], v[1]) for one in q]))


def test_vmap_and_grad_nest_either_way(inputs: Triple) -> None:
    want = [torch.stack(x) for x in zip(*map(differentiate, *inputs), strict=True)]
    each = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*inputs)
    assert all(map(torch.equal, each, want))

    def whole(*tensors: Tensor) -> Tensor:
        return torch.vmap(loss)(*tensors).sum()

    assert all(map(torch.equal, torch.func.grad(whole, argnums=(0, 1, 2))(*inputs), want))


def test_jacobians_come_from_one_backward_of_many(inputs: Triple) -> None:
    q = inputs[0][0, :1]
    want = torch.autograd.functional.jacobian(small, q)
    torch.testing.assert_close(torch.func.jacrev(small)(q), want)
    got = torch.autograd.functional.jacobian(small, q, vectorize=True)
    torch.testing.assert_close(got, want)


def test_packed_sequences_have_gradients_under_grad(inputs: Triple) -> None:
    ends = torch.tensor([0, 3, 5], dtype=torch.int32)

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_varlen_func(q, k, v, ends, ends, 3, 3, causal=True).square().sum()

    q, k, v = (x[0, 0].clone().requires_grad_() for x in inputs)
    want = torch.autograd.grad(packed(q, k, v), (q, k, v))
    got = torch.func.grad(packed, argnums=(0, 1, 2))(q.detach(), k.detach(), v.detach())
    assert all(map(torch.equal, got, want))


def dual(x: Tensor) -> object:
    with forward_ad.dual_level():
        return small(forward_ad.make_dual(x, x))


def vmapped(**options: object) -> Callable[[Tensor], object]:
    return (
        lambda x: torch.vmap(lambda one: flash_attn_func(one, one, one, **options))(  # type: ignore[call-overload]
            x.expand(ENTRIES, 2, *x.shape[1:])
        )
    )


def vmapped_packed(x: Tensor) -> object:
    ends = torch.tensor([0, 5], dtype=torch.int32)
    return torch.vmap(lambda one: flash_attn_varlen_func(one, one, one, ends, ends, 5, 5))(x)


def twice(x: Tensor) -> object:
    def inner(y: Tensor) -> Tensor:
        gradient: Tensor = torch.func.grad(lambda z: small(z).square().sum())(y)
        return gradient.sum()

    return torch.func.grad(inner)(x)


REFUSALS: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "jvp": (lambda x: torch.func.jvp(small, (x,), (x,)), "has gradients only, got forward-mode"),
    "jacfwd": (torch.func.jacfwd(small), "has gradients only, got forward-mode"),
    "dual": (dual, "has gradients only, got forward-mode"),
    "twice": (twice, "has first derivatives only, got a gradient of its gradient"),
    "mask-of-a-batch": (
        vmapped(mask=BlockMask.padding([3, 4])),
        "mask must be the same for all batch entries under torch.vmap, got one made for 2",
    ),
    "packed": (vmapped_packed, "packed sequences have no batch for torch.vmap, got an axis of 1"),
}


@pytest.mark.parametrize("case", REFUSALS.values(), ids=REFUSALS.keys())
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own jvp
def test_what_there_is_not_is_said(case: tuple[Callable[[Tensor], object], str]) -> None:
    call, text = case
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(FlashDistError, match=f"(?s){text}.*hint: "):
        call(torch.randn(1, 5, 2, 8, dtype=torch.float64, generator=generator))


def test_torch_compile_runs_a_transform_eagerly_or_says_why_not(inputs: Triple) -> None:
    gradients = torch.func.grad(loss, argnums=(0, 1, 2))
    want = gradients(*first(inputs))
    got = torch.compile(gradients, backend="aot_eager")(*first(inputs))
    assert all(map(torch.equal, got, want))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"must find no torch\.func\.grad"):
        torch.compile(gradients, backend="aot_eager", fullgraph=True)(*first(inputs))


BAND = [0, -1, 0, 1]
NOT_PACKED = None, None, 0, 0


def operator_calls(x: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return direct calls of the operators, which programs usually call by public functions."""
    ops = torch.ops.flash_dist
    no = False
    mask = None, DOCUMENTS.handle, 1, 1, no, 0.3
    out, lse = ops.attention(x, x, x, None, BAND, *NOT_PACKED, 0.3)
    saved = out, lse, None
    return {
        "attention": lambda x: ops.attention(x, x, x, None, BAND, *NOT_PACKED, 0.3)[0],
        "attention_backward": lambda x: ops.attention_backward(
            x, x, x, x, *saved, None, None, BAND, *NOT_PACKED, 0.3, 0, no
        )[0],
        "attention_masked": lambda x: ops.attention_masked(x, x, x, *mask, no, no)[0],
        "attention_masked_backward": lambda x: ops.attention_masked_backward(
            x, x, x, x, *saved, *mask, 0, no
        )[0],
        "decode": lambda x: ops.decode(x, x, x, *[None] * 5, 0, 0, 0.3, -1, -1, 0)[0],
    }


OPERATORS = list(operator_calls(torch.zeros(1, 5, 2, 8)))


@pytest.mark.parametrize("name", OPERATORS)
def test_vmap_calls_an_operator_for_each_entry(inputs: Triple, name: str) -> None:
    many = inputs[0]
    call = operator_calls(many[0])[name]
    assert torch.equal(torch.vmap(call)(many), torch.stack([call(one) for one in many]))


@pytest.mark.parametrize("name", OPERATORS[:-1])
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own jvp
def test_operators_say_which_derivatives_they_have(inputs: Triple, name: str) -> None:
    x = inputs[0][0]
    call = operator_calls(x)[name]
    with pytest.raises(FlashDistError, match=rf"(?s)`flash_dist::{name}` .*torch\.func.*hint: "):
        torch.func.grad(lambda one: call(one).sum())(x)
    with pytest.raises(FlashDistError, match=r"(?s)got forward-mode .*hint: "):
        torch.func.jvp(call, (x,), (x,))
    with pytest.raises(FlashDistError, match=r"(?s)got forward-mode .*hint: "):
        torch.vmap(lambda one: torch.func.jvp(call, (one,), (one,)))(inputs[0])
    with forward_ad.dual_level(), pytest.raises(FlashDistError, match="got forward-mode"):
        call(forward_ad.make_dual(x, x))
