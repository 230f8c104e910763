"""Masks of torch that change after conversion, with and without torch's version counter."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask

import flash_dist
from flash_dist.attention.conversions import convert_dense, convert_flex
from flash_dist.integrations.torch_sdpa.masks import read_mask

if TYPE_CHECKING:
    from collections.abc import Callable

    MaskMod = Callable[[Any, Any, Any, Any], Any]

Tensor = torch.Tensor
SHAPE = (1, 1, 256, 256)
IDS = torch.zeros(256, dtype=torch.int64)  # read as a global variable


def draw_ids() -> Tensor:
    return torch.arange(256) // 100


def by_closure(ids: Tensor) -> MaskMod:
    return lambda _b, _h, q, k: ids[q] == ids[k]


def by_default(ids: Tensor) -> MaskMod:
    def same(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor, ids: Tensor = ids) -> Tensor:
        return ids[q] == ids[k]

    return same


def by_partial(ids: Tensor) -> MaskMod:
    def same(given: dict[str, Tensor], _b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return given["ids"][q] == given["ids"][k]

    return functools.partial(same, {"ids": ids})


class Documents(torch.nn.Module):
    """A model that keeps its documents in a buffer."""

    ids: Tensor

    def __init__(self, ids: Tensor) -> None:
        super().__init__()
        self.register_buffer("ids", ids)

    def sees(self, _b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.ids[q] == self.ids[k]

    def mask_mod(self) -> MaskMod:
        return lambda b, h, q, k: self.sees(b, h, q, k)  # noqa: PLW0108 - torch takes no method


class Callable_:  # noqa: N801
    """A callable object with state."""

    def __init__(self, ids: Tensor) -> None:
        self.state = Documents(ids)

    def __call__(self, _b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return self.state.ids[q] == self.state.ids[k]


def by_method(ids: Tensor) -> MaskMod:
    return Documents(ids).mask_mod()


def by_joint(ids: Tensor) -> MaskMod:
    return and_masks(Documents(ids).sees, lambda _b, _h, q, k: q >= k)


def by_global(ids: Tensor) -> MaskMod:
    IDS.copy_(ids)
    return lambda _b, _h, q, k: IDS[q] == IDS[k]


WAYS = {
    "a closure": by_closure,
    "a default": by_default,
    "a partial": by_partial,
    "a method": by_method,
    "an object": Callable_,
    "masks joined": by_joint,
    "a global name": by_global,
}


def block(mask_mod: MaskMod) -> BlockMask:
    return create_block_mask(mask_mod, 1, 1, 256, 256, device="cpu")


@pytest.mark.parametrize("capture", WAYS.values(), ids=WAYS.keys())
def test_a_captured_tensor_that_changed_in_place_is_read_again(
    capture: Callable[[Tensor], MaskMod],
) -> None:
    ids = draw_ids()
    mask = block(capture(ids))
    first = convert_flex(mask)
    assert convert_flex(mask) is first
    (IDS if capture is by_global else ids)[50:] = 7
    second = convert_flex(mask)
    assert convert_flex(mask) is second
    want = flash_dist.BlockMask.from_flex(mask).visible(*SHAPE)
    assert torch.equal(second.visible(*SHAPE), want)
    assert not torch.equal(first.visible(*SHAPE), want)


def test_a_change_that_torch_does_not_count_is_read_after_a_refresh() -> None:
    ids = draw_ids()
    mask = block(by_closure(ids))
    first = convert_flex(mask)
    ids.data[50:] = 7
    assert convert_flex(mask) is first
    flash_dist.refresh_mask(mask)
    want = flash_dist.BlockMask.from_flex(mask).visible(*SHAPE)
    assert torch.equal(convert_flex(mask).visible(*SHAPE), want)
    assert not torch.equal(first.visible(*SHAPE), want)


@pytest.mark.parametrize("convert", [convert_dense, read_mask], ids=["ours", "torch's"])
def test_booleans_that_change_through_data_are_read_after_a_refresh(
    convert: Callable[[Tensor, tuple[int, int, int, int]], Any],
) -> None:
    seen = torch.ones(256, 256, dtype=torch.bool).tril()
    first = convert(seen, SHAPE)
    seen.data[:, 0] = False
    assert convert(seen, SHAPE) is first
    flash_dist.refresh_mask(seen)
    assert torch.equal(convert(seen, SHAPE).visible(*SHAPE)[0, 0], seen)


def test_a_captured_tensor_that_is_gone_is_looked_for_again() -> None:
    holder = Documents(draw_ids())
    mask = block(holder.mask_mod())
    first = convert_flex(mask)
    holder.ids = torch.zeros(256, dtype=torch.int64)
    assert convert_flex(mask) is not first


def test_a_mask_that_its_own_function_knows_is_freed() -> None:
    holder = Documents(draw_ids())
    mask = block(holder.mask_mod())
    holder.__dict__["mask"] = mask
    convert_flex(mask)
    gone = weakref.ref(holder)
    del holder, mask
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("given", [3, flash_dist.BlockMask.causal()], ids=["a number", "our own"])
def test_what_is_never_remembered_cannot_be_refreshed(given: Any) -> None:  # noqa: ANN401
    said = f"mask must be a tensor or a BlockMask of torch.*got .*{type(given).__name__}"
    with pytest.raises(TypeError, match=said):
        flash_dist.refresh_mask(given)
