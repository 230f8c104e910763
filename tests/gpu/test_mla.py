"""Attention to latent keys on a GPU: values, bits, graphs, and invalid numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flash_dist import flash_mla_with_kvcache, last_variant
from flash_dist.toolkit.loading.library import variants
from tests.gpu.running import (
    has_whole_shared_memory,
    no_wait_for_the_gpu,
    poison_memory,
    workspace,
)
from tests.mla import SMALL, Problem, Tensors
from tests.reference import DEVICE

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor

BF16 = torch.bfloat16
DEEPSEEK: dict[str, Any] = {"head_dim": 576, "head_dim_v": 512, "scale": 192**-0.5}
LONG = (1500, 3000, 777)
HEADS = (16, 64)  # of both kernels on Hopper
MANY_HEADS = 17  # csrc/sm90/mla/launch.h
PROBLEMS = {
    **SMALL,
    "one sequence": Problem(seqlens=(4100,), capacity=4100, heads=16, **DEEPSEEK),
    "64 heads": Problem(seqlens=LONG, capacity=3008, heads=64, page=64, **DEEPSEEK),
    "128 heads": Problem(seqlens=(300, 1100), capacity=1152, heads=128, page=64, **DEEPSEEK),
    "two queries": Problem(
        seqlens=LONG, capacity=3008, heads=16, seqlen_q=2, causal=True, page=64, **DEEPSEEK
    ),
    "odd heads": Problem(
        seqlens=(700, 65), capacity=704, heads=5, seqlen_q=3, causal=True, **DEEPSEEK
    ),
    "fewer columns": Problem(seqlens=LONG, capacity=3000, heads=20, head_dim=288, head_dim_v=256),
    "off the step of a line": Problem(
        seqlens=(513, 200), capacity=520, heads=8, head_dim=328, head_dim_v=264
    ),
}


@pytest.fixture(autouse=True)
def bf16() -> None:
    """Skip if the GPU has no matrix instruction for bfloat16."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("no bfloat16 before compute capability 8.0")


@pytest.mark.parametrize("name", PROBLEMS)
def test_results_are_those_of_loops(name: str) -> None:
    problem = PROBLEMS[name]
    tensors = problem.make(BF16, DEVICE)
    expected, expected_lse = problem.solve(tensors)
    poison_memory(tensors.q.device)
    out, lse = problem.call(tensors)
    torch.testing.assert_close(out.double().cpu(), expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.double().cpu(), expected_lse, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("heads", [16, 17, 64, 128])
def test_the_kernel_of_latent_keys_ran(heads: int) -> None:
    problem = Problem(heads=heads, **DEEPSEEK)
    problem.call(problem.make(BF16, DEVICE))
    on_hopper = torch.cuda.get_device_capability() == (9, 0) and has_whole_shared_memory()
    # False if the wheel has only PTX.
    is_built = any(one["family"] == "mla_sm90" for one in variants())
    is_many = on_hopper and is_built and heads >= MANY_HEADS
    role, family = ("mla_values", "mla_values_sm90") if is_many else ("mla", "mla")  # few tiles
    assert last_variant()[role]["symbol"].startswith(f"flash_dist_{family}_bf16")


def test_two_blocks_share_a_work_tile_if_many_have_room() -> None:
    if not any(one["family"] == "mla_pair_sm90" for one in variants()):
        pytest.skip("a wheel without kernels for Hopper")
    if torch.cuda.get_device_capability() != (9, 0) or not has_whole_shared_memory():
        pytest.skip("for Hopper")
    count = torch.cuda.get_device_properties(0).multi_processor_count // 2
    problem = Problem(seqlens=(100,) * count, capacity=128, heads=64, **DEEPSEEK)
    problem.call(problem.make(BF16, DEVICE))
    assert last_variant()["mla_pair"]["symbol"].startswith("flash_dist_mla_pair_sm90_bf16")


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("page", [0, 16])
def test_keys_behind_a_sequence_are_not_read(page: int, heads: int) -> None:
    ends = (170, 400, 33)
    problem = Problem(seqlens=ends, capacity=512, heads=heads, seqlen_q=2, causal=True, **DEEPSEEK)
    tensors = problem.make(BF16, DEVICE)
    expected, _ = problem.solve(tensors)
    for b, end in enumerate(ends):
        tensors.k_cache[b, end:] = math.nan
    out, _ = problem.call(tensors, **(_in_pages(tensors, page) if page else {}))
    torch.testing.assert_close(out.double().cpu(), expected, atol=2e-2, rtol=2e-2)


def _in_pages(tensors: Tensors, page: int) -> dict[str, Tensor]:
    """Split a cache into shuffled pages."""
    batch, capacity, *rest = tensors.k_cache.shape
    pages = batch * capacity // page
    order = torch.randperm(pages, device=DEVICE)
    cache = tensors.k_cache.new_empty(pages, page, *rest)
    cache[order] = tensors.k_cache.reshape(pages, page, *rest)
    return {"k_cache": cache, "block_table": order.reshape(batch, -1).to(torch.int32)}


def _same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(_bits(a), _bits(b)) for a, b in zip(one, other, strict=True))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)


