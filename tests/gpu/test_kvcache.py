"""Attention to a cache on a GPU: values, bits, graphs, and invalid numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import pad

from flash_dist import flash_attn_varlen_func, flash_attn_with_kvcache, last_variant
from tests.gpu.running import no_wait_for_the_gpu, poison_memory, runs_on_hopper, workspace
from tests.kvcache import SMALL, Problem, Tensors
from tests.reference import DEVICE

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor

LONG = (1500, 3000, 777)
PROBLEMS = {
    **SMALL,
    "more rows than a tile": Problem(heads=8, heads_kv=1, seqlen_q=7, causal=True),
    "long": Problem(seqlens=LONG, capacity=3100, heads=8, heads_kv=2, head_dim=128),
    "long in pages": Problem(
        seqlens=LONG,
        capacity=3104,
        heads=4,
        seqlen_q=3,
        head_dim=64,
        page=16,
        window=(1000, -1),
        causal=True,
    ),
    "long with scores": Problem(
        seqlens=LONG,
        capacity=3100,
        heads=8,
        heads_kv=2,
        head_dim=128,
        softcap=5.0,
        alibi=True,
        sinks=True,
    ),
    "rows of a larger tile with scores": Problem(
        seqlens=(1500, 900),
        capacity=1504,
        heads=8,
        heads_kv=1,
        seqlen_q=3,
        head_dim=64,
        causal=True,
        softcap=5.0,
        alibi=True,
        sinks=True,
    ),
    "large heads": Problem(
        seqlens=(1500, 2000), capacity=2048, heads=4, seqlen_q=2, head_dim=256, causal=True, page=64
    ),
    "larger heads": Problem(
        seqlens=(1500, 2000), capacity=2048, heads=8, heads_kv=1, head_dim=512, causal=True, page=64
    ),
    "heads of 264 with scores": Problem(
        seqlens=(300, 1200),
        capacity=1204,
        heads=4,
        heads_kv=2,
        seqlen_q=7,
        head_dim=264,
        causal=True,
        softcap=5.0,
        alibi=True,
        sinks=True,
    ),
    "odd heads": Problem(
        seqlens=(300, 200), capacity=304, heads=4, seqlen_q=2, head_dim=72, causal=True
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_results_and_cache_are_those_of_loops(name: str, half: torch.dtype) -> None:
    problem = PROBLEMS[name]
    tensors = problem.make(half, DEVICE)
    expected = problem.solve(tensors)
    poison_memory(tensors.q.device)
    out, lse = problem.call(tensors)
    tolerance = 2e-2 if half == torch.bfloat16 else 3e-3
    rounding = 2 * tolerance if problem.rotary_dim else 0.0  # error of the rotated values
    torch.testing.assert_close(out.double().cpu(), expected.out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double().cpu(), expected.lse, atol=1e-5 + rounding, rtol=1e-5)
    for got, wanted in ((tensors.k_cache, expected.k_cache), (tensors.v_cache, expected.v_cache)):
        torch.testing.assert_close(got.double().cpu(), wanted, atol=rounding, rtol=rounding)


@pytest.mark.parametrize("name", PROBLEMS)
def test_out_alone_has_the_same_bits(name: str, half: torch.dtype) -> None:
    problem = PROBLEMS[name]
    tensors, others = problem.make(half, DEVICE), problem.make(half, DEVICE)
    out, _ = problem.call(tensors)
    poison_memory(tensors.q.device)
    arguments = problem.arguments(others) | {"return_softmax_lse": False}
    alone = flash_attn_with_kvcache(**arguments)
    poison_memory(tensors.q.device)  # the memory of lse is free again
    assert torch.equal(_bits(alone), _bits(out))


@pytest.mark.parametrize("page", [0, 16])
def test_keys_that_no_query_sees_are_not_read(page: int, any_half: torch.dtype) -> None:
    ends = (170, 400, 33)
    problem = Problem(seqlens=ends, capacity=512, seqlen_q=2, window=(60, -1), causal=True)
    tensors = problem.make(any_half, DEVICE)
    expected = problem.solve(tensors)
    for b, end in enumerate(ends):
        for cache in (tensors.k_cache, tensors.v_cache):
            cache[b, : max(end - 2 - 60, 0)] = math.nan
            cache[b, end:] = math.nan
    out, _ = _call(tensors, _in_pages(tensors, page) if page else {}, problem)
    torch.testing.assert_close(out.double().cpu(), expected.out, atol=2e-2, rtol=2e-2)


def _call(tensors: Tensors, changes: dict[str, Any], problem: Problem) -> tuple[Tensor, Tensor]:
    out, lse = flash_attn_with_kvcache(**{**problem.arguments(tensors), **changes})
    return out, lse


def _in_pages(tensors: Tensors, page: int) -> dict[str, Tensor]:
    """Split a cache into shuffled pages."""
    batch, capacity, *rest = tensors.k_cache.shape
    pages = capacity // page
    order = torch.randperm(batch * pages, device=DEVICE)
    caches = {}
    for name in ("k_cache", "v_cache"):
        old = getattr(tensors, name)
        caches[name] = old.new_empty(batch * pages, page, *rest)
        caches[name][order] = old.reshape(batch * pages, page, *rest)
    return {**caches, "block_table": order.reshape(batch, pages).to(torch.int32)}


def _same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(_bits(a), _bits(b)) for a, b in zip(one, other, strict=True))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("heads", "heads_kv", "seqlen_q"), [(32, 8, 1), (8, 1, 1), (8, 2, 5), (8, 1, 33)]
)
def test_a_sequence_has_the_same_bits_wherever_it_is(
    head_dim: int, heads: int, heads_kv: int, seqlen_q: int, any_half: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(head_dim + heads + seqlen_q)
    lengths = tuple(torch.randint(seqlen_q, 5120, (12,), generator=generator).tolist())
    problem = Problem(
        seqlens=lengths,
        capacity=5120,
        heads=heads,
        heads_kv=heads_kv,
        head_dim=head_dim,
        seqlen_q=seqlen_q,
        causal=True,
    )
    tensors = problem.make(any_half, DEVICE)
    whole = problem.call(tensors)
    assert _same(whole, problem.call(tensors)), "again"
    for page in (16, 64, 256):
        assert _same(whole, _call(tensors, _in_pages(tensors, page), problem)), f"pages of {page}"
    with workspace(0):
        assert _same(whole, problem.call(tensors)), "without workspace"
    for b in range(0, 12, 3):
        alone = {
            "q": tensors.q[b : b + 1],
            "k_cache": tensors.k_cache[b : b + 1],
            "v_cache": tensors.v_cache[b : b + 1],
            "cache_seqlens": tensors.seqlens[b : b + 1],
        }
        one = _call(tensors, alone, problem)
        assert _same((whole[0][b : b + 1], whole[1][b : b + 1]), one), f"{b} alone"
    some = torch.randperm(12, generator=generator)[:5].to(DEVICE)
    mixed = {
        "q": tensors.q[some],
        "cache_seqlens": tensors.seqlens[some],
        "cache_batch_idx": some.to(torch.int32),
    }
    assert _same((whole[0][some], whole[1][some]), _call(tensors, mixed, problem)), "in a batch"
    if seqlen_q > 2:
        chunk = {"q": tensors.q[:, :2], "cache_seqlens": tensors.seqlens - (seqlen_q - 2)}
        first = _call(tensors, chunk, problem)
        assert _same((whole[0][:, :2], whole[1][:, :, :2]), first), "a chunk"


@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize(("heads", "heads_kv", "seqlen_q"), [(32, 8, 1), (8, 1, 2), (4, 4, 3)])
def test_a_short_cache_has_the_bits_of_a_long_one(
    head_dim: int, heads: int, heads_kv: int, seqlen_q: int, any_half: torch.dtype
) -> None:
    problem = Problem(
        seqlens=(1000, 3, 129, 640, 1024),
        capacity=1024,
        heads=heads,
        heads_kv=heads_kv,
        head_dim=head_dim,
        seqlen_q=seqlen_q,
        causal=True,
    )
    tensors = problem.make(any_half, DEVICE)
    short = problem.call(tensors)
    caches = {"k_cache": tensors.k_cache, "v_cache": tensors.v_cache}
    longer = {name: pad(cache, (0, 0, 0, 0, 0, 2048)) for name, cache in caches.items()}
    assert _same(short, _call(tensors, longer, problem))
    for page in (16, 256):
        assert _same(short, _call(tensors, _in_pages(tensors, page), problem)), page


@pytest.mark.parametrize("page", [0, 16, 48, 64, 256])
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
def test_many_queries_have_the_bits_of_few(head_dim: int, page: int, any_half: torch.dtype) -> None:
    """Keys behind a sequence are NaN, and the table has garbage for the pages of these keys."""
    problem = Problem(
        seqlens=(1301, 500, 90, 0),
        capacity=1536,
        heads=32,
        heads_kv=8,
        head_dim=head_dim,
        seqlen_q=400,
        causal=True,
    )
    tensors = problem.make(any_half, DEVICE)
    for b, end in enumerate(problem.seqlens):
        for cache in (tensors.k_cache, tensors.v_cache):
            cache[b, end:] = math.nan
    changes = _in_pages(tensors, page) if page else {}
    for b, end in enumerate(problem.seqlens if page else ()):
        changes["block_table"][b, -(-end // page) :] = 2**31 - 1
    poison_memory(tensors.q.device)
    out, lse = _call(tensors, changes, problem)
    if runs_on_hopper("fwd_kvcache_sm90"):
        dtype = "fp16" if any_half == torch.float16 else "bf16"
        kernel = f"fwd_kvcache_sm90_{dtype}_d{max(head_dim, 64)}_"
        assert kernel in last_variant()["fwd_kvcache"]["symbol"]
    assert _same((out, lse), _call(tensors, changes, problem)), "again"
    for begin in (0, 120, 384):
        lengths = tensors.seqlens - (400 - 16 - begin)
        some = lengths >= 0
        chunk = {"q": tensors.q[:, begin : begin + 16], "cache_seqlens": lengths.clamp(min=0)}
        few = _call(tensors, {**changes, **chunk}, problem)
        rows = slice(begin, begin + 16)
        assert _same((out[some, rows], lse[some, :, rows]), tuple(x[some] for x in few)), begin


def test_many_queries_may_be_in_a_graph(any_half: torch.dtype) -> None:
    problem = Problem((900, 513), 1024, 700, 32, 8, 128, causal=True, window=(600, -1), page=64)
    tensors = problem.make(any_half, DEVICE)
    problem.call(tensors)  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = problem.call(tensors)
    for _ in range(3):
        graph.replay()
        assert _same(results, problem.call(tensors))
        tensors.seqlens.add_(17)


def test_lengths_may_grow_under_a_graph_and_nothing_waits(any_half: torch.dtype) -> None:
    problem = Problem(seqlens=(100, 900, 0), capacity=1024, heads=8, seqlen_new=1, head_dim=64)
    tensors, eager = (problem.make(any_half, DEVICE) for _ in range(2))
    arguments = problem.arguments(tensors)
    flash_attn_with_kvcache(**arguments)  # loads the kernels
    torch.cuda.synchronize()
    with no_wait_for_the_gpu():
        flash_attn_with_kvcache(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_attn_with_kvcache(**arguments)
    for _ in range(3):
        graph.replay()
        expected = problem.call(eager)
        assert _same(expected, (out, lse))
        assert torch.equal(tensors.k_cache, eager.k_cache)
        tensors.seqlens.add_(1)
        eager.seqlens.add_(1)


def test_numbers_that_lie_read_and_write_nothing_outside(any_half: torch.dtype) -> None:
    """The cache is the middle of larger tensors, which must not change."""
    problem = Problem(seqlens=(3, 5, 7), seqlen_new=2, page=16, heads=4)
    tensors = problem.make(any_half, DEVICE)
    room = [torch.randn(64, *x.shape[1:], device=DEVICE).to(any_half) for x in tensors[1:3]]
    kept = [x.clone() for x in room]
    pages = slice(16, 16 + tensors.k_cache.shape[0])
    caches = {"k_cache": room[0][pages], "v_cache": room[1][pages]}
    lies = torch.tensor([-(2**31), 2**31 - 1, -1, 99], dtype=torch.int32, device=DEVICE)
    for lie in lies:
        table = torch.full_like(tensors.table, int(lie))  # type: ignore[arg-type]
        for seqlens in (tensors.seqlens, lie.repeat(3)):
            _call(tensors, {**caches, "block_table": table, "cache_seqlens": seqlens}, problem)
    others = Problem(seqlens=(3, 5, 7), seqlen_new=2, batch_idx=(0, 1, 2), leftpad=(0, 0, 0))
    plain = others.make(any_half, DEVICE)
    for lie in lies:
        lying = {"cache_batch_idx": lie.repeat(3), "cache_leftpad": lie.repeat(3)}
        others.arguments(plain)
        _call(plain, lying, others)
    torch.cuda.synchronize()
    for now, before in zip(room, kept, strict=True):
        now[pages] = before[pages]
        assert torch.equal(now, before)


@pytest.mark.parametrize("seqlen_q", [1, 3, 40])
@pytest.mark.parametrize("left", [700, 1500, 3333])
def test_windows_may_begin_anywhere_in_a_group_of_units(
    left: int, seqlen_q: int, any_half: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(left)
    for batch in (1, 5, 40):
        lengths = tuple(torch.randint(2000, 8192, (batch,), generator=generator).tolist())
        problem = Problem(
            seqlens=lengths,
            capacity=8192,
            heads=8,
            heads_kv=2,
            head_dim=64,
            seqlen_q=seqlen_q,
            window=(left, -1),
            causal=True,
        )
        tensors = problem.make(any_half, DEVICE)
        shared = problem.call(tensors)
        with workspace(0):  # without workspace no blocks share a sequence
            assert _same(shared, problem.call(tensors)), batch


@pytest.mark.parametrize("before", ["nothing", "a fill", "a copy", "another stream"])
def test_a_graph_may_do_anything_before_it(before: str, any_half: torch.dtype) -> None:
    problem = Problem(seqlens=LONG, capacity=3100, heads=8, heads_kv=2, head_dim=64)
    tensors = problem.make(any_half, DEVICE)
    expected = problem.call(tensors)
    lengths = tensors.seqlens.clone()
    other = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if before == "a fill":
            tensors.seqlens.zero_()
            tensors.seqlens.add_(lengths)
        elif before == "a copy":
            tensors.seqlens.copy_(lengths)
        elif before == "another stream":
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                tensors.seqlens.copy_(lengths)
            tensors.q.mul_(1)
            torch.cuda.current_stream().wait_stream(other)
        results = problem.call(tensors)
    for _ in range(3):
        if before != "nothing":
            tensors.seqlens.zero_()
        graph.replay()
        assert _same(expected, results)


def test_queries_at_odd_addresses_are_copied_and_caches_refused(any_half: torch.dtype) -> None:
    problem = Problem()
    tensors = problem.make(any_half, DEVICE)

    def move(x: Tensor) -> Tensor:
        return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)

    expected = problem.call(tensors)
    assert _same(expected, _call(tensors, {"q": move(tensors.q)}, problem))
    with pytest.raises(ValueError, match="k_cache must start at a multiple of 16 bytes, got "):
        _call(tensors, {"k_cache": move(tensors.k_cache)}, problem)


def test_a_check_names_a_wrong_number(
    monkeypatch: pytest.MonkeyPatch, any_half: torch.dtype
) -> None:
    problem = Problem(seqlens=(3, 97, 7))
    tensors = problem.make(any_half, DEVICE)
    problem.call(tensors)
    monkeypatch.setenv("FLASH_DIST_CHECK", "1")
    with pytest.raises(ValueError, match=r"cache_seqlens\[1\] must be from 0 to 96 "):
        problem.call(tensors)


def test_float32_is_refused_in_a_sentence() -> None:
    problem = Problem()
    with pytest.raises(TypeError, match="q must be float16 or bfloat16 on cuda to read a cache"):
        problem.call(problem.make(torch.float32, DEVICE))


@pytest.mark.parametrize("name", ["grouped", "new keys in pages", "rotary"])
def test_operators_are_what_torch_expects_of_operators(name: str, any_half: torch.dtype) -> None:
    problem = PROBLEMS[name]
    for operator, arguments in problem.operator_calls(problem.make(any_half, DEVICE)):
        torch.library.opcheck(operator, arguments)


@pytest.mark.parametrize("lengths", [(1, 1, 1), (5, 0, 300), (40, 70, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_packed_queries_have_the_bits_of_queries_alone(
    head_dim: int, lengths: tuple[int, ...], any_half: torch.dtype
) -> None:
    problem = Problem(
        seqlens=LONG, capacity=3104, heads=8, heads_kv=2, head_dim=head_dim, page=16, causal=True
    )
    tensors = problem.make(any_half, DEVICE)
    before, behind = 3, 9  # uncovered rows
    ends = [before + sum(lengths[:i]) for i in range(4)]
    q = torch.randn(ends[-1] + behind, 8, head_dim, device=DEVICE).to(any_half)
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    assert tensors.table is not None
    arguments: dict[str, Any] = {"cu_seqlens_k": None, "max_seqlen_k": 3104}
    arguments["seqused_k"] = tensors.seqlens
    arguments |= {"block_table": tensors.table, "causal": True, "return_lse": True}
    poison_memory(q.device)
    with no_wait_for_the_gpu():
        out, lse = flash_attn_varlen_func(
            q,
            tensors.k_cache,
            tensors.v_cache,
            cu_seqlens_q=cu_seqlens,
            max_seqlen_q=max(lengths),
            **arguments,
        )
    assert not out[:before].any()
    assert not out[ends[-1] :].any()
    assert bool((lse[:, [0, -1]] == -math.inf).all())
    for i, length in enumerate(lengths):
        rows = slice(ends[i], ends[i] + length)
        alone = {
            "q": q[None, rows],
            "cache_seqlens": tensors.seqlens[i : i + 1],
            "block_table": tensors.table[i : i + 1],
        }
        expected = _call(tensors, alone, problem)
        assert _same((out[None, rows], lse[None, :, rows]), expected), i


def test_packed_keys_of_which_some_are_used_have_the_bits_of_a_cache(any_half: torch.dtype) -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)
    q, k, v = (
        torch.randn(n, 4, 64, device=DEVICE, generator=generator).to(any_half)
        for n in (50, 5000, 5000)
    )
    ends_q, ends_k = (
        torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ((0, 1, 50), (7, 2000, 4990))
    )
    used = torch.tensor([300, 5000], dtype=torch.int32, device=DEVICE)
    out = flash_attn_varlen_func(q, k, v, ends_q, ends_k, 49, 4000, seqused_k=used)
    first = flash_attn_with_kvcache(q[None, :1], k[None, 7:307], v[None, 7:307])
    second = flash_attn_with_kvcache(q[None, 1:], k[None, 2000:4990], v[None, 2000:4990])
    assert torch.equal(out, torch.cat((first[0], second[0])))
