"""Operators that a call dispatches in eager mode, and operators that modes and traces see."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flash_dist import BlockMask, flash_attn_func, flash_attn_varlen_func
from flash_dist.kernels import operators

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
pytestmark = pytest.mark.gpu

SHAPE = (2, 150, 4, 64)
STARTS = (0, 40, 40, 300)
KINDS = ["band", "mask", "packed"]


class Names(TorchDispatchMode):
    """Records the names of our operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's protocol
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if func.namespace == "flash_dist":
            self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def make_call(kind: str) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """Return a call of a kind, and its inputs."""
    generator = torch.Generator().manual_seed(0)
    inputs = list(torch.randn(3, *SHAPE, generator=generator).bfloat16().cuda().unbind())
    if kind == "packed":
        starts = torch.tensor(STARTS, dtype=torch.int32, device="cuda")
        longest = max(b - a for a, b in itertools.pairwise(STARTS))
        varlen: Any = flash_attn_varlen_func
        packing = starts, starts, longest, longest
        return (
            lambda *x: varlen(*x, *packing, causal=True),
            [x.flatten(0, 1) for x in inputs],
        )
    mask = BlockMask.block_causal([token // 50 for token in range(SHAPE[1])])
    options: dict[str, Any] = {"mask": mask} if kind == "mask" else {"causal": True}
    return lambda *x: flash_attn_func(*x, **options), inputs


def train(call: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = call(*leaves)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


@pytest.mark.filterwarnings("default")  # torch's profiler emits warnings
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_nobody_looks_at_takes_operators_without_a_formula(kind: str) -> None:
    call, inputs = make_call(kind)
    train(call, inputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call(*inputs)
        train(call, inputs)
    names = sorted(x.name for x in profile.events() if x.name.startswith("flash_dist::"))
    assert names == [
        f"flash_dist::{name}" for name in ("attention_backward_no_grad", *["attention_no_grad"] * 2)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_mode_sees_the_operators_that_graphs_hold(kind: str) -> None:
    call, inputs = make_call(kind)
    want = train(call, inputs)
    with Names() as names:
        out = call(*inputs)
        got = train(call, inputs)
    name = "attention_masked" if kind == "mask" else "attention"
    assert names.seen == [f"{one}.default" for one in (name, name, f"{name}_backward")]
    assert all(map(torch.equal, (out, *got), (want[0], *want)))


@pytest.mark.filterwarnings("default")  # torch.jit.trace is deprecated
def test_a_traced_call_holds_the_operator_with_a_formula() -> None:
    call, inputs = make_call("band")
    want = train(call, inputs)
    traced = torch.jit.trace(call, inputs, check_trace=False)
    assert "flash_dist::attention(" in str(traced.graph)
    assert all(map(torch.equal, train(traced, inputs), want))


def test_a_band_first_used_in_inference_mode_serves_training() -> None:
    call, inputs = make_call("band")
    want = train(call, inputs)
    operators._integers_of.cache_clear()
    with torch.inference_mode():
        out = call(*inputs)
    assert all(map(torch.equal, (out, *train(call, inputs)), (want[0], *want)))