@pytest.mark.parametrize(
    ("heads", "seqlen_q"),
    [(16, 1), (16, 4), (17, 1), (20, 3), (64, 1), (50, 4), (128, 1), (128, 2)],
)
def test_a_sequence_has_the_same_bits_wherever_it_is(heads: int, seqlen_q: int) -> None:
    generator = torch.Generator().manual_seed(heads + seqlen_q)
    lengths = tuple(torch.randint(seqlen_q, 5120, (12,), generator=generator).tolist())
    problem = Problem(
        seqlens=lengths, capacity=5120, heads=heads, seqlen_q=seqlen_q, causal=True, **DEEPSEEK
    )
    tensors = problem.make(BF16, DEVICE)
    whole = problem.call(tensors)
    assert _same(whole, problem.call(tensors)), "again"
    for page in (16, 64, 256):
        assert _same(whole, problem.call(tensors, **_in_pages(tensors, page))), f"pages of {page}"
    for megabytes in (0, 100):
        with workspace(megabytes):
            assert _same(whole, problem.call(tensors)), f"{megabytes} MB of workspace"
    for b in range(0, 12, 3):
        one = slice(b, b + 1)
        alone = {"q": tensors.q[one], "k_cache": tensors.k_cache[one]}
        got = problem.call(tensors, **alone, cache_seqlens=tensors.seqlens[one])
        assert _same((whole[0][one], whole[1][one]), got), f"{b} alone"
    some = torch.randperm(12, generator=generator)[:5].to(DEVICE)
    mixed = {"q": tensors.q[some], "k_cache": tensors.k_cache[some]}
    got = problem.call(tensors, **mixed, cache_seqlens=tensors.seqlens[some])
    assert _same((whole[0][some], whole[1][some]), got), "in a batch"
    if seqlen_q > 2:
        chunk = {"q": tensors.q[:, :2], "cache_seqlens": tensors.seqlens - (seqlen_q - 2)}
        assert _same((whole[0][:, :2], whole[1][:, :, :2]), problem.call(tensors, **chunk)), "chunk"


@pytest.mark.parametrize("heads", HEADS)
def test_sequences_that_share_all_pages_have_the_bits_of_one(heads: int) -> None:
    problem = Problem(seqlens=(320,), capacity=320, heads=heads, page=64, **DEEPSEEK)
    tensors = problem.make(BF16, DEVICE)
    assert tensors.table is not None
    one = problem.call(tensors)
    several = {
        "q": tensors.q.repeat(8, 1, 1, 1),
        "block_table": tensors.table.repeat(8, 1),
        "cache_seqlens": tensors.seqlens.repeat(8),
    }
    for out, lse in zip(*problem.call(tensors, **several), strict=True):
        assert _same(one, (out[None], lse[None]))


@pytest.mark.parametrize("copies", [1, 9, 24])  # few work tiles, pairs of blocks, more
@pytest.mark.parametrize("heads", [17, 32, 64])
def test_a_head_has_the_same_bits_beside_fewer_heads(heads: int, copies: int) -> None:
    problem = Problem(seqlens=LONG * copies, capacity=3008, heads=128, page=64, **DEEPSEEK)
    tensors = problem.make(BF16, DEVICE)
    out, lse = problem.call(tensors)
    for some in (slice(heads), slice(-heads, None)):
        got = problem.call(tensors, q=tensors.q[:, :, some].contiguous())
        assert _same((out[:, :, some], lse[:, some]), got), some


