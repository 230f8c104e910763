"""The Python overhead of a call before its operator is small, including all checks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from flash_dist import (
    BlockMask,
    IntervalMask,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    flash_mla_with_kvcache,
)
from flash_dist.attention import arguments, autograd
from flash_dist.attention.layouts import check_layouts
from flash_dist.bench import overhead
from flash_dist.bench.calls import LIMITS, SHAPES
from flash_dist.kernels import choices, operators
from flash_dist.kernels.problem import NOT_PACKED

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

Tensor = torch.Tensor
CALL = (None, [0, -1, -1, 1], *NOT_PACKED, 0.25)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, *shape, generator=generator).to(dtype).unbind()
    return q, k, v


def entered(run: Callable[[], object]) -> list[str]:
    """Return the Python functions that a run enters once its caches are filled."""
    names: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            names.append(frame.f_code.co_name)

    run()
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return names


@pytest.fixture
def operator(monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """Replace the operator, whose CPU form is also written in Python."""

    def fwd(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        return q.detach().clone(), torch.zeros(1, 2, 8)

    monkeypatch.setattr(operators, "_attention", fwd)
    monkeypatch.setattr(choices.process, "has_matched", False)
    return fwd


@pytest.mark.parametrize(("gradients", "most"), [(False, 26), (True, 30)], ids=["plain", "trained"])
@pytest.mark.usefixtures("operator")
def test_a_call_enters_few_functions_of_python(*, gradients: bool, most: int) -> None:
    q, k, v = (x.requires_grad_(gradients) for x in draw(1, 8, 2, 16))
    names = entered(lambda: flash_attn_func(q, k, v, causal=True))
    assert len(names) <= most, names


def test_a_step_of_decoding_enters_few_functions_of_python() -> None:
    q, k, v = draw(1, 8, 2, 16)
    lengths = torch.tensor([8], dtype=torch.int32)
    table = torch.tensor([[0]], dtype=torch.int32)
    latent = torch.zeros(1, 16, 1, 16)
    steps: dict[str, Callable[[], object]] = {
        "decode": lambda: flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=lengths),
        "latent": lambda: flash_mla_with_kvcache(q, latent, table, lengths, 16),
    }
    for name, step in steps.items():
        names = entered(step)
        before = names[: names.index("run")]  # events before the CPU kernel
        assert len(before) <= 32, (name, before)


def test_an_operator_that_nobody_differentiates_enters_one_function_before_its_kernel() -> None:
    q, k, v = draw(1, 8, 2, 16)
    names = entered(lambda: torch.ops.flash_dist.attention(q, k, v, *CALL))
    own = names.index("run")  # the CPU kernel
    assert names[:own] == ["<lambda>", "__call__", "kernel", "redispatch"], names


def attend_packed() -> object:
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    return flash_attn_varlen_func(*draw(8, 2, 16), ends, ends, 5, 5)


def attend_to_cache() -> object:
    q, k, v = draw(1, 8, 2, 16)
    return flash_attn_with_kvcache(q[:, :1], k, v)


@pytest.mark.parametrize("call", [attend_packed, attend_to_cache])
def test_what_a_call_does_not_ask_for_is_not_looked_up(call: Callable[[], object]) -> None:
    names = entered(call)
    assert not {"choose_scores", "refuse_unsupported", "check_others"} & set(names), names


def test_a_layout_is_checked_once_and_refused_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[object] = []

    def counted(*layouts: Any) -> None:  # noqa: ANN401 - layouts
        checked.append(layouts)
        check_layouts(*layouts)

    monkeypatch.setattr(arguments, "check_layouts", counted)
    q, k, v = draw(3, 24, 2, 16)
    for _ in range(3):
        flash_attn_func(q, k, v)
    assert len(checked) == 1
    flash_attn_func(q[:, ::2], k, v)
    flash_attn_func(q.double(), k.double(), v.double())
    assert len(checked) == 3
    for _ in range(3):
        with pytest.raises(TypeError, match="q and k must have the same dtype"):
            flash_attn_func(q, k.double(), v)
    assert len(checked) == 6


def test_autograd_is_not_told_of_a_call_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    apply = autograd._apply

    def noted(*args: object) -> object:
        told.append(args)
        return apply(*args)

    monkeypatch.setattr(autograd, "_apply", noted)
    q, k, v = draw(1, 8, 2, 16)
    leaf = q.clone().requires_grad_()
    out = flash_attn_func(q, k, v)
    with torch.no_grad():
        same = flash_attn_func(leaf, k, v)
    assert not told
    assert not out.requires_grad
    assert torch.equal(out, same)
    trained = flash_attn_func(q, k, leaf)
    assert len(told) == 1
    assert trained.requires_grad


@pytest.mark.parametrize("return_lse", [False, True])
def test_autograd_makes_lse_differentiable_where_it_is_asked_for(*, return_lse: bool) -> None:
    q, k, v = leaves = [x.requires_grad_() for x in draw(1, 8, 2, 16)]
    result: Any = flash_attn_func(q, k, v, return_lse=return_lse)
    out, lse = result if return_lse else (result, None)
    nodes = {x.grad_fn for x in (out, lse) if x is not None}
    assert [len(node._input_metadata) for node in nodes] == [1 + return_lse]
    want = torch.autograd.grad(flash_attn_func(q, k, v, return_attn_probs=True)[0].sum(), leaves)
    assert all(map(torch.equal, torch.autograd.grad(out.sum(), leaves), want))


SCORES: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 5.0},
    "slopes": {"alibi_slopes": torch.tensor([0.5, 0.25])},
    "sinks": {"learnable_sink": torch.tensor([0.5, -0.25])},
    "mask": {"softcap": 5.0, "mask": BlockMask.documents([0] * 3 + [1] * 5)},
    "intervals": {"mask": IntervalMask.of(torch.zeros(8).int(), torch.full((8,), 5), seqlen_k=8)},
}


@pytest.mark.parametrize("options", SCORES.values(), ids=SCORES)
def test_no_formula_runs_for_scores_or_intervals(options: dict[str, Any]) -> None:
    q, k, v = draw(1, 8, 2, 16)
    leaf = q.clone().requires_grad_()
    plain = entered(lambda: flash_attn_func(q, k, v, **options))
    trained = entered(lambda: flash_attn_func(leaf, k, v, **options))
    assert "autograd_impl" not in plain + trained, trained  # torch's, if a formula runs
    assert "forward" not in plain
    assert "forward" in trained  # from an autograd.Function
    out = flash_attn_func(leaf, k, v, **options).sum()
    backward = entered(lambda: torch.autograd.grad(out, leaf, retain_graph=True))
    assert "autograd_impl" not in backward
    twice = entered(lambda: torch.autograd.grad(out, leaf, retain_graph=True, create_graph=True))
    assert "autograd_impl" in twice  # raises for a second derivative


def test_a_formula_of_bent_scores_is_there_for_whoever_calls_the_operator() -> None:
    q, k, v = draw(1, 8, 2, 16)
    call = *CALL, False, 5.0, None, None
    names = entered(lambda: torch.ops.flash_dist.attention(q.requires_grad_(), k, v, *call))
    assert "autograd_impl" in names


def test_sinks_alone_are_differentiated() -> None:
    q, k, v = draw(1, 8, 2, 16)
    sinks = torch.tensor([0.5, -0.25]).requires_grad_()
    (dsinks,) = torch.autograd.grad(flash_attn_func(q, k, v, learnable_sink=sinks).sum(), sinks)
    assert dsinks.abs().min() > 0


def test_what_a_transform_has_left_behind_is_what_it_wraps() -> None:
    left: list[Tensor] = []
    q, k, v = draw(1, 8, 2, 16)

    def square(x: Tensor) -> Tensor:
        left.append(x)
        return x.square().sum()

    torch.func.grad(square)(q)
    out = flash_attn_func(left[0], k, v)
    assert torch.equal(out, flash_attn_func(q, k, v))
    assert not out.requires_grad


@pytest.mark.parametrize("name", ["dropout_p", "softcap"])
def test_a_tensor_that_equals_a_default_is_none(name: str) -> None:
    options: dict[str, Any] = {name: torch.tensor(0.0)}
    with pytest.raises((ValueError, TypeError), match=f"{name} must be .*, got (a t|T)ensor"):
        flash_attn_func(*draw(1, 8, 2, 16), **options)


def test_a_window_of_floats_that_equals_the_default_is_none() -> None:
    window: Any = (-1.0, -1.0)
    with pytest.raises(ValueError, match="window_size must be two whole numbers"):
        flash_attn_func(*draw(1, 8, 2, 16), window_size=window)


@pytest.mark.parametrize("masked", [False, True], ids=["band", "mask"])
def test_a_formula_is_there_for_whoever_wants_it(*, masked: bool) -> None:
    q, k, v = draw(1, 8, 2, 16)
    leaf = q.clone().requires_grad_()
    mask = BlockMask.documents([0] * 3 + [1] * 5)
    operators = torch.ops.flash_dist
    where = None, mask.handle, 1, 1, False, 0.25, False, False

    def attend(x: Tensor) -> Tensor:
        if masked:
            out: Tensor = operators.attention_masked(x, k, v, *where)[0]
        else:
            out = operators.attention(x, k, v, *CALL)[0]
        return out

    assert not attend(q).requires_grad
    with torch.no_grad():
        assert not attend(leaf).requires_grad
    options: dict[str, Any] = {"mask": mask} if masked else {}
    want = torch.autograd.grad(
        flash_attn_func(leaf, k, v, softmax_scale=0.25, **options).sum(), leaf
    )
    assert torch.equal(torch.autograd.grad(attend(leaf).sum(), leaf)[0], want[0])


@pytest.mark.slow
def test_every_kind_of_call_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "WARM_UP", 1)
    monkeypatch.setattr(overhead, "LOOPS", 1)
    calls = list(overhead.measure_calls(torch.device("cpu"), calls=1))
    first, *rest = LIMITS
    names = [first, "operator with a formula", *rest, "forward and backward"]
    assert [(call.shape, call.name) for call in calls] == [(x, y) for x in SHAPES for y in names]
    assert all(call.ours_us > 0 and call.peer_us > 0 for call in calls)
