"""softcap, alibi_slopes and sinks on the CPU: gradients, graphs, and refusals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from flash_dist import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
)
from flash_dist.errors import FlashDistError
from flash_dist.masks import BlockMask, IntervalMask

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
SLOPES = torch.tensor([0.5, 0.25])
SINKS = torch.tensor([0.3, -1.0])
ENDS = torch.tensor([0, 2, 5], dtype=torch.int32)

OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": SLOPES},
    "sinks": {"learnable_sink": SINKS},
    "all": {"softcap": 1.5, "alibi_slopes": SLOPES, "learnable_sink": SINKS},
}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype)


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return leaves: q with two heads, k and v with one head, and sinks."""
    made = [draw(1, 4, 2, 8), draw(1, 5, 1, 8, seed=1), draw(1, 5, 1, 8, seed=2), draw(2, seed=3)]
    return [x.to(dtype).requires_grad_() for x in made]


MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "mask": {"mask": BlockMask.from_dense(torch.ones(4, 5).tril(2).bool())},
    "intervals": {
        "mask": IntervalMask.of(torch.tensor([0, 0, 1, 2]), torch.tensor([3, 5, 5, 4]), seqlen_k=5)
    },
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_are_those_of_the_formula(options: dict[str, Any], mask: dict[str, Any]) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        own = {"learnable_sink": sinks} if "learnable_sink" in options else {}
        pair: tuple[Tensor, Tensor] = flash_attn_func(
            q, k, v, return_lse=True, **{**options, **own, **mask}
        )
        return pair[0], pair[1] + 0 * sinks.sum()

    assert torch.autograd.gradcheck(attend, inputs())


def test_packed_gradients_are_those_of_the_formula() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Any:  # noqa: ANN401
        slopes = torch.tensor([[0.5, 0.25], [1.0, 0.125]])
        bounds = ENDS, ENDS, 3, 3
        options: Any = {"softcap": 1.5, "alibi_slopes": slopes, "s_aux": sinks}
        return flash_attn_varlen_func(q, k, v, *bounds, causal=True, return_lse=True, **options)

    tensors = [draw(5, 2, 8), draw(5, 1, 8, seed=1), draw(5, 1, 8, seed=2), draw(2, seed=3)]
    assert torch.autograd.gradcheck(attend, [x.requires_grad_() for x in tensors])


def test_a_score_is_scaled_then_capped_then_lowered_by_its_distance() -> None:
    q, k, v, _ = (x.detach() for x in inputs())
    lse = flash_attn_func(
        q, k, v, softmax_scale=2.0, return_lse=True, softcap=3.0, alibi_slopes=SLOPES
    )[1]
    scores = 3.0 * torch.tanh(2.0 * torch.einsum("bihd,bjd->bhij", q, k[:, :, 0]) / 3.0)
    distance = (torch.arange(4)[:, None] + 1 - torch.arange(5)).abs()
    scores -= SLOPES[:, None, None] * distance
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_lse_holds_the_sink_and_gives_that_of_the_keys_alone() -> None:
    q, k, v, sinks = inputs()
    out, lse = flash_attn_func(q, k, v, return_lse=True)
    with_sink, lse_with_sink = flash_attn_func(q, k, v, return_lse=True, learnable_sink=sinks)
    share = (lse - sinks[:, None]).sigmoid().mT[..., None]
    torch.testing.assert_close(with_sink, out * share)
    alone = lse_with_sink + (-(sinks[:, None] - lse_with_sink).exp()).log1p()
    torch.testing.assert_close(alone, lse)


def test_the_two_names_of_sinks_mean_the_same_and_sinks_may_be_of_16_bits() -> None:
    q, k, v, _ = inputs(torch.float32)
    sinks = SINKS.bfloat16().requires_grad_()
    first = flash_attn_func(q, k, v, learnable_sink=sinks)
    assert torch.equal(first, flash_attn_func(q, k, v, s_aux=sinks))
    first.sum().backward()
    assert sinks.grad is not None
    assert sinks.grad.dtype == torch.bfloat16