@pytest.mark.parametrize("heads", HEADS)
def test_a_sequence_among_many_that_are_as_long_has_the_bits_that_it_has_alone(heads: int) -> None:
    count = torch.cuda.get_device_properties(0).multi_processor_count
    problem = Problem(seqlens=(2100,) * count, capacity=2112, heads=heads, page=64, **DEEPSEEK)
    tensors = problem.make(BF16, DEVICE)
    assert tensors.table is not None
    out, lse = problem.call(tensors)
    for b in (0, count - 1):
        one = slice(b, b + 1)
        alone = {"q": tensors.q[one], "block_table": tensors.table[one]}
        got = problem.call(tensors, **alone, cache_seqlens=tensors.seqlens[one])
        assert _same((out[one], lse[one]), got), b


@pytest.mark.parametrize("heads", HEADS)
def test_lengths_may_grow_under_a_graph_and_nothing_waits(heads: int) -> None:
    problem = Problem(seqlens=(100, 1020, 0), capacity=1088, heads=heads, page=64, **DEEPSEEK)
    tensors = problem.make(BF16, DEVICE)
    problem.call(tensors)  # loads the kernels
    torch.cuda.synchronize()
    with no_wait_for_the_gpu():
        problem.call(tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = problem.call(tensors)
    for _ in range(3):
        graph.replay()
        assert _same(problem.call(tensors), captured)
        tensors.seqlens.add_(7)


@pytest.mark.parametrize("heads", HEADS)
def test_numbers_that_lie_read_nothing_outside(heads: int) -> None:
    """The cache is the middle of a larger tensor: reading outside would give NaN."""
    problem = Problem(seqlens=(3, 5, 7), page=16, heads=heads, **DEEPSEEK)
    tensors = problem.make(BF16, DEVICE)
    pages = tensors.k_cache.shape[0]
    room = torch.full((pages + 32, 16, 1, 576), math.nan, dtype=BF16, device=DEVICE)
    room[16 : 16 + pages] = tensors.k_cache
    cache = room[16 : 16 + pages]
    for lie in (-(2**31), 2**31 - 1, -1, 99):
        table = torch.full_like(tensors.table, lie)  # type: ignore[arg-type]
        for seqlens in (tensors.seqlens, torch.full_like(tensors.seqlens, lie)):
            changes = {"k_cache": cache, "block_table": table, "cache_seqlens": seqlens}
            out, _ = problem.call(tensors, **changes)
            assert bool(out.isfinite().all()), lie


def test_queries_at_odd_addresses_are_copied_and_caches_refused() -> None:
    problem = Problem(heads=16, **DEEPSEEK)
    tensors = problem.make(BF16, DEVICE)

    def move(x: Tensor) -> Tensor:
        return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)

    expected = problem.call(tensors)
    assert _same(expected, problem.call(tensors, q=move(tensors.q)))
    with pytest.raises(ValueError, match="k_cache must start at a multiple of 16 bytes, got "):
        problem.call(tensors, k_cache=move(tensors.k_cache))


def test_a_check_names_a_wrong_number(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(seqlens=(3, 97, 7), heads=16, **DEEPSEEK)
    tensors = problem.make(BF16, DEVICE)
    problem.call(tensors)
    monkeypatch.setenv("FLASH_DIST_CHECK", "1")
    with pytest.raises(ValueError, match=r"cache_seqlens\[1\] must be from 0 to 96 "):
        problem.call(tensors)


def test_float16_is_refused_in_a_sentence() -> None:
    problem = Problem()
    with pytest.raises(TypeError, match="q must be bfloat16 on cuda to read a cache, got float16"):
        problem.call(problem.make(torch.float16, DEVICE))


def test_the_operator_is_what_torch_expects_of_operators() -> None:
    problem = SMALL["as DeepSeek-V3 has it"]
    operator, arguments = problem.operator_call(problem.make(BF16, DEVICE))
    torch.library.opcheck(operator, arguments)


def test_a_compiled_graph_gives_the_same_bits() -> None:
    problem = PROBLEMS["two queries"]
    tensors = problem.make(BF16, DEVICE)
    compiled = torch.compile(problem.call, fullgraph=True)
    assert _same(problem.call(tensors), compiled(tensors))


def test_no_batch_and_no_query_are_nothing_to_do() -> None:
    q = torch.empty(0, 1, 16, 576, dtype=BF16, device=DEVICE)
    cache = torch.empty(2, 64, 1, 576, dtype=BF16, device=DEVICE)
    out, lse = flash_mla_with_kvcache(q, cache, None, None, 512)
    assert out.shape == (0, 1, 16, 512)
    assert lse.shape == (0, 16, 1)
