"""Single queries, as for generated tokens: their kernels, keys and bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flash_dist import flash_attn_with_kvcache, match_kvcache
from flash_dist.integrations.transformers import attention, register, single
from tests.integrations.transformers.generation import LEFT, generate
from tests.integrations.transformers.models import DECODERS, DEVICE

Tensor = torch.Tensor

NAME = register()


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return the examined intervals."""
    intervals: list[Tensor] = []
    for name in ("_split", "_pack"):
        look = getattr(single, name)

        def noted(interval: Tensor, *sizes: int, look: Any = look) -> tuple[Tensor, Tensor]:  # noqa: ANN401
            intervals.append(interval)
            return look(interval, *sizes)  # type: ignore[no-any-return]

        monkeypatch.setattr(single, name, noted)
    return intervals


def test_what_one_query_sees_is_looked_into_once_a_forward(found: list[Tensor]) -> None:
    generate(DECODERS["llama"], NAME, LEFT)
    assert len(found) == 9  # nine of ten steps have a single query


def one_query(**options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # noqa: ANN401
    """Return query, key, value of a static cache, and the valid keys."""
    generator = torch.Generator().manual_seed(4)
    query = torch.randn(2, 4, 1, 16, generator=generator).to(DEVICE, **options)
    key, value = torch.randn(2, 2, 2, 8, 16, generator=generator).to(DEVICE, **options)
    interval = torch.tensor([[0, 5], [2, 8]], dtype=torch.int32, device=DEVICE).view(2, 1, 2, 1)
    return query, key, value, interval


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])  # a GPU reads bf16 as a cache
def test_an_interval_that_changes_in_place_is_looked_into_anew(
    monkeypatch: pytest.MonkeyPatch, found: list[Tensor], dtype: torch.dtype, *, recorded: bool
) -> None:
    if recorded:  # as in a CUDA graph: every replay must look again
        monkeypatch.setattr(single, "_is_repeated", lambda _: True)
    query, key, value, interval = one_query(dtype=dtype)
    module = torch.nn.Module()

    def attend() -> Tensor:
        out, _ = attention.attention_forward(module, query, key, value, interval)
        return out

    want = attend()
    assert torch.equal(attend(), want)
    assert len(found) == 1 + recorded
    interval[0, 0, 1, 0] = 3
    got = attend()
    assert len(found) == 2 + recorded
    assert torch.equal(got[1], want[1])
    assert not torch.equal(got[0], want[0])


def test_one_query_has_the_same_bits_alone_and_behind_padding() -> None:
    query, key, value, interval = one_query(dtype=torch.bfloat16)
    module = torch.nn.Module()
    together, _ = attention.attention_forward(module, query, key, value, interval)
    for b, (first, end) in enumerate(interval.view(2, 2).tolist()):
        q, k, v = query[b : b + 1], key[b : b + 1, :, first:end], value[b : b + 1, :, first:end]
        alone, _ = attention.attention_forward(module, q, k, v, None)
        assert torch.equal(alone[0], together[b])


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"s_aux": torch.tensor([1, 0, -1, 2])}])
def test_one_query_with_gradients_is_what_it_is_to_a_cache(options: dict[str, Any]) -> None:
    query, key, value, interval = one_query(dtype=torch.bfloat16)
    options = {n: x.to(query) if isinstance(x, Tensor) else x for n, x in options.items()}
    module = torch.nn.Module()
    seen = interval.new_tensor([[0, 8], [8, 8]]).view(2, 1, 2, 1)  # all keys, no keys
    for mask in (interval, seen):
        want, _ = attention.attention_forward(module, query, key, value, mask, **options)
        q, k, v = (x.detach().requires_grad_() for x in (query, key, value))
        got, _ = attention.attention_forward(module, q, k, v, mask, **options)
        torch.testing.assert_close(got, want, atol=1e-2, rtol=1e-2)
        assert torch.autograd.grad(got.float().sum(), v)[0].abs().sum() > 0
    assert not want[1].any()


def test_one_query_with_gradients_has_the_bits_of_a_cache_on_request() -> None:
    query, key, value, interval = one_query(dtype=torch.bfloat16)
    call = key.requires_grad_(), value, interval
    with match_kvcache():
        got, _ = attention.attention_forward(torch.nn.Module(), query, *call)
        with torch.no_grad():
            want, _ = attention.attention_forward(torch.nn.Module(), query, *call)
        with pytest.raises(ValueError, match="match_kvcache must be False for sinks of one query"):
            attention.attention_forward(torch.nn.Module(), query, *call, s_aux=query[0, :, 0, 0])
    assert torch.equal(got, want)


@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_tokens_that_are_generated_read_caches_with_their_scores(
    monkeypatch: pytest.MonkeyPatch, name: str, cache: str | None
) -> None:
    calls: list[set[str]] = []

    def noted(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:  # noqa: ANN401
        calls.append(options.keys() - {"window_size", "softmax_scale"})
        out: Tensor = flash_attn_with_kvcache(q, k, v, **options)
        return out

    for module in (attention, single):
        monkeypatch.setattr(module, "flash_attn_with_kvcache", noted)
    padding = torch.ones_like(LEFT) if cache is None else LEFT
    generate(DECODERS[name], NAME, padding, torch.bfloat16, cache_implementation=cache)
    where = {"cache_seqlens", "cache_leftpad"}
    scores = {"gemma2": {"softcap"}, "gpt_oss": {"learnable_sink"}}.get(name, set())
    assert len(calls) == 9 * DECODERS[name].options["num_hidden_layers"]
    assert all(call - where == scores for call in calls)
    assert cache is None or any(where <= call for call in calls)  # windows may show all keys
