"""match_kvcache: training, prefill at once and in chunks, and decoding have the same bits."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from flash_dist import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    last_variant,
    match_kvcache,
)
from flash_dist.integrations import torch_sdpa
from tests.gpu.running import poison_memory, runs_on_hopper, workspace
from tests.reference import DEVICE

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]
HEAD_DIMS = (8, 40, 64, 64, 80, 96, 128, 128, 160, 192, 256, 256, 264, 512)
LENGTHS = ((1, 140), (100, 1300), (900, 3100))
PROBLEMS = 60  # per test


class RandomCall:
    """A call whose last query is at the last key, with a cache of the same keys in pages."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)  # noqa: S311 - of problems
        self.dtype = rng.choice([torch.float16, torch.bfloat16])
        self.batch, self.heads_kv, group = (
            rng.choice([1, 2]),
            rng.choice([1, 2, 4]),
            rng.randint(1, 4),
        )
        self.seqlen_k = rng.randint(*rng.choice(LENGTHS))
        self.seqlen_q = self.seqlen_k if rng.random() < 0.6 else rng.randint(1, self.seqlen_k)
        head_dim = rng.choice(HEAD_DIMS)
        head_dim_v = head_dim if rng.random() < 0.8 else max(8, head_dim // 16 * 8)
        heads = self.heads_kv * group
        self.generator = torch.Generator(DEVICE).manual_seed(seed)
        self.q = self.draw(self.seqlen_q, heads, head_dim)
        self.k = self.draw(self.seqlen_k, self.heads_kv, head_dim)
        self.v = self.draw(self.seqlen_k, self.heads_kv, head_dim_v)
        self.options: dict[str, Any] = {"causal": True}
        slopes = torch.rand(heads, generator=self.generator, device=DEVICE) * 8 / self.seqlen_k
        for name, value in (
            ("window_size", (rng.randint(0, self.seqlen_k), -1)),
            ("softcap", rng.choice([1.5, 30.0, 200.0])),
            ("alibi_slopes", slopes),
            ("learnable_sink", torch.randn(heads, generator=self.generator, device=DEVICE)),
        ):
            if rng.random() < 0.2:
                self.options[name] = value
        self.page = 16 * rng.choice([1, 2, 4, 5])
        self.k_pages, self.v_pages, self.table = self.lay_out_pages()

    def draw(self, *shape: int) -> Tensor:
        """Return normal numbers for each batch entry."""
        numbers = torch.randn(self.batch, *shape, generator=self.generator, device=DEVICE)
        return numbers.to(self.dtype)

    def lay_out_pages(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys and values in pages of a random order, and the table."""
        pages = -(-self.seqlen_k // self.page)
        count = self.batch * pages
        order = torch.randperm(count + 3, generator=self.generator, device=DEVICE)[:count]
        made = []
        for x in (self.k, self.v):
            filled = pad(x, (0, 0, 0, 0, 0, pages * self.page - self.seqlen_k))
            cache = x.new_full((count + 3, self.page, *x.shape[2:]), torch.nan)
            cache[order] = filled.reshape(count, self.page, *x.shape[2:])
            made.append(cache)
        return made[0], made[1], order.reshape(self.batch, pages).int()

    def attend(self, entries: slice = slice(None)) -> Pair:
        """Return out and lse of the function for training."""
        tensors = (x[entries] for x in (self.q, self.k, self.v))
        out, lse = flash_attn_func(*tensors, return_lse=True, match_kvcache=True, **self.options)
        return out, lse

    def decode(self, begin: int, end: int) -> Pair:
        """Return out and lse of queries to the pages."""
        seqlen = self.seqlen_k - self.seqlen_q + end
        out, lse = flash_attn_with_kvcache(
            self.q[:, begin:end],
            self.k_pages,
            self.v_pages,
            cache_seqlens=torch.full((self.batch,), seqlen, dtype=torch.int32, device=DEVICE),
            block_table=self.table,
            return_softmax_lse=True,
            **self.options,
        )
        return out, lse

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Yield all queries at once, in chunks, and some alone."""
        yield 0, self.seqlen_q
        begin = 0
        while begin < self.seqlen_q:
            end = min(self.seqlen_q, begin + self.rng.choice([1, 64, 100, 128, 700]))
            yield begin, end
            begin = max(end, begin + self.seqlen_q // 8)
        for place in (0, 63, 64, 127, 128, 1024, self.seqlen_q - 1):
            if place < self.seqlen_q:
                yield place, place + 1


def assert_same(got: Pair, expected: Pair, what: str) -> None:
    for name, x, y in zip(("out", "lse"), got, expected, strict=True):
        count = int((x != y).sum())
        assert torch.equal(x, y), f"{what}: {count} of {x.numel()} of {name} differ"


@pytest.mark.parametrize("first", range(0, 4 * PROBLEMS, PROBLEMS))
def test_a_query_has_the_bits_of_a_cache(first: int) -> None:
    for seed in range(first, first + PROBLEMS):
        call = RandomCall(seed)
        poison_memory(torch.device(DEVICE))
        out, lse = call.attend()
        for begin, end in call.chunks():
            expected = out[:, begin:end], lse[:, :, begin:end]
            assert_same(call.decode(begin, end), expected, f"{seed}: queries {begin} to {end}")
        assert_same(call.attend(slice(-1, None)), (out[-1:], lse[-1:]), f"{seed}: the last alone")


@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
def test_a_call_that_fills_the_gpu_has_the_same_bits(head_dim: int, half: torch.dtype) -> None:
    for batch, seqlen, options in (
        (4, 64, {}),
        (4, 300, {"causal": True}),
        (2, 2300, {"causal": True, "window_size": (300, -1)}),
        (2, 2300, {"learnable_sink": torch.linspace(-2, 3, 32, device=DEVICE)}),
    ):
        q, k, v = (
            torch.randn(batch, seqlen, heads, head_dim, device=DEVICE, dtype=half)
            for heads in (32, 8, 8)
        )
        expected: Any = flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, **options)
        for _ in range(3):
            poison_memory(torch.device(DEVICE))
            got: Any = flash_attn_func(q, k, v, return_lse=True, match_kvcache=True, **options)
            assert_same(got, expected, f"{batch} x {seqlen}, {options}")
    if runs_on_hopper("fwd_kvcache_sm90"):
        assert last_variant()["fwd_kvcache"]["family"] == "fwd_kvcache_sm90"


def test_values_of_the_next_sequence_do_not_spread() -> None:
    q, k, v = (
        torch.randn(2700, heads, 128, device=DEVICE, dtype=torch.bfloat16) for heads in (16, 4, 4)
    )
    ends = torch.tensor([0, 1500, 2700], device=DEVICE, dtype=torch.int32)
    call = ends, ends, 1500, 1500
    expected = flash_attn_varlen_func(q, k, v, *call, match_kvcache=True)
    k[1500:] = v[1500:] = torch.nan
    got = flash_attn_varlen_func(q, k, v, *call, match_kvcache=True)
    assert torch.equal(got[:1500], expected[:1500])
    assert got[1500:].isnan().all()


def test_a_workspace_limit_changes_nothing() -> None:
    for seed in range(8):
        call = RandomCall(seed)
        expected = call.attend()
        for megabytes in (1, 0):
            with workspace(megabytes):
                assert_same(call.attend(), expected, f"{seed}: {megabytes} MB")


def test_a_sequence_is_the_same_packed() -> None:
    lengths = (1, 300, 0, 1100, 64)
    q, k, v = (
        torch.randn(sum(lengths), heads, 128, device=DEVICE, dtype=torch.bfloat16)
        for heads in (8, 2, 2)
    )
    ends = pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(DEVICE, torch.int32)
    packed, packed_lse = flash_attn_varlen_func(
        *(q, k, v, ends, ends, 1100, 1100), causal=True, return_lse=True, match_kvcache=True
    )
    for begin, end in zip(ends.tolist(), ends.tolist()[1:], strict=False):
        if begin == end:
            continue
        own = (x[None, begin:end] for x in (q, k, v))
        alone = flash_attn_with_kvcache(*own, causal=True, return_softmax_lse=True)
        got = packed[None, begin:end], packed_lse[None, :, begin:end]
        assert_same(got, alone, f"{begin} to {end}")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gradients_are_as_exact_and_the_same_on_every_run(head_dim: int, half: torch.dtype) -> None:
    leaves = [
        torch.randn(2, 333, heads, head_dim, device=DEVICE, dtype=half, requires_grad=True)
        for heads in (8, 2, 2)
    ]

    def differentiate(tensors: list[Tensor], **options: Any) -> tuple[Tensor, ...]:  # noqa: ANN401
        out = flash_attn_func(*tensors, causal=True, **options)
        return torch.autograd.grad(out.float().square().sum(), tensors)

    found = differentiate(leaves, match_kvcache=True)
    for x, y in zip(found, differentiate(leaves, match_kvcache=True), strict=True):
        assert torch.equal(x, y)
    for x, y in zip(found, differentiate(leaves), strict=True):
        assert ((x - y).float().norm() / y.float().norm()).item() < 2 * torch.finfo(half).eps
    alone = [x.detach()[1:].requires_grad_() for x in leaves]
    options = {"match_kvcache": True, "batch_invariant": True}
    for x, y in zip(differentiate(leaves, **options), differentiate(alone, **options), strict=True):
        assert torch.equal(x[1:], y)


def test_float32_is_refused() -> None:
    q = torch.zeros(1, 4, 1, 64, device=DEVICE)
    with match_kvcache(), pytest.raises(TypeError, match="False for float32 on a GPU, got True"):
        flash_attn_func(q, q, q)


def test_torch_calls_the_provider_with_the_bits_of_a_cache() -> None:
    q, k, v = (
        torch.randn(2, 8, 300, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        for _ in "qkv"
    )
    torch_sdpa.activate()
    try:
        with match_kvcache(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = scaled_dot_product_attention(q, k, v, is_causal=True)
    finally:
        torch_sdpa.deactivate()
    own = [x.transpose(1, 2) for x in (q, k, v)]
    expected = flash_attn_func(own[0], own[1], own[2], causal=True, match_kvcache=True)
    assert torch.equal(out.transpose(1, 2), expected)
    out.sum().backward()
    assert all(x.grad is not None for x in (q, k, v))
