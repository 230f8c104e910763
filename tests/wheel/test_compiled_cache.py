"""A compiled decoding step writes its cache in place, and warns if Inductor would copy it."""

from __future__ import annotations

import re
import warnings
from math import prod
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from flash_dist import flash_attn_with_kvcache
from flash_dist.kernels import memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Tensor = torch.Tensor
KEYS, HEADS, HEAD_DIM = 512, 2, 16
ALLOCATED = re.compile(r"= empty_strided_\w+\(\((\d[\d, ]*)\)")


def zeros(*several: int) -> Tensor:
    return torch.zeros(*several, 1, KEYS, HEADS, HEAD_DIM)


def step(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    length = torch.full((1,), 10, dtype=torch.int32)
    return flash_attn_with_kvcache(
        q * 1.0, k_cache, v_cache, k, v, cache_seqlens=length, causal=True
    )


def cut_inside(q: Tensor, k: Tensor, v: Tensor, cache: Tensor) -> Tensor:
    return step(q, k, v, *cache.unbind())


def index_inside(q: Tensor, k: Tensor, v: Tensor, cache: Tensor) -> Tensor:
    return step(q, k, v, cache[0], cache[1])


def layers(q: Tensor, k: Tensor, v: Tensor, *caches: Tensor) -> Tensor:
    for i in range(0, len(caches), 2):
        q = step(q, k, v, *caches[i : i + 2])
    return q


def of_layers() -> list[Tensor]:
    k_caches, v_caches = zeros(2), zeros(2)
    return [k_caches[0], v_caches[0], k_caches[1], v_caches[1]]


IN_PLACE: dict[str, tuple[Callable[..., Tensor], Callable[[], list[Tensor]]]] = {
    "two allocations": (step, lambda: [zeros(), zeros()]),
    "one that the graph cuts": (cut_inside, lambda: [zeros(2)]),
    "one that the graph indexes": (index_inside, lambda: [zeros(2)]),
    "layers of one allocation each": (layers, of_layers),
}


@pytest.fixture(autouse=True)
def nobody_was_warned() -> Iterator[None]:
    torch.compiler.reset()
    memory._warn.cache_clear()
    yield
    memory._warn.cache_clear()


def count_copies(
    function: Callable[..., Tensor], make: Callable[[], list[Tensor]]
) -> tuple[int, list[str]]:
    """Compile and call; return the number of buffers as large as a cache, and our warnings."""
    generator = torch.Generator().manual_seed(0)
    one = [torch.randn(1, 1, HEADS, HEAD_DIM, generator=generator) for _ in range(3)]
    given, compared = make(), make()
    compiled = torch.compile(function, fullgraph=True)
    config: Any = torch.compiler.config
    with (  # a cached graph would write no code
        config.patch(force_disable_caches=True),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        out, code = run_and_get_code(compiled, *one, *given)
    assert torch.equal(out, function(*one, *compared))
    assert all(torch.equal(a, b) for a, b in zip(given, compared, strict=True))
    sizes = [prod(map(int, re.findall(r"\d+", x))) for x in ALLOCATED.findall("\n".join(code))]
    assert sizes, "the code that Inductor wrote allocates no buffer that is read here"
    said = [str(x.message) for x in caught if "flash_attn_with_kvcache" in str(x.message)]
    return sum(size >= KEYS * HEADS * HEAD_DIM for size in sizes), said


@pytest.mark.parametrize("case", IN_PLACE.values(), ids=IN_PLACE)
def test_the_documented_forms_copy_no_cache(case: Any) -> None:  # noqa: ANN401
    assert count_copies(*case) == (0, [])


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference"])
def test_two_views_of_one_allocation_are_named_once(*, inference: bool) -> None:
    with torch.inference_mode(inference):
        copies, said = count_copies(step, lambda: [*zeros(2).unbind()])
        assert len(said) == 1
        assert "k_cache and v_cache that are views of one allocation" in said[0]
        assert "\n\nhint: allocate k_cache and v_cache on their own" in said[0]
        assert copies > 0, "Inductor no longer copies: neither warn nor document that it does"
        torch.compiler.reset()
        assert count_copies(step, lambda: [*zeros(2).unbind()])[1] == []