def test_a_row_of_one_key_with_a_sink_has_gradients() -> None:
    q, k, v, sinks = inputs()
    k, v = (x.detach()[:, :1].requires_grad_() for x in (k, v))
    out = flash_attn_func(q, k, v, learnable_sink=sinks)
    grads = torch.autograd.grad(out.sum(), (q, k, v, sinks))
    assert all(bool(grad.any()) for grad in grads)


def test_packed_forms_pass_scores_on() -> None:
    x = draw(1, 5, 2, 8)
    wanted = flash_attn_func(x, x, x, **OPTIONS["all"])
    stacked = torch.stack((x, x, x), 2)
    assert torch.equal(flash_attn_qkvpacked_func(stacked, **OPTIONS["all"]), wanted)
    assert torch.equal(flash_attn_kvpacked_func(x, stacked[:, :, 1:], **OPTIONS["all"]), wanted)
    packed = flash_attn_varlen_qkvpacked_func(stacked[0], ENDS[[0, 2]], 5, **OPTIONS["all"])
    assert torch.equal(packed, wanted[0])


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_compiled_calls_have_the_same_bits(options: dict[str, Any], mask: dict[str, Any]) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        own = {"learnable_sink": sinks} if "learnable_sink" in options else {}
        out, lse = flash_attn_func(q, k, v, return_lse=True, **{**options, **own, **mask})
        total: Tensor = out.sum() + lse.where(lse.isfinite(), 0.0).sum() + 0 * sinks.sum()
        return total

    leaves = inputs(torch.float32)
    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    first = torch.autograd.grad(compiled(*leaves), leaves)
    second = torch.autograd.grad(attend(*leaves), leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_operators_pass_opcheck() -> None:
    q, k, v, sinks = inputs(torch.float32)
    ops: Any = torch.ops.flash_dist
    scores = 1.5, SLOPES, sinks
    band = None, [0, -1, 0, 1], None, None, 0, 0
    plan = 0.5, 0, False, False
    numbers = 0.5, *plan[-1:]
    intervals = MASKS["intervals"]["mask"]
    masks = (
        (None, MASKS["mask"]["mask"].handle, 1, 1, False),
        (intervals.plan, 0, intervals.batches, intervals.heads, intervals.causal),
    )
    torch.library.opcheck(ops.attention, (q, k, v, *band, *numbers, *scores))
    for mask in masks:
        masked = q, k, v, *mask, 0.5, False, False, False
        torch.library.opcheck(ops.attention_masked, (*masked, *scores))
    q, k, v, sinks = (x.detach() for x in (q, k, v, sinks))
    scores = 1.5, SLOPES, sinks
    out, lse = ops.attention(q, k, v, *band, *numbers, *scores)
    saved = torch.ones_like(out), q, k, v, out, lse, None
    torch.library.opcheck(ops.attention_backward, (*saved, None, None, *band[1:], *plan, *scores))
    for mask in masks:
        torch.library.opcheck(ops.attention_masked_backward, (*saved, *mask, *plan, *scores))


def test_an_exported_program_has_gradients_of_sinks() -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sinks = torch.nn.Parameter(SINKS.clone())

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flash_attn_func(q, k, v, causal=True, softcap=1.5, learnable_sink=self.sinks)

    module = Module()
    q, k, v, _ = (x.detach() for x in inputs(torch.float32))
    program = torch.export.export(module, (q, k, v)).module()
    program(q, k, v).sum().backward()
    exported = next(iter(program.parameters())).grad
    module(q, k, v).sum().backward()
    assert exported is not None
    assert module.sinks.grad is not None
    assert torch.equal(exported, module.sinks.grad)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "negative-cap": ({"softcap": -1.0}, ValueError, r"softcap must be 0 or None .*, got -1\.0"),
    "infinite-cap": ({"softcap": float("inf")}, ValueError, "softcap must be .*, got inf"),
    "cap-of-text": ({"softcap": "3"}, TypeError, "softcap must be a float or None, got str"),
    "slopes-of-16-bits": (
        {"alibi_slopes": SLOPES.half()},
        TypeError,
        r"(?s)alibi_slopes must be float32, got float16.*hint: `alibi_slopes\.float\(\)`",
    ),
    "slopes-of-other-heads": (
        {"alibi_slopes": torch.ones(3)},
        ValueError,
        r"alibi_slopes must have shape .* \[2\] or \[1, 2\], got \[3\]",
    ),
    "slopes-with-gradients": (
        {"alibi_slopes": SLOPES.clone().requires_grad_()},
        ValueError,
        "(?s)alibi_slopes must not require gradients.*hint: `alibi_slopes.detach",
    ),
    "slopes-no-tensor": ({"alibi_slopes": [0.5, 0.5]}, TypeError, "alibi_slopes must be a torch"),
    "slopes-elsewhere": (
        {"alibi_slopes": SLOPES.to("meta")},
        ValueError,
        "alibi_slopes must be on cpu, where the queries are, got meta",
    ),
    "sinks-of-other-heads": (
        {"learnable_sink": torch.ones(1, 2)},
        ValueError,
        r"learnable_sink must have shape \[num_heads_q\], \[2\], got \[1, 2\]",
    ),
    "sinks-of-ints": ({"s_aux": torch.ones(2).int()}, TypeError, "s_aux must be of floating point"),
    "sinks-twice": (
        {"s_aux": SINKS, "learnable_sink": SINKS},
        ValueError,
        "learnable_sink and s_aux are two names of one argument, got both",
    ),
}


