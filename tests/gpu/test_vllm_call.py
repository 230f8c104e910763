"""vLLM's call of attention on a GPU: the case of vllm#51902, and what its CUDA graphs capture.

In that issue, a decoding sequence gets other bits when the prefill of its neighbour grows from 9
tokens to 10: FlashAttention-3 chooses the tiles of the whole call by max_seqlen_q.
"""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch

from flash_dist import flash_attn_varlen_func
from flash_dist.compat import vllm_flash_attn
from tests.gpu.running import no_wait_for_the_gpu, poison_memory
from tests.reference import DEVICE, assert_same_bits

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor

HEADS, HEADS_KV = 14, 2
SEQLEN, ROOM = 19802, 384  # keys of the decoding sequence; most tokens of its neighbour
NEIGHBOURS: Final = (9, 10, 16, 17, 64, 65, 128, 129, 257)
LONGEST: Final = (10, 64, 65, 129, 2048, SEQLEN)


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def make_call(dtype: torch.dtype, head_dim: int, page: int) -> dict[str, Any]:
    """Return the call of one query that decodes and a neighbour, with keys in vLLM's cache."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=DEVICE, generator=generator).to(dtype)

    columns, more = -(-SEQLEN // page), -(-ROOM // page)
    k, v = normal(columns + more, 2, page, HEADS_KV, head_dim).unbind(1)
    table = torch.zeros(2, columns, dtype=torch.int32, device=DEVICE)
    pages = torch.arange(columns + more, dtype=torch.int32, device=DEVICE).flip(0)
    table[0], table[1, :more] = pages[:columns], pages[columns:]
    return {
        "q": normal(1 + ROOM, HEADS, head_dim),
        "k": k,
        "v": v,
        "max_seqlen_k": SEQLEN,
        "block_table": table,
        "causal": True,
        "num_splits": 1,
        "fa_version": 3,
        "return_softmax_lse": True,
    }


def call(arguments: dict[str, Any], tokens: int, longest: int) -> dict[str, Tensor]:
    """Return out and lse of a call beside a neighbour of `tokens` tokens."""
    poison_memory(arguments["q"].device)
    out, lse = vllm_flash_attn.flash_attn_varlen_func(
        **{**arguments, "q": arguments["q"][: 1 + tokens]},
        cu_seqlens_q=numbers(0, 1, 1 + tokens),
        max_seqlen_q=longest,
        seqused_k=numbers(SEQLEN, tokens),
    )
    return {"out": out, "lse": lse}


def choose_first(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"out": found["out"][:1], "lse": found["lse"][:, :1]}


@pytest.mark.parametrize("page", [16, 128])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_growing_neighbour_changes_no_bit(
    head_dim: int, page: int, any_half: torch.dtype
) -> None:
    arguments = make_call(any_half, head_dim, page)
    first = choose_first(call(arguments, NEIGHBOURS[0], NEIGHBOURS[0]))
    assert bool(first["out"].isfinite().all())
    for tokens in NEIGHBOURS[1:]:
        found = choose_first(call(arguments, tokens, tokens))
        assert_same_bits(first, found, f"beside {tokens} tokens")


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_max_seqlen_q_changes_no_bit(head_dim: int, any_half: torch.dtype) -> None:
    arguments = make_call(any_half, head_dim, 16)
    first = call(arguments, 9, 9)
    for longest in LONGEST:
        assert_same_bits(first, call(arguments, 9, longest), f"max_seqlen_q {longest}")


@pytest.mark.parametrize("lengths", [(1, 9), (300, 40)], ids=str)
def test_max_seqlen_changes_no_bit_of_packed_keys(
    lengths: tuple[int, int], any_half: torch.dtype
) -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)
    q, k, v = (
        torch.randn(tokens, heads, 64, device=DEVICE, generator=generator).to(any_half)
        for tokens, heads in ((sum(lengths), 4), (4000, 2), (4000, 2))
    )
    ends_q, ends_k = numbers(0, lengths[0], sum(lengths)), numbers(0, 3000, 4000)
    found = []
    for longest_q, longest_k in ((max(lengths), 3000), (512, 3000), (4096, 65536)):
        poison_memory(q.device)
        out, lse = flash_attn_varlen_func(
            q, k, v, ends_q, ends_k, longest_q, longest_k, causal=True, return_lse=True
        )
        found.append({"out": out, "lse": lse})
    for other in found[1:]:
        assert_same_bits(found[0], other, f"another max_seqlen, lengths {lengths}")


def test_a_captured_call_follows_the_numbers_on_the_gpu(any_half: torch.dtype) -> None:
    """Decoding steps as a server captures them: out, block table and lengths are written in place.

    The rows that pad a batch have one key each.
    """
    arguments = make_call(any_half, 128, 16) | {"return_softmax_lse": False}
    batch = 3
    q, table = arguments["q"][:batch].clone(), arguments["block_table"][[0, 1, 1]].clone()
    used = numbers(1000, 200, 1)
    out = torch.full_like(q, torch.nan)
    arguments |= {"q": q, "block_table": table, "seqused_k": used, "max_seqlen_q": 1}
    arguments["cu_seqlens_q"] = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE)

    def step() -> Tensor:
        found = vllm_flash_attn.flash_attn_varlen_func(**arguments, out=out)
        assert found is out
        return out

    step()  # loads the kernels
    torch.cuda.synchronize()
    with no_wait_for_the_gpu():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lengths in ((1001, 201, 1), (SEQLEN, 17, 384), (3, 1, 1)):
        used.copy_(numbers(*lengths))
        table[1].copy_(table[0])
        q.normal_()
        out.fill_(torch.nan)
        graph.replay()
        replayed = out.clone()
        out.fill_(torch.nan)
        assert_same_bits({"out": step()}, {"out": replayed}, f"lengths {lengths}")
        assert bool(replayed.isfinite().all())
