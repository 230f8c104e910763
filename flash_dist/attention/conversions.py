"""Converts torch's masks to BlockMasks, cached until the original mask is freed or changes.

A conversion waits for the GPU and plans on the host, so it must not run in every call. torch counts
in-place changes of a tensor, but not those through `.data`, NumPy or DLPack.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from itertools import islice
from types import MethodType
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import torch

from ..errors import FlashDistError
from ..masks import BlockMask
from ..masks.registry import RECORDED, is_traced, outside_graphs

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator

    from torch.nn.attention import flex_attention

Tensor = torch.Tensor
Made = TypeVar("Made")

VERSIONS_KEPT: Final = 8  # maximum number of results per object; each batch may rewrite a tensor
MOST_HELD: Final = 1024  # maximum number of objects visited to find the tensors of a mask_mod
_GONE: Final = -1  # used instead of the version of a tensor that was freed


class Conversions(Generic[Made]):
    """Cache of results by source object. When the object is freed, its results are dropped."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[weakref.ref[Any], dict[Hashable, Made]]] = {}
        self._lock = threading.RLock()
        _all.append(self)

    @outside_graphs
    def find(self, source: object, key: Hashable, make: Callable[[], Made]) -> Made:
        """Return the result cached for an object, or make it.

        Args:
            source: The object, compared by identity.
            key: Describes the object's current state, such as its version.
            make: Returns the result. It may read a GPU, so it is not called in a graph capture.

        Raises:
            FlashDistError: The result is not cached, and a CUDA graph is being captured.
        """
        with self._lock:
            masks = self._masks_of(source)
            if key not in masks:
                _require_host()
                while len(masks) >= VERSIONS_KEPT:
                    del masks[next(iter(masks))]
                masks[key] = make()
            return masks[key]

    def forget(self, source: object) -> None:
        """Drop the results of an object, so that the next call makes them again."""
        with self._lock:
            known = self._made.get(id(source))
            if known is not None and known[0]() is source:
                known[1].clear()

    def _masks_of(self, source: object) -> dict[Hashable, Made]:
        number = id(source)
        known = self._made.get(number)
        if known is not None and known[0]() is source:
            return known[1]

        # Takes no lock, because garbage collection may call it at any point.
        def forget(dead: weakref.ref[Any]) -> None:
            if self._made.get(number, (None,))[0] is dead:
                self._made.pop(number, None)

        masks: dict[Hashable, Made] = {}
        self._made[number] = weakref.ref(source, forget), masks
        return masks


_all: Final[list[Conversions[Any]]] = []  # the caches of all modules
_CONVERSIONS: Final[Conversions[BlockMask]] = Conversions()
_held: Final[Conversions[list[weakref.ref[Tensor]]]] = Conversions()


def refresh_mask(mask: Tensor | flex_attention.BlockMask) -> None:
    """Make the next call convert a mask again, after a change that torch does not count.

    A mask of torch is read in the first call that uses it, and again after each in-place change
    that torch counts. torch does not count changes through `.data`, NumPy or DLPack, nor changes to
    tensors made under `torch.inference_mode`. It is not detected either if a variable that a
    mask_mod reads is assigned another object.

    A BlockMask of this package never changes: make a new one. The backward of an earlier call uses
    the mask of that call.

    Args:
        mask: The object that is passed to calls: a BlockMask of torch, a boolean or floating point
            `attn_mask`, or position ids.

    Raises:
        TypeError: mask is neither a tensor nor a BlockMask of torch.
    """
    if not isinstance(mask, torch.Tensor):
        _require_flex("mask", mask)
    for conversions in _all:
        conversions.forget(mask)


def convert_dense(mask: Tensor, shape: tuple[int, int, int, int]) -> BlockMask:
    """Return the BlockMask for booleans that broadcast to `shape`, the shape of the scores."""
    _require_eager("attn_mask", "BlockMask.from_dense(attn_mask)")
    return _find_dense(mask, shape)


@outside_graphs
def _find_dense(mask: Tensor, shape: tuple[int, int, int, int]) -> BlockMask:
    try:
        visible = mask.detach().expand(shape)
    except RuntimeError as error:
        message = (
            "attn_mask must broadcast to [batch, num_heads_q, seqlen_q, seqlen_k], "
            f"{list(shape)}, got shape {list(mask.shape)}"
        )
        raise ValueError(message) from error
    if visible.numel() == 0:  # no query or no key
        return BlockMask.full()
    if mask.is_inference():  # has no version counter, so a change cannot be detected
        _require_host()
        return BlockMask.from_dense(visible)
    return _CONVERSIONS.find(mask, (mask._version, shape), lambda: BlockMask.from_dense(visible))  # noqa: SLF001 - no public version counter


