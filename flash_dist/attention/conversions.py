"""BlockMasks made of other libraries' masks, remembered as long as those live.

Making one waits for the GPU and plans on the host, so that it must not happen in every call.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import torch

from ..errors import FlashDistError
from ..masks import BlockMask
from ..masks.registry import RECORDED, is_traced

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from torch.nn.attention import flex_attention

Tensor = torch.Tensor
Made = TypeVar("Made")

VERSIONS_KEPT: Final = 8  # per object: a tensor that is filled anew for every batch


class Conversions(Generic[Made]):
    """What was made of each object, by identity; gone when the object is."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[weakref.ref[Any], dict[Hashable, Made]]] = {}
        self._lock = threading.RLock()

    def find(self, source: object, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return what was made of an object in this state, or make it."""
        with self._lock:
            masks = self._masks_of(source)
            if key not in masks:
                _require_host()
                while len(masks) >= VERSIONS_KEPT:
                    del masks[next(iter(masks))]
                masks[key] = make()
            return masks[key]

    def _masks_of(self, source: object) -> dict[Hashable, Made]:
        number = id(source)
        known = self._made.get(number)
        if known is not None and known[0]() is source:
            return known[1]

        def forget(dead: weakref.ref[Any]) -> None:  # without the lock: it may run anywhere
            if self._made.get(number, (None,))[0] is dead:
                self._made.pop(number, None)

        masks: dict[Hashable, Made] = {}
        self._made[number] = weakref.ref(source, forget), masks
        return masks


_CONVERSIONS: Final[Conversions[BlockMask]] = Conversions()


def convert_dense(mask: Tensor, shape: tuple[int, int, int, int]) -> BlockMask:
    """Return the mask of booleans that broadcast to [batch, num_heads_q, seqlen_q, seqlen_k]."""
    _require_eager("attn_mask", "BlockMask.from_dense(attn_mask)")
    try:
        seen = mask.detach().expand(shape)
    except RuntimeError as error:
        message = (
            "attn_mask must broadcast to [batch, num_heads_q, seqlen_q, seqlen_k], "
            f"{list(shape)}, got shape {list(mask.shape)}"
        )
        raise ValueError(message) from error
    if seen.numel() == 0:  # hides nothing: there is no query or no key
        return BlockMask.full()
    if mask.is_inference():  # has no version: it may have changed since
        _require_host()
        return BlockMask.from_dense(seen)
    return _CONVERSIONS.find(mask, (mask._version, shape), lambda: BlockMask.from_dense(seen))  # noqa: SLF001 - as public as a version gets


def convert_flex(block_mask: flex_attention.BlockMask) -> BlockMask:
    """Return the mask of FlexAttention's BlockMask."""
    _require_eager("block_mask", "BlockMask.from_flex(block_mask)")
    from torch.nn.attention import flex_attention as torch_flex  # noqa: PLC0415 - slow to import

    if not isinstance(block_mask, torch_flex.BlockMask):
        message = (
            "block_mask must be a BlockMask of flash_dist or of torch.nn.attention.flex_attention, "
            f"got {type(block_mask).__name__}"
        )
        raise TypeError(message)
    return _CONVERSIONS.find(block_mask, None, lambda: BlockMask.from_flex(block_mask))


def _require_eager(name: str, instead: str) -> None:
    if torch.compiler.is_compiling():
        message = (  # torch.compile shows the text of built-in exceptions only
            f"{name} must be a flash_dist.BlockMask under torch.compile"
            f"\n\nhint: make `{instead}` once outside and pass that"
        )
        raise TypeError(message)
    if is_traced():
        message = (
            f"torch.jit.trace must be given no {name}, got one: what it says is read here, and the "
            f"trace would keep it for all calls\n\nhint: {RECORDED}"
        )
        raise TypeError(message)


def _require_host() -> None:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        message = "a mask cannot be converted while a CUDA graph is captured"
        raise FlashDistError(message, hint="make a flash_dist.BlockMask before and pass that")
