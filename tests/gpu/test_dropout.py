"""Dropout: dropped weights, values against float64 with the same dropped weights, bits, graphs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

import pytest
import torch

import flash_dist
from flash_dist.kernels.dropout.philox import dropped
from flash_dist.kernels.dropout.state import MOST_COLUMNS, Dropout, draw_rng_state
from tests.gpu.running import workspace
from tests.reference import DEVICE

Tensor = torch.Tensor

P: Final = 0.25  # a multiple of 1 / 65536
SEED: Final = 9
LIMITS: Final = {torch.float16: 4e-3, torch.bfloat16: 2e-2, torch.float32: 2e-5}


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype, requires_grad=True)


def draw_all(
    shape: tuple[int, int, int, int, int], head_dims: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    batch, queries, keys, heads, heads_kv = shape
    head_dim, head_dim_v = head_dims
    if head_dim > MOST_COLUMNS:
        pytest.skip(f"no kernel with dropout has more than {MOST_COLUMNS} columns")
    return (
        draw(batch, queries, heads, head_dim, dtype=dtype),
        draw(batch, keys, heads_kv, head_dim, dtype=dtype),
        draw(batch, keys, heads_kv, head_dim_v, dtype=dtype),
    )


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:  # noqa: ANN401
    torch.manual_seed(SEED)
    out: Tensor = flash_dist.flash_attn_func(q, k, v, P, **options)
    return out


def find_gone(shape: tuple[int, int, int, int, int]) -> Tensor:
    """Return which weights `attend` drops, computed on the CPU."""
    batch, queries, keys, heads, _ = shape
    torch.manual_seed(SEED)
    state = draw_rng_state(torch.device(DEVICE)).cpu()
    return dropped(Dropout(P, state), heads, range(batch), queries, keys).to(DEVICE)


def compute(
    q: Tensor, k: Tensor, v: Tensor, gone: Tensor, seen: Tensor | None
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Return out in float64, and the leaves q, k and v from which it is computed."""
    leaves = tuple(x.detach().double().requires_grad_() for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    wide_k, wide_v = (x.repeat_interleave(group, 2) for x in leaves[1:])
    scores = torch.einsum("bqhd,bkhd->bhqk", leaves[0], wide_k) * q.shape[-1] ** -0.5
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0.0).masked_fill(gone, 0.0) / (1.0 - P)
    return torch.einsum("bhqk,bkhd->bqhd", weights, wide_v), leaves  # type: ignore[return-value]


def see_causal(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool, device=DEVICE).tril(keys - queries)


