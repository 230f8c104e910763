"""Multi-row decode, emulated: the kernel for Hopper has the bits of the general one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final

import pytest
import torch

from tests.unit.made.emulator import Gpu, emulate

Tensor = torch.Tensor

pytestmark = pytest.mark.slow  # the first test compiles: 30 s

GENERAL: Final = Gpu(plan=99, capability=90)  # has too little shared memory for the wide kernel
HOPPER: Final = Gpu(plan=227, capability=90)


@dataclass(frozen=True)
class Problem:
    """Queries to a cache of bfloat16."""

    lengths: tuple[int, ...]
    seqlen_q: int = 40
    heads: int = 1
    heads_kv: int = 1
    head_dim: int = 64
    causal: bool = True
    left: int | None = None
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False

    def make(self) -> dict[str, Any]:
        """Return the arguments of a call; keys after a sequence are NaN."""
        generator = torch.Generator().manual_seed(sum(self.lengths) + self.seqlen_q)
        batch, capacity = len(self.lengths), -(-max(*self.lengths, 1) // 64) * 64

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).bfloat16()

        k, v = (normal(batch, capacity, self.heads_kv, self.head_dim) for _ in "kv")
        for b, length in enumerate(self.lengths):
            k[b, length:] = math.nan
            v[b, length:] = math.nan
        slopes = torch.rand(self.heads, generator=generator) / 100
        sinks = torch.randn(self.heads, generator=generator)
        return {
            "q": 3 * normal(batch, self.seqlen_q, self.heads, self.head_dim),
            "k": k,
            "v": v,
            "lengths": torch.tensor(self.lengths, dtype=torch.int32),
            "head_dim_v": self.head_dim,
            "causal": self.causal,
            "left": self.left,
            "softcap": self.softcap,
            "alibi": slopes if self.alibi else None,
            "sinks": sinks if self.sinks else None,
        }


PROBLEMS: Final = {
    "one unit": Problem((128, 1), causal=False),
    "no keys": Problem((0, 5, 200), seqlen_q=20),
    "half a tile of rows": Problem((300,), seqlen_q=17, head_dim=128),
    "one tile": Problem((300,), seqlen_q=64, head_dim=128),
    "one row too many": Problem((300,), seqlen_q=65, head_dim=128),
    "several larger tiles": Problem((640, 333), seqlen_q=130, heads=2, heads_kv=2),
    "two groups": Problem((1024, 1025), head_dim=128),
    "groups that are cut": Problem((2304,), seqlen_q=33),
    "heads of a group": Problem((260, 700), seqlen_q=7, heads=10, heads_kv=2),
    "a window": Problem((1300,), left=100),
    "a window of many rows": Problem((900,), seqlen_q=200, left=300, head_dim=128),
    "few columns": Problem((500,), head_dim=40),
    "more columns than 64": Problem((500,), seqlen_q=70, head_dim=96),
    "soft cap": Problem((400,), softcap=5.0),
    "ALiBi and sinks": Problem((400,), 20, 6, 2, 128, alibi=True, sinks=True),
}
PREFILLS: Final = {
    "one tile": Problem((300,), 128, head_dim=128),
    "tiles of several heads": Problem((640, 333), 180, 4, 2),
    "no keys": Problem((0, 5, 200), 192, causal=False),
    "more queries than keys": Problem((70, 300), 250, head_dim=128),
    "two groups": Problem((1280,), 192),
    "a window": Problem((1500,), 200, head_dim=128, left=300),
    "sinks": Problem((400, 1), 120, 2, 1, 128, sinks=True),
    "few columns": Problem((500,), 190, head_dim=40),
}
CHANGES: Final[dict[str, dict[str, int]]] = {
    "one multiprocessor": {"sm_count": 1, "seed": 1},
    "eleven": {"sm_count": 11, "seed": 2},
    "no workspace": {"budget": 0, "seed": 3},
}


def assert_same_bits(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> None:
    for a, b in zip(one, other, strict=True):
        kind = torch.int16 if a.element_size() == 2 else torch.int32
        assert torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def run(gpu: Gpu, **arguments: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    out, lse, _ = emulate(**arguments, gpu=gpu)
    return out, lse


@pytest.mark.parametrize("name", PROBLEMS)
def test_both_kernels_have_the_same_bits(name: str) -> None:
    arguments = PROBLEMS[name].make()
    expected = run(GENERAL, **arguments)
    assert_same_bits(expected, run(HOPPER, **arguments))
    for changes in CHANGES.values():
        assert_same_bits(expected, run(replace(HOPPER, **changes), **arguments))


def in_pages(arguments: dict[str, Any], page: int) -> dict[str, Any]:
    """Return a call with its keys in shuffled pages; entries past a sequence's end are invalid."""
    batch, capacity, *rest = arguments["k"].shape
    order = torch.randperm(batch * capacity // page, generator=torch.Generator().manual_seed(page))
    table = order.reshape(batch, -1).to(torch.int32)
    changes: dict[str, Any] = {"table": table}
    for name in ("k", "v"):
        moved = torch.empty_like(arguments[name]).reshape(-1, page, *rest)
        moved[order] = arguments[name].reshape(moved.shape)
        changes[name] = moved
    for b, length in enumerate(arguments["lengths"].tolist()):
        table[b, -(-length // page) :] = 2**31 - 1
    return arguments | changes


@pytest.mark.parametrize("page", [16, 64])
def test_bits_are_the_same_in_pages(page: int) -> None:
    arguments = Problem((300, 1200), seqlen_q=70, head_dim=128).make()
    expected = run(GENERAL, **arguments)
    assert_same_bits(expected, run(HOPPER, **in_pages(arguments, page)))


@pytest.mark.parametrize("name", PREFILLS)
def test_the_forward_kernel_has_the_same_bits(name: str) -> None:
    """With one multiprocessor, the forward kernel takes the queries that fill its tiles."""
    arguments = PREFILLS[name].make()
    expected = run(GENERAL, **arguments)
    one = replace(HOPPER, sm_count=1)
    assert_same_bits(expected, run(one, **arguments))
    for seed, page in enumerate((16, 64)):
        assert_same_bits(expected, run(replace(one, seed=seed), **in_pages(arguments, page)))


@pytest.mark.parametrize("sm_count", [1, 3])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_chunk_of_few_queries_has_the_bits_of_all_at_once(head_dim: int, sm_count: int) -> None:
    """Sixteen rows use the kernel for few queries. sm_count decides the keys of each tile."""
    arguments = Problem((1100,), seqlen_q=150, head_dim=head_dim).make()
    out, lse = run(replace(HOPPER, sm_count=sm_count), **arguments)
    for begin, end in ((0, 16), (16, 80), (80, 150)):
        chunk = {
            "q": arguments["q"][:, begin:end].contiguous(),
            "lengths": arguments["lengths"] - (150 - end),
        }
        expected = out[:, begin:end], lse[:, :, begin:end]
        assert_same_bits(expected, run(HOPPER, **{**arguments, **chunk}))
