"""Autocast casts the inputs of calls on a cache, as for every other function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from flash_dist import (
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    flash_mla_with_kvcache,
)

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
TABLE = torch.arange(4, dtype=torch.int32).view(2, 2)
ENDS = torch.tensor([0, 1, 2], dtype=torch.int32)
LENGTHS = torch.tensor([20, 3], dtype=torch.int32)


def attend_cache(**tensors: Any) -> Any:  # noqa: ANN401
    return flash_attn_with_kvcache(**tensors, cache_seqlens=LENGTHS)


def attend_latent(**tensors: Any) -> Any:  # noqa: ANN401
    where: dict[str, Any] = {"block_table": TABLE, "cache_seqlens": LENGTHS, "head_dim_v": 32}
    return flash_mla_with_kvcache(**tensors, **where)[0]


def attend_pages(**tensors: Any) -> Any:  # noqa: ANN401
    where: dict[str, Any] = {"block_table": TABLE, "seqused_k": LENGTHS}
    return flash_attn_varlen_func(**tensors, **where, **PACKED, cu_seqlens_k=None)


def attend_used(**tensors: Any) -> Any:  # noqa: ANN401
    used = torch.ones(2, dtype=torch.int32)
    return flash_attn_varlen_func(**tensors, **PACKED, cu_seqlens_k=ENDS, seqused_k=used)


PACKED: dict[str, Any] = {"cu_seqlens_q": ENDS, "max_seqlen_q": 1, "max_seqlen_k": 32}
CALLS: dict[str, tuple[Callable[..., Tensor], dict[str, tuple[int, ...]]]] = {
    "cache": (
        attend_cache,
        {"q": (2, 1, 2, 16), "k_cache": (2, 32, 2, 16), "v_cache": (2, 32, 2, 16)},
    ),
    "latent": (attend_latent, {"q": (2, 1, 4, 64), "k_cache": (4, 16, 1, 64)}),
    "pages": (attend_pages, {"q": (2, 2, 16), "k": (4, 16, 2, 16), "v": (4, 16, 2, 16)}),
    "used": (attend_used, {"q": (2, 2, 16), "k": (2, 2, 16), "v": (2, 2, 16)}),
}


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("name", CALLS)
def test_what_reads_a_cache_is_cast(name: str) -> None:
    call, shapes = CALLS[name]
    tensors = {key: draw(*shape) for key, shape in shapes.items()}
    want = call(**{key: x.bfloat16() for key, x in tensors.items()})
    mixed = tensors | {"q": tensors["q"].bfloat16()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for given in (tensors, mixed):
            out = call(**given)
            assert out.dtype == torch.bfloat16
            assert torch.equal(out, want)
        wide = call(**{key: x.double() for key, x in tensors.items()})
        assert wide.dtype == torch.float64  # as in torch's own attention


def test_new_keys_and_angles_are_cast_to_what_the_cache_has() -> None:
    caches = [torch.zeros(2, 32, 2, 16, dtype=torch.bfloat16) for _ in range(4)]
    new, angles = draw(2, 1, 2, 16), draw(32, 8)
    tensors = {"q": new, "k": new, "v": new, "rotary_cos": angles, "rotary_sin": angles}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend_cache(**tensors, k_cache=caches[0], v_cache=caches[1])
    cast = {key: x.bfloat16() for key, x in tensors.items()}
    want = attend_cache(**cast, k_cache=caches[2], v_cache=caches[3])
    assert torch.equal(out, want)
    assert torch.equal(caches[0], caches[2])
    assert caches[1].any()


@pytest.mark.parametrize("which", ["k_cache", "v_cache"])
def test_a_cache_of_another_dtype_is_not_written_as_a_copy(which: str) -> None:
    new = draw(2, 1, 2, 16)
    tensors = dict.fromkeys("qkv", new)
    caches = {
        name: torch.zeros(2, 32, 2, 16, dtype=torch.bfloat16) for name in ("k_cache", "v_cache")
    }
    caches[which] = caches[which].float()
    text = f"(?s){which} must be bfloat16 where new keys .* autocast, got float32.*hint: `{which}"
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TypeError, match=text):
        attend_cache(**tensors, **caches)
    assert not any(x.any() for x in caches.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_a_graph_casts_likewise(name: str) -> None:
    call, shapes = CALLS[name]
    tensors = {key: draw(*shape) for key, shape in shapes.items()}

    def step(**tensors: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return call(**tensors)

    assert torch.equal(
        torch.compile(step, backend="aot_eager", fullgraph=True)(**tensors), step(**tensors)
    )