def assert_close(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for x, y in zip(got, want, strict=True):
        error = (x.double() - y).abs().max() / y.abs().max().clamp(min=1e-6)
        assert error < LIMITS[x.dtype]


SHAPES: Final = {
    "odd": (3, 77, 51, 3, 3),
    "gqa": (2, 257, 300, 4, 2),
    "more-queries": (1, 500, 65, 2, 1),
    "few-queries": (1, 5, 2100, 4, 2),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_out_and_gradients_match_float64(
    shape: tuple[int, int, int, int, int],
    causal: bool,  # noqa: FBT001
    head_dims: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    q, k, v = draw_all(shape, head_dims, dtype)
    dout = torch.randn(*q.shape[:-1], v.shape[-1], device=DEVICE, dtype=dtype)
    seen = see_causal(*shape[1:3]) if causal else None
    want, leaves = compute(q, k, v, find_gone(shape), seen)
    wanted = want, *torch.autograd.grad(want, leaves, dout.double())
    for megabytes in (0, 1024):
        with workspace(megabytes):
            out = attend(q, k, v, causal=causal)
            assert_close((out, *torch.autograd.grad(out, (q, k, v), dout)), wanted)


def see_dropped(q: Tensor, k: Tensor, width: int) -> Tensor:
    """Return which weights `attend` drops. v has rows of a unit matrix, so out has the weights."""
    batch, keys, heads, _ = k.shape
    found = torch.zeros(batch, q.shape[2], q.shape[1], keys, dtype=torch.bool, device=DEVICE)
    for begin in range(0, keys, width):
        count = min(width, keys - begin)
        v = torch.zeros(batch, keys, heads, width, device=DEVICE, dtype=q.dtype)
        v[:, begin : begin + count, :, :count] = torch.eye(count, device=DEVICE)[:, None]
        found[..., begin : begin + count] = (attend(q, k, v)[..., :count] == 0).transpose(1, 2)
    return found


def test_kernels_drop_the_weights_that_the_cpu_drops(
    head_dims: tuple[int, int], dtype: torch.dtype
) -> None:
    shape = 2, 130, 200, 2, 2
    q, k, _ = draw_all(shape, head_dims, dtype)
    width = head_dims[1]
    with torch.no_grad():
        q, k = q * 0.1, k * 0.1
    found = see_dropped(q, k, width)
    found_backward = torch.zeros_like(found)
    for begin in range(0, 130, width):
        count = min(width, 130 - begin)
        v = draw(2, 200, 2, width, dtype=dtype)
        out = attend(q, k, v)
        dout = torch.zeros_like(out)
        dout[:, begin : begin + count, :, :count] = torch.eye(count, device=DEVICE)[:, None]
        (dv,) = torch.autograd.grad(out, (v,), dout)
        part = (dv[..., :count] == 0).permute(0, 2, 3, 1)
        found_backward[..., begin : begin + count, :] = part
    gone = find_gone(shape)
    assert torch.equal(found, gone)
    assert torch.equal(found_backward, gone)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_kernels_drop_as_often_at_every_place(head_dim: int, any_half: torch.dtype) -> None:
    """Chi-square test over batch entries, heads, rows, columns, and places in tiles of Philox."""
    q, k = (draw(2, 512, 4, head_dim, dtype=any_half).detach() * 0.1 for _ in "qk")
    gone = see_dropped(q, k, head_dim).double()
    tiled = gone.unflatten(3, (-1, 16)).unflatten(2, (-1, 16))
    places = tiled.sum((0, 1, 2, 4))  # [16, 16]
    others = (gone.sum([axis for axis in range(4) if axis != kept]) for kept in range(4))
    for counts in (places, places.sum(0), places.sum(1), *others):
        each = gone.numel() / counts.numel() * P
        chi_square = float(((counts - each) ** 2).sum() / (each * (1 - P)))
        freedom = counts.numel()
        assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5
    for axis, step in ((0, 1), (1, 1), (2, 1), (2, 8), (2, 16), (3, 1), (3, 8), (3, 16)):
        size = gone.shape[axis] - step
        both = gone.narrow(axis, 0, size) * gone.narrow(axis, step, size)
        limit = 5 * (P**2 * (1 - P**2) / both.numel()) ** 0.5
        assert abs(float(both.mean()) - P**2) < limit, (axis, step)


def test_a_bias_has_the_gradient_of_float64(dtype: torch.dtype) -> None:
    shape = 2, 150, 190, 4, 2
    q, k, v = draw_all(shape, (64, 64), dtype)
    bias = draw(1, 4, 150, 190, dtype=dtype)
    dout = torch.randn_like(q)
    out = attend(q, k, v, bias=bias)
    grads = torch.autograd.grad(out, (q, k, v, bias), dout)
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v, bias)]
    wide_k, wide_v = (x.repeat_interleave(2, 2) for x in leaves[1:3])
    scores = torch.einsum("bqhd,bkhd->bhqk", leaves[0], wide_k) / 8.0 + leaves[3]
    weights = scores.softmax(-1).masked_fill(find_gone(shape), 0.0) / (1.0 - P)
    want = torch.einsum("bhqk,bkhd->bqhd", weights, wide_v)
    assert_close((out, *grads), (want, *torch.autograd.grad(want, leaves, dout.double())))


def test_packed_sequences_match_float64(dtype: torch.dtype) -> None:
    ends = [0, 100, 100, 277, 300]
    q, k, v = (draw(300, heads, 64, dtype=dtype) for heads in (4, 2, 2))
    dout = torch.randn_like(q)
    cu_seqlens = torch.tensor(ends, device=DEVICE, dtype=torch.int32)
    torch.manual_seed(SEED)
    out = flash_dist.flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, 177, 177, P, causal=True
    )
    grads = torch.autograd.grad(out, (q, k, v), dout)
    gone = find_gone((4, 177, 177, 4, 2))
    for i, (begin, end) in enumerate(pairwise(ends)):
        tokens = end - begin
        if tokens == 0:
            continue
        q_part, k_part, v_part = (x[None, begin:end] for x in (q, k, v))
        part = gone[i : i + 1, :, :tokens, :tokens]
        want, leaves = compute(q_part, k_part, v_part, part, see_causal(tokens, tokens))
        wanted = torch.autograd.grad(want, leaves, dout[None, begin:end].double())
        got = tuple(x[None, begin:end] for x in (out, *grads))
        assert_close(got, (want, *wanted))


OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "window": {"window_size": (100, 20)},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.05]), "causal": True},
    "batch_invariant": {"batch_invariant": True, "causal": True},
    "documents": {
        "mask": flash_dist.BlockMask.documents(torch.arange(333) // 50)
        & flash_dist.BlockMask.causal()
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_has_the_same_bits_in_every_run(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    q, k, v = draw_all((2, 333, 333, 4, 2), (128, 128), dtype)
    dout = torch.randn_like(q)
    options = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in options.items()}
    runs = []
    for _ in range(3):
        out = attend(q, k, v, **options)
        runs.append((out, *torch.autograd.grad(out, (q, k, v), dout)))
    for run in runs[1:]:
        for got, want in zip(run, runs[0], strict=True):
            assert torch.equal(got, want)
    assert all(x.isfinite().all() for x in runs[0])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 1100, 1300, 4, 2), (4, 4096, 4096, 16, 16)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_kernels_of_one_target_and_general_ones_agree(
    shape: tuple[int, int, int, int, int],
    causal: bool,  # noqa: FBT001
    head_dims: tuple[int, int],
    any_half: torch.dtype,
) -> None:
    """The general kernels serve the calls with ALiBi, which here has slopes of 0."""
    q, k, v = draw_all(shape, head_dims, any_half)
    dout = torch.randn(*q.shape[:-1], v.shape[-1], device=DEVICE, dtype=any_half)
    runs = []
    for slopes in (None, torch.zeros(shape[3], device=DEVICE)):
        out = attend(q, k, v, causal=causal, alibi_slopes=slopes)
        runs.append((out, *torch.autograd.grad(out, (q, k, v), dout)))
    assert_close(runs[0], tuple(x.double() for x in runs[1]))


@pytest.mark.gpu
def test_one_seed_has_the_same_bits_in_1000_runs() -> None:
    q, k, v = draw_all((2, 256, 256, 4, 4), (128, 128), torch.bfloat16)
    with torch.no_grad():
        want = attend(q, k, v, causal=True)
        for _ in range(1000):
            assert torch.equal(attend(q, k, v, causal=True), want)


@pytest.mark.gpu
def test_a_graph_draws_anew_in_each_replay_and_repeats_by_seed() -> None:
    q, k, v = draw_all((2, 256, 256, 4, 4), (64, 64), torch.bfloat16)
    with torch.no_grad():
        attend(q, k, v)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = flash_dist.flash_attn_func(q, k, v, P)
        outs = []
        for _ in range(2):
            torch.manual_seed(SEED)
            for _ in range(2):
                graph.replay()
                outs.append(out.clone())
    assert not torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[1], outs[3])
