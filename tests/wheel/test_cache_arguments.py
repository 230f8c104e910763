"""Cached facts of a call on a cache: they hide no refusal, and keep nothing alive."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_dist import flash_attn_with_kvcache, flash_mla_with_kvcache
from flash_dist.attention.decoding import cache_checks, layouts
from flash_dist.attention.decoding.cache_checks import KEPT
from flash_dist.errors import FlashDistError

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
Arguments = dict[str, Any]


def arguments() -> Arguments:
    """Return the arguments of a call that appends to pages and rotates."""
    draw = torch.Generator().manual_seed(0)
    return {
        "q": torch.randn(2, 1, 4, 16, generator=draw),
        "k_cache": torch.randn(8, 16, 2, 16, generator=draw),
        "v_cache": torch.randn(8, 16, 2, 16, generator=draw),
        "k": torch.randn(2, 1, 2, 16, generator=draw),
        "v": torch.randn(2, 1, 2, 16, generator=draw),
        "rotary_cos": torch.randn(32, 8, generator=draw),
        "rotary_sin": torch.randn(32, 8, generator=draw),
        "cache_seqlens": torch.tensor([3, 20], dtype=torch.int32),
        "block_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
    }


def latent_arguments() -> Arguments:
    draw = torch.Generator().manual_seed(0)
    return {
        "q": torch.randn(2, 1, 4, 32, generator=draw),
        "k_cache": torch.randn(8, 16, 1, 32, generator=draw),
        "block_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        "cache_seqlens": torch.tensor([3, 20], dtype=torch.int32),
        "head_dim_v": 16,
    }


def spread(x: Tensor) -> Tensor:
    """Return the same shape and values with other strides."""
    return x.repeat_interleave(2, -1)[..., ::2]


CHANGES: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "dtype of q": ("q", Tensor.double, "q and k_cache must have the same dtype"),
    "dtype of k_cache": ("k_cache", Tensor.double, "q and k_cache must have the same dtype"),
    "dtype of v": ("v", Tensor.double, "v must have shape"),
    "dtype of angles": ("rotary_sin", Tensor.double, "q and rotary_sin must have the same dtype"),
    "dtype of lengths": ("cache_seqlens", Tensor.long, "cache_seqlens must be int32"),
    "dtype of pages": ("block_table", Tensor.long, "block_table must be int32"),
    "device of q": ("q", lambda x: x.to("meta"), "q must be on a CUDA device or the CPU"),
    "device of v_cache": ("v_cache", lambda x: x.to("meta"), "must be on the same device"),
    "device of k": ("k", lambda x: x.to("meta"), "k must have shape"),
    "device of lengths": ("cache_seqlens", lambda x: x.to("meta"), "must be on the same device"),
    "strides of lengths": ("cache_seqlens", spread, "cache_seqlens must be contiguous"),
    "strides of pages": ("block_table", spread, "block_table must be contiguous"),
    "heads of q": ("q", lambda x: x[:, :, :3], "num_heads_kv must divide num_heads_q"),
    "rows of k": ("k", lambda x: x[:1], "k must have shape"),
    "batch of pages": ("block_table", lambda x: x[:1], "block_table must have shape"),
    "keys of a page": ("k_cache", lambda x: x[:, :8], "must have the same shape"),
    "no k": ("k", lambda _: None, "k, v and cache_seqlens must be given together"),
    "no lengths": ("cache_seqlens", lambda _: None, "k, v and cache_seqlens must be given"),
    "no angles": ("rotary_cos", lambda _: None, "must be given together, with k and v"),
    "no q": ("q", lambda _: None, "q must be a torch.Tensor, got NoneType"),
    "no v_cache": ("v_cache", lambda _: None, "v_cache must be a torch.Tensor, got NoneType"),
    "a list": ("block_table", Tensor.tolist, "block_table must be a torch.Tensor, got list"),
    "an array": ("k", Tensor.numpy, "k must be a torch.Tensor, got ndarray"),
    "sparse": ("q", Tensor.to_sparse, "q must be a dense tensor, got layout"),
    "nested": (
        "v",
        lambda x: torch.nested.nested_tensor(list(x)),
        "v must be a dense tensor, got a nested one",
    ),
    "splits": ("num_splits", lambda _: True, "num_splits must be a whole number"),
    "a flag that equals one": ("causal", lambda _: 1, "causal must be True or False, got int"),
    "a scale that equals one": ("softmax_scale", lambda _: True, "softmax_scale must be a float"),
    "a window that equals one": ("window_size", lambda _: (-1.0, -1.0), "window_size must be two"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(("name", "change", "message"), CHANGES.values(), ids=CHANGES)
def test_what_was_served_is_refused_once_a_thing_of_it_is_another(
    name: str, change: Callable[[Any], Any], message: str
) -> None:
    served = arguments()
    first = flash_attn_with_kvcache(**served)
    changed = served | {name: change(served.get(name))}
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match=message):
            flash_attn_with_kvcache(**changed)
        assert torch.equal(flash_attn_with_kvcache(**served), first)


LATENT_CHANGES: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "dtype": ("k_cache", Tensor.double, "q and k_cache must have the same dtype"),
    "device": ("k_cache", lambda x: x.to("meta"), "must be on the same device"),
    "lengths": ("cache_seqlens", Tensor.long, "cache_seqlens must be int32"),
    "pages": ("block_table", lambda x: x[:1], "block_table must have shape"),
    "columns": ("head_dim_v", lambda _: 12, "head_dim_v must be a multiple of 8"),
    "columns that equal": ("head_dim_v", lambda _: 16.0, "head_dim_v must be an int, got float"),
    "flag": ("causal", lambda _: 0, "causal must be True or False, got int"),
    "other flag": ("is_fp8_kvcache", lambda _: True, "is_fp8_kvcache must be False"),
    "sparse": ("q", Tensor.to_sparse, "q must be a dense tensor, got layout"),
    "no keys": ("k_cache", lambda _: None, "k_cache must be a torch.Tensor, got NoneType"),
}


@pytest.mark.parametrize(("name", "change", "message"), LATENT_CHANGES.values(), ids=LATENT_CHANGES)
def test_latent_keys_that_were_served_are_refused_likewise(
    name: str, change: Callable[[Any], Any], message: str
) -> None:
    served = latent_arguments()
    first = flash_mla_with_kvcache(**served)[0]
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match=message):
            flash_mla_with_kvcache(**served | {name: change(served.get(name))})
        assert torch.equal(flash_mla_with_kvcache(**served)[0], first)


def test_entries_are_for_each_of_the_batch_without_a_table() -> None:
    draw = arguments()
    cache = {name: draw[name][:1] for name in ("k_cache", "v_cache")}
    picked = torch.zeros(2, dtype=torch.int32)
    flash_attn_with_kvcache(draw["q"], **cache, cache_batch_idx=picked)
    with pytest.raises(ValueError, match="k_cache must have an entry for each of 2"):
        flash_attn_with_kvcache(draw["q"], **cache)
    with pytest.raises(ValueError, match="cache_batch_idx must be None with block_table"):
        flash_attn_with_kvcache(**draw, cache_batch_idx=picked)


def test_numbers_are_read_by_every_call() -> None:
    served = arguments()
    flash_attn_with_kvcache(**served)
    served["cache_seqlens"][1] = 32
    with pytest.raises(ValueError, match=r"cache_seqlens\[1\] must be from 0 to 31"):
        flash_attn_with_kvcache(**served)
    flash_attn_with_kvcache(**served | {"cache_seqlens": 3})
    for lengths in (33, -1):
        with pytest.raises(ValueError, match=f"cache_seqlens must be from 0 to .*, got {lengths}"):
            flash_attn_with_kvcache(**served | {"cache_seqlens": lengths})


def test_layouts_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[object] = []
    check_tensors = layouts.check_tensors

    def noted(*seen: Any, named: bool) -> bool:  # noqa: ANN401 - layouts
        checked.append(seen)
        return check_tensors(*seen, named=named)

    monkeypatch.setattr(cache_checks, "check_tensors", noted)
    cache_checks._check_once.cache_clear()
    for _ in range(3):
        flash_attn_with_kvcache(**arguments())
    assert len(checked) == 1


def test_no_more_is_known_than_so_many_layouts_and_no_tensor_is_kept() -> None:
    for known in (cache_checks._check_once, cache_checks._check_latent_once):
        assert known.cache_info().maxsize == KEPT
    served = arguments()
    flash_attn_with_kvcache(**served)
    seen = [weakref.ref(x) for x in served.values()]
    served.clear()
    gc.collect()
    assert [one() for one in seen] == [None] * len(seen)


def test_a_tensor_that_only_stands_for_one_is_not_taken_for_one_that_is_known() -> None:
    served = arguments()
    flash_attn_with_kvcache(**served)
    known = cache_checks._check_once.cache_info().currsize
    with FakeTensorMode() as mode:
        fake: Arguments = {name: mode.from_tensor(x) for name, x in served.items()}
        out = flash_attn_with_kvcache(**fake)
    assert out.shape == served["q"].shape
    assert type(out) is not Tensor
    assert cache_checks._check_once.cache_info().currsize == known


def test_a_parameter_is_a_tensor_where_no_gradient_is_wanted() -> None:
    served = arguments()
    wanted = flash_attn_with_kvcache(**served)
    sinks = torch.zeros(4, requires_grad=True)
    with torch.no_grad():
        for name in ("q", "k_cache", "k", "rotary_cos"):
            changed = served | {name: torch.nn.Parameter(served[name])}
            assert torch.equal(flash_attn_with_kvcache(**changed), wanted)
        assert not flash_attn_with_kvcache(**served, learnable_sink=sinks).requires_grad
    with pytest.raises(FlashDistError, match="no_grad"):
        flash_attn_with_kvcache(**served, learnable_sink=sinks)


@pytest.mark.parametrize("enabled", [False, True])
def test_a_call_leaves_the_mode_of_gradients_as_it_was(*, enabled: bool) -> None:
    served = arguments()
    wrong: Arguments = {name: served[name] for name in ("q", "k_cache", "v_cache")}
    wrong["block_table"] = torch.full((2, 2), 99, dtype=torch.int32)
    with torch.set_grad_enabled(enabled):
        flash_attn_with_kvcache(**served)
        assert torch.is_grad_enabled() == enabled
        with pytest.raises(ValueError, match="block_table"):
            flash_attn_with_kvcache(**wrong)  # on the CPU the operator itself checks
        assert torch.is_grad_enabled() == enabled
    with torch.inference_mode():
        flash_attn_with_kvcache(**served)
        assert torch.is_inference_mode_enabled()


def test_a_cache_that_wants_gradients_is_written_to_without_them_alone() -> None:
    served = arguments()
    served["k_cache"].requires_grad_()
    served["v_cache"].requires_grad_()
    with pytest.raises(FlashDistError, match="no_grad"):
        flash_attn_with_kvcache(**served)
    with torch.no_grad():
        flash_attn_with_kvcache(**served)
    assert torch.equal(served["v_cache"][0, 3], served["v"][0, 0])


def test_threads_that_know_nothing_yet_agree() -> None:
    cache_checks._check_once.cache_clear()
    served = arguments()
    wanted = flash_attn_with_kvcache(**served)
    cache_checks._check_once.cache_clear()
    problems: list[str] = []

    def run(*, fits: bool) -> None:
        mine = {name: x.clone() for name, x in served.items()}
        if not fits:
            mine["q"] = mine["q"].double()
        for _ in range(20):
            try:
                same = torch.equal(flash_attn_with_kvcache(**mine), wanted)
            except TypeError:
                same = not fits
            if not same:
                problems.append(f"fits: {fits}")

    threads = [threading.Thread(target=run, kwargs={"fits": i % 2 == 0}) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
