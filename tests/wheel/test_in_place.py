"""New keys are written in place, and autograd notices as with torch's own operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from flash_dist import flash_attn_with_kvcache
from flash_dist.errors import FlashDistError

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
TABLE = torch.arange(4, dtype=torch.int32).view(2, 2)
WAYS: dict[str, dict[str, Any]] = {
    "rows": {"cache_seqlens": 3},
    "pages": {"cache_seqlens": 3, "block_table": TABLE},
    "rotated": {
        "cache_seqlens": torch.tensor([3, 4], dtype=torch.int32),
        "rotary_cos": torch.ones(32, 8),
        "rotary_sin": torch.zeros(32, 8),
    },
}


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def write(k_cache: Tensor, v_cache: Tensor, **options: Any) -> Tensor:  # noqa: ANN401
    new = draw(2, 1, 2, 16)
    out: Tensor = flash_attn_with_kvcache(new, k_cache, v_cache, new, new, **options)
    return out


def write_compiled(k_cache: Tensor, v_cache: Tensor, **options: Any) -> Tensor:  # noqa: ANN401
    new = draw(2, 1, 2, 16)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(new: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        out: Tensor = flash_attn_with_kvcache(new, k_cache, v_cache, new, new, **options)
        return out

    return step(new, k_cache, v_cache)


def shape_of(options: dict[str, Any]) -> tuple[int, ...]:
    return (4, 16, 2, 16) if "block_table" in options else (2, 32, 2, 16)


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_an_append_is_one_write_of_each_cache(options: dict[str, Any]) -> None:
    caches = [torch.zeros(shape_of(options)) for _ in range(2)]
    for context in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        before = [x._version for x in caches]
        with context:
            write(*caches, **options)
        assert [x._version for x in caches] == [version + 1 for version in before]
    before = [x._version for x in caches]
    k_cache, v_cache = caches
    flash_attn_with_kvcache(draw(2, 1, 2, 16), k_cache, v_cache, cache_seqlens=3)  # only reads
    assert [x._version for x in caches] == before


def test_a_direct_call_of_the_operator_is_one_write_of_each_cache() -> None:
    caches = [torch.zeros(2, 32, 2, 16) for _ in range(2)]
    saved = (caches[0] * torch.ones(1, requires_grad=True)).sum()
    new = draw(2, 1, 2, 16)
    where = torch.tensor([3, 4], dtype=torch.int32), None, None
    torch.ops.flash_dist.append(new, *caches, new, new, *where, None, None, False, True)
    assert torch.equal(caches[1][1, 4], new[1, 0])
    assert [x._version for x in caches] == [1, 1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


@pytest.mark.parametrize("call", [write, pytest.param(write_compiled, marks=pytest.mark.slow)])
@pytest.mark.parametrize("which", [0, 1], ids=["k_cache", "v_cache"])
def test_a_backward_refuses_a_saved_cache_that_was_written_since(
    call: Callable[..., Tensor], which: int
) -> None:
    caches = [torch.zeros(2, 32, 2, 16) for _ in range(2)]
    weight = draw(16).requires_grad_()
    loss = (caches[which][:, :8] * weight).sum()  # autograd saves a view
    call(*caches, cache_seqlens=3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_cache_of_inference_mode_may_be_written_outside() -> None:
    with torch.inference_mode():
        caches = [torch.zeros(2, 32, 2, 16) for _ in range(2)]
    write(*caches, cache_seqlens=3)
    assert all(x[:, 3].any() for x in caches)


@pytest.mark.parametrize("which", [0, 1], ids=["k_cache", "v_cache"])
def test_a_leaf_is_written_where_torch_writes_it_and_nowhere_else(which: int) -> None:
    caches = [torch.zeros(2, 32, 2, 16) for _ in range(2)]
    leaf = torch.nn.Parameter(caches[which])
    for view in (leaf, leaf[:], leaf.view_as(leaf)):
        caches[which] = view
        with pytest.raises(FlashDistError, match="_cache that requires them, with grad mode on"):
            write(*caches, cache_seqlens=3)
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            view[:, 3] = 1.0
    assert not leaf.any()
    with torch.no_grad():
        write(*caches, cache_seqlens=3)
    assert leaf[:, 3].any()