@pytest.mark.parametrize(("options", "kind", "words"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(
    options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    q, k, v, _ = inputs(torch.float32)
    with pytest.raises(kind, match=words):
        flash_attn_func(q, k, v, **options)


@pytest.mark.parametrize(
    ("transform", "shape"),
    [(torch.func.grad, (1, 4, 2, 8)), (torch.func.vmap, (3, 1, 4, 2, 8))],
    ids=["grad", "vmap"],
)
def test_transforms_are_refused(transform: Callable[..., Any], shape: tuple[int, ...]) -> None:
    _, k, v, _ = inputs(torch.float32)

    def attend(q: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, softcap=2.0).sum()

    with pytest.raises(FlashDistError, match=r"outside of torch\.func"):
        transform(attend)(draw(*shape, dtype=torch.float32))


def test_a_sink_of_infinity_has_all_of_the_weight() -> None:
    q, k, v, _ = inputs()
    sinks = torch.full((2,), torch.inf, dtype=torch.float64, requires_grad=True)
    out, lse = flash_attn_func(q, k, v, return_lse=True, learnable_sink=sinks)
    assert not out.any()
    assert (lse == torch.inf).all()
    dq, dk, dv, dsinks = torch.autograd.grad(
        (out, lse), (q, k, v, sinks), (out + 1, torch.ones_like(lse))
    )
    assert not any(bool(x.any()) for x in (dq, dk, dv))
    assert torch.equal(dsinks, torch.full_like(dsinks, 4.0))  # sum over 4 queries


@pytest.mark.parametrize("softcap", [2.0**-10, 1e-3, 1e4, 2.0**40])
def test_the_least_and_the_largest_soft_caps_are_served(softcap: float) -> None:
    q, k, v, _ = (x.detach() for x in inputs())
    lse = flash_attn_func(q, k, v, return_lse=True, softcap=softcap)[1]
    scores = torch.einsum("bihd,bjd->bhij", q, k[:, :, 0]) * 8**-0.5
    torch.testing.assert_close(lse, (softcap * torch.tanh(scores / softcap)).logsumexp(-1))


@pytest.mark.parametrize("softcap", [2.0**-11, -1.0, 2.0**41, torch.inf])
def test_other_soft_caps_are_refused_with_the_bounds(softcap: float) -> None:
    q, k, v, _ = inputs()
    with pytest.raises(
        ValueError, match=r"softcap must be 0 or None for none, or from 0\.000976562 to"
    ):
        flash_attn_func(q, k, v, softcap=softcap)
