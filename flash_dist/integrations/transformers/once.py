"""Computes results from tensors in the first layer, and caches them for the other layers.

A result is cached by the identity and version of the tensor, and dropped with the tensor. Reading
the tensor waits for the GPU. A tensor made under `torch.inference_mode` has no version, so every
layer reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch

from ...attention.arguments import is_symbolic
from ...attention.conversions import Conversions
from ...kernels.scores import MASKED
from ...masks import BlockMask
from ...masks.registry import is_traced
from ..additive import read_added
from .layer_mask import Segments, find_documents
from .refusals import refuse_constant, refuse_dtype, refuse_shape, refuse_tracing

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
Found = TypeVar("Found")

_found: Final[Conversions[Any]] = Conversions()


def find_packed(positions: Tensor, batch: int) -> Segments | None:
    """Return the documents of position_ids [batch or 1, seqlen]; None if no row has several."""
    return find_once(
        positions,
        ("documents", batch),
        lambda: find_documents(positions.to("cpu").expand(batch, -1)),
    )


def choose_longest(given: int | Tensor | None, cu_seqlens: Tensor) -> int | Tensor:
    """Return the length of the longest sequence: `given`, or computed if `given` is None.

    Reading a tensor on a GPU waits. In a graph, the tensor is not read, and the result is a tensor.
    """
    if given is not None and not isinstance(given, torch.Tensor):
        return given  # such as an int or a NumPy integer: the varlen function checks it
    if is_symbolic(cu_seqlens):  # in a graph: return a tensor, which the varlen function reads
        return cu_seqlens.diff().max() if given is None else given
    if given is not None:
        return find_once(given, "longest", lambda: int(given.item()))
    return find_once(cu_seqlens, "longest", lambda: int(cu_seqlens.to("cpu").diff().max()))


def is_added(mask: Tensor) -> bool:
    """Return whether a mask is added to the scores instead of being read as booleans.

    This applies to float masks that do more than mask keys, that need a gradient, or that must not
    be read because a graph or a trace would store the values.
    """
    if not mask.is_floating_point():
        return False
    if (mask.requires_grad and torch.is_grad_enabled()) or is_symbolic(mask) or is_traced():
        return True
    return find_once(mask, "added", lambda: read_added(mask.detach()) is None)


def cut_added(
    module: torch.nn.Module, name: str, numbers: Tensor, shape: tuple[int, int, int, int]
) -> Tensor:
    """Return a bias without the columns past the layer's last key.

    Raises:
        ValueError: Such a column does not mask its key, or must not be read because a graph or a
            trace would store the values.
    """
    behind = numbers[..., shape[-1] :]
    if behind.shape[-1] == 0:
        return numbers
    if is_symbolic(numbers) or is_traced() or bool((behind.detach() > MASKED).any()):
        refuse_shape(module, name, numbers.shape, shape)
    return numbers[..., : shape[-1]]


def read_dense(
    module: torch.nn.Module, mask: Tensor, shape: tuple[int, int, int, int]
) -> BlockMask:
    """Return the BlockMask for a caller's mask, [batch or 1, num_heads_q or 1, seqlen_q, seqlen_k].

    Masked columns past the layer's last key, as for a static cache, are cut off.

    Raises:
        TypeError: The mask has an integer dtype.
        ValueError: The mask was made for other numbers of queries or keys (a layer with a window
            caches only the last keys), or a graph or a trace would record its values.
    """
    if is_symbolic(mask):
        refuse_tracing()
    refuse_constant("attention_mask")

    def read() -> BlockMask:
        visible = mask.detach()
        if visible.is_floating_point():
            visible = visible > MASKED
        elif visible.dtype != torch.bool:
            refuse_dtype(module, visible.dtype)
        visible_keys, cut = visible[..., : shape[-1]], visible[..., shape[-1] :]
        if bool(cut.any()) or not _broadcasts(visible_keys.shape, shape):
            refuse_shape(module, "attention_mask", mask.shape, shape)
        return BlockMask.from_dense(visible_keys.expand(shape))

    return find_once(mask, ("mask", shape), read)


def _broadcasts(has: torch.Size, wants: tuple[int, ...]) -> bool:
    """Return whether torch could expand one shape to another."""
    pairs = zip(reversed(has), reversed(wants), strict=False)
    return len(has) <= len(wants) and all(x in {1, y} for x, y in pairs)


def find_once(source: Tensor, key: object, find: Callable[[], Found]) -> Found:
    """Return the cached result for a tensor's current values, or compute and cache it."""
    if source.is_inference():
        return find()
    found: Found = _found.find(source, (source._version, key), find)  # noqa: SLF001 - no public version counter
    return found
