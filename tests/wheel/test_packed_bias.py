"""The bias of packed documents on the CPU: against a loop over documents, graphs and refusals."""

from __future__ import annotations

from itertools import accumulate, pairwise, product
from typing import Any, Final

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import flash_dist
from flash_dist.errors import FlashDistError
from flash_dist.masks import BlockMask, IntervalMask

Tensor = torch.Tensor
flash_attn_func: Any = flash_dist.flash_attn_func
flash_attn_varlen_func: Any = flash_dist.flash_attn_varlen_func
ops: Final = torch.ops.flash_dist
HEADS, HEAD_DIM = 4, 8
# Queries and keys of each document.
DOCUMENTS: Final = {
    "different": ((5, 1, 0, 3, 2), (6, 1, 4, 0, 3)),
    "one": ((3,), (4,)),
    "single": ((1, 1), (1, 1)),
    "empty": ((0, 0), (0, 3)),
}
SIZES: Final = ("1", "longest", "more")
SHAPES: Final = list(product((1, HEADS), SIZES, SIZES))
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "band": {"mask": BlockMask.causal()},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 1.0])},
    "sinks": {"learnable_sink": torch.tensor([0.3, -1.0, 0.0, 2.0])},
}
INF: Final = torch.inf


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype)


def ends(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


class Pack:
    """Documents with GQA, two unused tokens behind them, and arguments of a call."""

    def __init__(
        self,
        lengths: tuple[tuple[int, ...], tuple[int, ...]],
        **options: Any,  # noqa: ANN401 - of both functions
    ) -> None:
        self.lengths, self.options = lengths, options
        queries, keys = (sum(one) + 2 for one in lengths)
        made = draw(queries, HEADS, HEAD_DIM), *(draw(keys, 2, HEAD_DIM, seed=i) for i in (1, 2))
        self.leaves = [x.requires_grad_() for x in made]
        self.longest = tuple(max(one) for one in lengths)

    def bias(self, heads: int, *sizes: str) -> Tensor:
        known = ({"1": 1, "longest": n, "more": n + 3} for n in self.longest)
        shape = [names[size] for names, size in zip(known, sizes, strict=True)]
        return draw(heads, *shape, seed=3).requires_grad_()

    def attend(self, bias: Tensor) -> tuple[Tensor, Tensor]:
        packed = *map(ends, self.lengths), *self.longest
        how = {**self.options, "return_lse": True}
        out, lse = flash_attn_varlen_func(*self.leaves, *packed, bias=bias, **how)
        return out, lse

    def attend_each(self, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Return the results of one call per document."""
        q, k, v = self.leaves
        outs, lses = [], []
        rows, columns = (pairwise(ends(one).tolist()) for one in self.lengths)
        for (q0, q1), (k0, k1) in zip(rows, columns, strict=True):
            parts = q[None, q0:q1], k[None, k0:k1], v[None, k0:k1]
            own = bias[None, :, : q1 - q0, : k1 - k0]
            out, lse = flash_attn_func(*parts, bias=own, return_lse=True, **self.options)
            outs.append(out[0])
            lses.append(lse[0])
        unused = q.new_zeros(2, HEADS, HEAD_DIM), q.new_full((HEADS, 2), -INF)
        return torch.cat([*outs, unused[0]]), torch.cat([*lses, unused[1]], 1)


def weigh(out: Tensor, lse: Tensor) -> Tensor:
    """Return a number that depends on all results."""
    visible = torch.where(lse > -INF, lse, 0.0)
    return (out * draw(*out.shape, seed=7)).sum() + (visible * draw(*lse.shape, seed=8)).sum()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
def test_documents_get_the_numbers_of_their_own_places(
    lengths: tuple[tuple[int, ...], tuple[int, ...]], options: dict[str, Any]
) -> None:
    pack = Pack(lengths, **options)
    for shape in SHAPES:
        bias = pack.bias(*shape)
        results, wanted = pack.attend(bias), pack.attend_each(bias)
        for one, other in zip(results, wanted, strict=True):
            assert torch.equal(one, other), shape
        leaves = *pack.leaves, bias
        got = torch.autograd.grad(weigh(*results), leaves)
        want = torch.autograd.grad(weigh(*wanted), leaves, materialize_grads=True)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_are_those_of_the_formula(options: dict[str, Any]) -> None:
    pack = Pack(((3, 1, 2), (2, 1, 4)), **options)
    bias = pack.bias(HEADS, "longest", "more")

    def total(*leaves: Tensor) -> Tensor:
        pack.leaves = list(leaves[:3])
        return weigh(*pack.attend(leaves[3]))

    assert torch.autograd.gradcheck(total, (*pack.leaves, bias), fast_mode=True)


def test_entries_that_no_document_reaches_count_for_nothing() -> None:
    pack = Pack(((2, 3), (4, 1)))
    bias = pack.bias(HEADS, "more", "more").detach()
    want = pack.attend(bias)
    reached = torch.zeros(bias.shape, dtype=torch.bool)
    reached[:, :2, :4] = reached[:, :3, :1] = True
    other = bias.masked_fill(~reached, 1e4)
    other[:, 3:] = other[:, :, 4:] = torch.nan  # beyond the longest document: not even read
    other.requires_grad_()
    got = pack.attend(other)
    assert all(map(torch.equal, got, want))
    (gradient,) = torch.autograd.grad(weigh(*got), other)
    assert not gradient[~reached].any()
    assert gradient[reached].all()


def test_low_numbers_hide_keys() -> None:
    pack = Pack(DOCUMENTS["different"])
    bias = pack.bias(HEADS, "longest", "longest").detach()
    bias[:, ::2, 0] = -65504.0
    bias[:, 1] = -INF
    bias.requires_grad_()
    out, lse = results = pack.attend(bias)
    assert all(map(torch.equal, results, pack.attend_each(bias)))
    assert not out[[1, 7]].any()
    assert bool((lse[:, [1, 7]] == -INF).all())
    (gradient,) = torch.autograd.grad(weigh(out, lse), bias)
    assert not gradient[:, 1].any()
    assert not gradient[:, ::2, 0].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_other_dtypes_and_fewer_or_more_axes(dtype: torch.dtype) -> None:
    pack = Pack(DOCUMENTS["different"])
    bias = draw(*pack.longest, seed=3).to(dtype)
    want = pack.attend(bias.double()[None])
    for x in (bias, bias[None], bias[None, None], bias.expand(HEADS, *bias.shape)):
        leaf = x.detach().requires_grad_()
        got = pack.attend(leaf)
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other)
        (gradient,) = torch.autograd.grad(weigh(*got), leaf)
        assert (gradient.shape, gradient.dtype) == (x.shape, dtype)


def test_one_key_has_no_gradient_but_that_of_lse() -> None:
    pack = Pack(DOCUMENTS["single"])
    bias = pack.bias(HEADS, "longest", "longest")
    out, lse = pack.attend(bias)
    assert not torch.autograd.grad(out.sum(), bias, retain_graph=True)[0].any()
    (of_lse,) = torch.autograd.grad(lse[:, :2].sum(), bias)
    torch.testing.assert_close(of_lse, torch.full_like(bias, 2.0))


def test_dropout_and_the_largest_score_include_it() -> None:
    pack = Pack(DOCUMENTS["different"], dropout_p=0.5)
    bias = pack.bias(HEADS, "longest", "more")
    torch.manual_seed(5)
    out, lse = pack.attend(bias)
    torch.manual_seed(5)
    shape = len(pack.lengths[0]), HEADS, *pack.longest
    dropped = flash_dist.dropout_mask(0.5, shape, device="cpu")
    q, k, v = pack.leaves
    parts, gradient = [], torch.autograd.grad(weigh(out, lse), bias, retain_graph=True)[0]
    rows, columns = (pairwise(ends(one).tolist()) for one in pack.lengths)
    tops = []
    for number, ((q0, q1), (k0, k1)) in enumerate(zip(rows, columns, strict=True)):
        of_k, of_v = (x[k0:k1].repeat_interleave(2, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[q0:q1], of_k) * HEAD_DIM**-0.5
        scores = scores + bias[:, : q1 - q0, : k1 - k0]
        gone = dropped[number, :, : q1 - q0, : k1 - k0]
        weights = scores.softmax(-1).masked_fill(gone, 0.0) * 2
        parts.append(torch.einsum("hqk,khd->qhd", weights, of_v))
        tops.append(scores.flatten(1).max(1)[0] if scores.numel() else scores.new_full((4,), -INF))
    want = torch.cat([*parts, out.new_zeros(2, HEADS, HEAD_DIM)])
    torch.testing.assert_close(out, want)
    (other,) = torch.autograd.grad(weigh(want, lse.detach()), bias, retain_graph=True)
    (of_lse,) = torch.autograd.grad(weigh(out.detach(), lse), bias, retain_graph=True)
    torch.testing.assert_close(gradient, other + of_lse)
    del pack.options["dropout_p"]
    packed = *map(ends, pack.lengths), *pack.longest
    _, top = flash_attn_varlen_func(*pack.leaves, *packed, bias=bias, return_max_logit=True)
    torch.testing.assert_close(top, torch.stack(tops).amax(0))


# --- Graphs and operators ------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_graphs_have_the_same_results(dynamic: bool) -> None:  # noqa: FBT001
    torch.compiler.reset()

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *packed: Any) -> Any:  # noqa: ANN401
        return flash_attn_varlen_func(q, k, v, *packed, bias=bias, return_lse=True)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for name in ("different", "one"):
        pack = Pack(DOCUMENTS[name])
        leaves = *pack.leaves, pack.bias(HEADS, "longest", "more")
        packed = *map(ends, pack.lengths), *pack.longest
        results = []
        for call in (attend, compiled):
            out, lse = call(*leaves, *packed)
            results.append((out, lse, *torch.autograd.grad(weigh(out, lse), leaves)))
        for eager, traced in zip(*results, strict=True):
            torch.testing.assert_close(traced, eager)


def test_an_exported_program_has_the_gradient() -> None:
    pack = Pack(DOCUMENTS["different"])
    longest = pack.longest

    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *packed: Tensor) -> Tensor:
            out: Tensor = flash_attn_varlen_func(q, k, v, *packed, *longest, bias=bias)
            return out

    tensors = *pack.leaves, pack.bias(HEADS, "longest", "more"), *map(ends, pack.lengths)
    program = torch.export.export(Model(), tuple(x.detach() for x in tensors)).module()
    out, want = program(*tensors), pack.attend(tensors[3])[0]
    assert torch.equal(out, want)
    dout = draw(*out.shape, seed=9)
    got = torch.autograd.grad(out, tensors[:4], dout)
    assert all(map(torch.equal, got, torch.autograd.grad(want, tensors[:4], dout)))


def test_the_operators_pass_opcheck() -> None:
    pack = Pack(DOCUMENTS["one"])
    band = None, [0, -1, 0, 1]
    packed = *map(ends, pack.lengths), *pack.longest
    bias = pack.bias(1, "longest", "longest").detach()[None].requires_grad_()
    how = 0.5, False, 0.0, None, None, False, bias
    # The two unused tokens have a lse of -inf, which opcheck's loss cannot differentiate.
    leaves = [x.detach()[:-2].requires_grad_() for x in pack.leaves]
    torch.library.opcheck(ops.attention.default, (*leaves, *band, *packed, *how))
    out, lse = ops.attention(*leaves, *band, *packed, *how)
    saved = [x.detach() for x in (out, *leaves, out, lse)]
    last = 0.5, False, None, bias.detach(), 0.0, None, *packed
    call = *saved, None, *band, *last
    torch.library.opcheck(ops.attention_bias_backward.default, call)
    with FlopCounterMode(display=False) as counter:
        ops.attention_bias_backward(*call)
    assert counter.get_total_flops() == 2 * HEADS * 3 * 4 * 2 * HEAD_DIM


# --- Refusals ------------------------------------------------------------------------------------

ANY: Final = torch.zeros(HEADS, 5, 6, dtype=torch.float64)
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "list": ({"bias": [0.0]}, TypeError, r"bias must be a torch\.Tensor, got list"),
    "bool": ({"bias": ANY.bool()}, TypeError, "bias must be of floating point, got bool"),
    "queries": (
        {"bias": ANY[:, :4]},
        ValueError,
        r"\[num_heads_q, max_seqlen_q, max_seqlen_k\], \[4, 5, 6\], .* \[4, 4, 6\]\n\nhint: query",
    ),
    "keys": ({"bias": ANY[:, :, :5]}, ValueError, r"\[4, 5, 6\].*got shape \[4, 5, 5\]"),
    "heads": ({"bias": ANY[:2]}, ValueError, r"\[4, 5, 6\].*got shape \[2, 5, 6\]"),
    "batch": ({"bias": ANY.expand(5, -1, -1, -1)}, ValueError, r"got shape \[5, 4, 5, 6\]"),
    "dimensions": ({"bias": ANY[None, None]}, ValueError, r"got shape \[1, 1, 4, 5, 6\]"),
    "device": ({"bias": ANY.to("meta")}, ValueError, "bias must be on cpu, .* got meta"),
    "softcap": ({"bias": ANY, "softcap": 1.5}, ValueError, "bias must be None with a softcap"),
    "match": ({"bias": ANY, "match_kvcache": True}, ValueError, "must be False with a bias"),
    "used": (
        {"bias": ANY, "seqused_k": torch.zeros(5, dtype=torch.int32)},
        ValueError,
        r"bias must be None with block_table and seqused_k, got a tensor of shape \[4, 5, 6\]",
    ),
    "mask": (
        {
            "bias": ANY,
            "mask": BlockMask.packed(
                BlockMask.causal(), *map(ends, DOCUMENTS["different"]), total_q=13, total_k=16
            ),
        },
        ValueError,
        "bias must be None with a mask of packed sequences, got a tensor",
    ),
    "intervals": (
        {
            "bias": ANY,
            "mask": IntervalMask.packed(
                torch.zeros(13).int(),
                torch.ones(13).int(),
                *map(ends, DOCUMENTS["different"]),
                total_k=16,
            ),
        },
        ValueError,
        "bias must be None with a mask of packed sequences, got a tensor",
    ),
}


@pytest.mark.parametrize(("options", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals_name_the_value(
    options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    pack = Pack(DOCUMENTS["different"])
    packed = *map(ends, pack.lengths), *pack.longest
    with pytest.raises(kind, match=message):
        flash_attn_varlen_func(*pack.leaves, *packed, **options)


def test_transforms_are_refused() -> None:
    pack = Pack(DOCUMENTS["one"])
    pack.leaves = [x.detach() for x in pack.leaves]
    with pytest.raises(FlashDistError, match=r"bias must be used outside of torch\.func"):
        torch.func.grad(lambda x: pack.attend(x)[0].sum())(torch.zeros(1, 3, 4))