def convert_flex(block_mask: flex_attention.BlockMask) -> BlockMask:
    """Return the BlockMask of this package for a BlockMask of FlexAttention."""
    _require_eager("block_mask", "BlockMask.from_flex(block_mask)")
    _require_flex("block_mask", block_mask)
    return _find_flex(block_mask)


@outside_graphs
def _find_flex(block_mask: flex_attention.BlockMask) -> BlockMask:
    versions = _read_versions(block_mask)
    if _GONE in versions:
        refresh_mask(block_mask)
        versions = _read_versions(block_mask)
    return _CONVERSIONS.find(block_mask, versions, lambda: BlockMask.from_flex(block_mask))


def _read_versions(block_mask: flex_attention.BlockMask) -> tuple[int, ...]:
    """Return the version counters of the tensors that a BlockMask and its mask_mod hold."""
    held = _held.find(block_mask, None, lambda: [*map(weakref.ref, _list_held(block_mask))])
    return tuple(map(_read_version, held))


def _read_version(reference: weakref.ref[Tensor]) -> int:
    tensor = reference()
    if tensor is None:
        return _GONE
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001


def _require_flex(name: str, value: object) -> None:
    from torch.nn.attention import flex_attention as torch_flex  # noqa: PLC0415 - slow to import

    if isinstance(value, torch_flex.BlockMask):
        return
    kinds = "a BlockMask of flash_dist or"
    if name != "block_mask":
        kinds = "a tensor or a BlockMask"
    message = (
        f"{name} must be {kinds} of torch.nn.attention.flex_attention, got {type(value).__name__}"
    )
    raise TypeError(message)


def _list_held(block_mask: flex_attention.BlockMask) -> Iterator[Tensor]:
    """Yield the tensors that a BlockMask and its mask_mod hold."""
    waiting = deque(vars(block_mask).values())
    known: dict[int, object] = {}  # keeps objects alive, so that no other object gets the same id
    while waiting and len(known) < MOST_HELD:
        value = waiting.popleft()
        if id(value) in known:
            continue
        known[id(value)] = value
        if isinstance(value, torch.Tensor):
            yield value
        else:
            waiting.extend(_list_inside(value))


def _list_inside(value: Any) -> Iterable[Any]:  # noqa: ANN401
    """Return the objects that a function, a callable object or a collection holds."""
    if isinstance(value, (list, tuple)):
        return value[:MOST_HELD]
    if isinstance(value, dict):
        return islice(value.values(), MOST_HELD)
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if inspect.ismethod(value):
        return _list_captured(value.__func__, value.__self__)
    function = value if inspect.isfunction(value) else type(value).__call__
    if not inspect.isfunction(function) or isinstance(value, torch.nn.Module):
        return ()
    return _list_captured(function, value)


def _list_captured(function: Any, owner: object) -> list[Any]:  # noqa: ANN401
    """Return the objects that a Python function can read.

    These are its owner, defaults, captured variables and globals, and the fields that it names.
    """
    names = function.__code__.co_names
    found = [owner, *(function.__defaults__ or ()), function.__kwdefaults__]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a variable that is not assigned yet
            found.append(cell.cell_contents)
    if not (function.__module__ or "").startswith("torch."):
        found += [function.__globals__[name] for name in names if name in function.__globals__]
    inner = _list_fields(found, names)
    return [*found, *inner, *_list_fields(inner, names)]  # two levels, to find `self.state.lengths`


def _list_fields(owners: list[Any], names: tuple[str, ...]) -> list[Any]:
    found = []
    for owner in owners:
        found += [x[name] for x in _fields_of(owner) for name in names if name in x]
        methods = (inspect.getattr_static(type(owner), name, None) for name in names)
        found += [MethodType(x, owner) for x in methods if inspect.isfunction(x)]
    return found


def _fields_of(value: object) -> list[Mapping[str, Any]]:
    if isinstance(value, torch.nn.Module):
        return [vars(value), value._buffers, value._modules]  # noqa: SLF001 - masks need no parameters
    fields = getattr(value, "__dict__", None)
    return [fields] if isinstance(fields, Mapping) else []


def _require_eager(name: str, instead: str) -> None:
    if torch.compiler.is_compiling():
        message = (  # torch.compile shows the text of built-in exceptions only
            f"{name} must be a flash_dist.BlockMask under torch.compile"
            f"\n\nhint: make `{instead}` once outside and pass that"
        )
        raise TypeError(message)
    if is_traced():
        message = (
            f"torch.jit.trace must be given no {name}, got one: its values are read now, and the "
            f"trace would keep them for all calls\n\nhint: {RECORDED}"
        )
        raise TypeError(message)


def _require_host() -> None:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        message = "a mask cannot be converted while a CUDA graph is captured"
        raise FlashDistError(message, hint="make a flash_dist.BlockMask before and pass that")
