"""Caches with autograd, autocast and transforms of torch.func, and tensors at odd addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from flash_dist import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    flash_mla_with_kvcache,
)
from flash_dist.errors import FlashDistError

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.gpu
Tensor = torch.Tensor


def draw(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def at_odd_address(x: Tensor) -> Tensor:
    held = x.new_empty(x.numel() + 1)
    moved: Tensor = held[1:].view(x.shape).copy_(x)
    return moved


def test_keys_that_are_not_used_have_gradients_of_zero(half: torch.dtype) -> None:
    lengths, used = (70, 200, 9), (70, 3, 5)
    ends = torch.tensor([0, 70, 270, 279], dtype=torch.int32, device="cuda")
    leaves = [draw(279, 2, 64, dtype=half, seed=n).requires_grad_() for n in range(3)]
    q, k, v = leaves
    seqused = torch.tensor(used, dtype=torch.int32, device="cuda")
    out = flash_attn_varlen_func(q, k, v, ends, ends, 200, 70, seqused_k=seqused)
    dout = draw(279, 2, 64, dtype=half, seed=3)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)
    begin = 0
    for length, count in zip(lengths, used, strict=True):
        rows, left = slice(begin, begin + length), slice(begin + count, begin + length)
        assert not dk[left].any()
        assert not dv[left].any()
        q, k, v = (x.detach()[rows][None].requires_grad_() for x in leaves)
        alone = flash_attn_func(q, k[:, :count], v[:, :count])
        grads = torch.autograd.grad(alone, (q, k, v), dout[rows][None])
        for got, want in zip((dq, dk, dv), grads, strict=True):
            torch.testing.assert_close(got[rows], want[0], atol=2e-2, rtol=2e-2)
        begin += length


def test_an_append_is_a_change_that_autograd_sees(half: torch.dtype) -> None:
    k_cache, v_cache = (draw(2, 128, 2, 64, dtype=half, seed=n) for n in (0, 1))
    saved = (k_cache * draw(1, dtype=half).requires_grad_()).sum()
    q, k, v = (draw(2, 1, 2, 64, dtype=half, seed=n) for n in (2, 3, 4))
    versions = k_cache._version, v_cache._version
    flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=5)
    assert (k_cache._version, v_cache._version) == tuple(n + 1 for n in versions)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


def test_a_cache_that_wants_gradients_is_refused(half: torch.dtype) -> None:
    q, k, v = (draw(2, 8, 2, 64, dtype=half, seed=n) for n in range(3))
    with pytest.raises(FlashDistError, match="no_grad"):
        flash_attn_with_kvcache(q, k.requires_grad_(), v)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_what_an_append_reads_at_odd_addresses_has_the_bits_of_aligned_tensors(
    half: torch.dtype, *, interleaved: bool, compiled: bool
) -> None:
    new = [draw(2, 3, 2, 64, dtype=half, seed=n) for n in range(3)]
    tables = [draw(128, 16, dtype=half, seed=n) for n in (3, 4)]
    torch._dynamo.reset()
    append = torch.compile(flash_attn_with_kvcache) if compiled else flash_attn_with_kvcache

    def run(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        k_cache, v_cache = (draw(2, 128, 2, 64, dtype=half, seed=n) for n in (5, 6))
        out = append(
            q,
            k_cache,
            v_cache,
            k,
            v,
            rotary_cos=cos,
            rotary_sin=sin,
            cache_seqlens=7,
            causal=True,
            rotary_interleaved=interleaved,
        )
        return out, k_cache

    given = *new, *tables
    for got, want in zip(run(*map(at_odd_address, given)), run(*given), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_a_compiled_graph_names_a_cache_at_an_odd_address(half: torch.dtype, name: str) -> None:
    caches: dict[str, Any] = {x: draw(2, 128, 2, 64, dtype=half) for x in ("k_cache", "v_cache")}
    caches[name] = at_odd_address(caches[name])
    torch._dynamo.reset()
    graph = torch.compile(flash_attn_with_kvcache, backend="aot_eager")
    with pytest.raises(RuntimeError, match=f"{name} must .* address 2 bytes past"):
        graph(draw(2, 1, 2, 64, dtype=half), **caches)
    torch.cuda.synchronize()


def test_packed_queries_of_pages_at_an_odd_address_are_read(half: torch.dtype) -> None:
    q = draw(9, 2, 64, dtype=half)
    k, v = (draw(4, 64, 2, 64, dtype=half, seed=n) for n in (1, 2))
    ends = torch.tensor([0, 4, 9], dtype=torch.int32, device="cuda")
    keys = torch.tensor([0, 100, 150], dtype=torch.int32, device="cuda")
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32, device="cuda")

    def run(q: Tensor) -> Tensor:
        out: Tensor = flash_attn_varlen_func(q, k, v, ends, keys, 5, 100, block_table=table)
        return out

    assert torch.equal(run(at_odd_address(q)), run(q))


def read_cache() -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Return a call on a cache, and queries for it."""
    k, v = (draw(2, 64, 2, 64, seed=n) for n in (1, 2))
    return lambda q: flash_attn_with_kvcache(q, k, v), draw(2, 1, 2, 64)


def read_latent() -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Return a call on a cache of latent keys, and queries for it."""
    table = torch.arange(4, dtype=torch.int32, device="cuda").view(2, 2)
    keys = draw(4, 64, 1, 576, dtype=torch.bfloat16, seed=1)
    lengths = torch.full((2,), 100, dtype=torch.int32, device="cuda")

    def call(q: Tensor) -> Tensor:
        result: Any = flash_mla_with_kvcache(q, keys, table, lengths, 512)
        out: Tensor = result[0]
        return out

    return call, draw(2, 1, 16, 576, dtype=torch.bfloat16)


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # from torch.func.jvp
@pytest.mark.parametrize("make", [read_cache, read_latent])
def test_transforms_give_values_or_our_refusal(
    make: Callable[[], tuple[Callable[[Tensor], Tensor], Tensor]],
) -> None:
    call, q = make()
    if q.dtype == torch.bfloat16 and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("bfloat16 needs 8.0")
    with pytest.raises(FlashDistError, match="forward mode"):
        torch.func.jvp(call, (q,), (q,))
    with pytest.raises(FlashDistError, match="no gradients"):
        torch.func.grad(lambda x: call(x).sum())(q)
    try:
        mapped = torch.vmap(call)(q[None])
    except FlashDistError as error:
        assert "vmap" in str(error)  # noqa: PT017
    else:
        assert torch.equal(mapped[0], call(q))


def test_autocast_casts_what_reads_a_cache() -> None:
    q = draw(2, 1, 2, 64, dtype=torch.float32)
    k, v = (draw(2, 64, 2, 64, seed=n) for n in (1, 2))
    with torch.autocast("cuda", torch.float16):
        got = flash_attn_with_kvcache(q, k, v)
    assert torch.equal(got, flash_attn_with_kvcache(q.half(), k, v))
