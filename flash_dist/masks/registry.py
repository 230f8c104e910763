"""Finds a mask, and its tensors on the device of a call, by the mask's handle.

A compiled graph stores numbers and tensors, but no objects. It refers to a mask by its handle, an
int that is unique in the process. Work that needs the object (the plan, the lock, the copy to a
device) is done here, called from a registered operator and never from traced code.

A mask's tensors are made once per device and shape, on first use, and freed with the mask. The
MAX_CACHED masks that compiled graphs used most recently stay alive without other references,
because the backward of a graph has only the handle. Tensors that a CUDA graph has captured are
never freed, since the graph may be replayed at any time.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

import torch

from ..errors import FlashDistError
from .inputs import complain
from .upload import upload

if TYPE_CHECKING:
    from collections.abc import Callable

    from .inputs import Shape, Sizes
    from .plan import MaskPlan

Tensor = torch.Tensor
Key = TypeVar("Key")
Value = TypeVar("Value")
Function = TypeVar("Function", bound="Callable[..., Any]")

MAX_CACHED: Final = 32  # masks kept alive for compiled graphs until their backward
MAX_SHAPES: Final = 32  # plans cached per mask and device
DEFAULT_STREAM: Final = 0  # CUDA's legacy stream, which no graph can be captured on
MAX_STREAMS: Final = 256  # maximum size of a buffer's set of streams, which is then cleared
FIRST_HANDLE: Final = 2  # torch.compile specializes on 0 and 1
RECORDED: Final = (  # hint for graphs that must not store a handle
    "`BlockMask.full`, `causal` and `sliding_window` are bands, recorded as numbers; an "
    "`IntervalMask` that is made inside is recorded with its tensors"
)


def is_traced() -> bool:
    """Return whether torch.jit.trace is recording, possibly for another process."""
    return torch._C._get_tracing_state() is not None  # noqa: SLF001 - the public name has no type


def outside_graphs(function: Function) -> Function:
    """Exclude from torch.compile a function that makes or plans a mask on the host.

    A call that torch.compile traces raises TypeError. Dynamo is disabled inside of the function.
    Otherwise, after a graph break, it would compile each callee separately for each shape, and
    Inductor cannot compile some operations of the callees.
    """
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:  # noqa: ANN401
        if torch.compiler.is_dynamo_compiling():
            raise complain(
                TypeError,
                "a BlockMask must be made before torch.compile traces its use, got one made inside",
                "make it once outside and pass it",
            )
        dynamo: Any = sys.modules.get("torch._dynamo")  # None: nothing was compiled yet
        if dynamo is None:
            return function(*args, **options)
        if not disabled:
            disabled.append(dynamo.disable(function))
        return disabled[0](*args, **options)

    return call  # type: ignore[return-value]


def lookup_or_make(
    cached: OrderedDict[Key, Value], key: Key, make: Callable[[], Value], most: int
) -> Value:
    """Return the value cached for a key, or make and cache it.

    If more than `most` values are cached, the least recently used one is dropped.
    """
    if key not in cached:
        cached[key] = make()
    cached.move_to_end(key)
    while len(cached) > most:
        cached.popitem(last=False)
    return cached[key]


class Mask(Protocol):
    """The methods of a `BlockMask` that the registry calls."""

    @property
    def sizes(self) -> Sizes:
        """The sizes that the mask was made for."""

    def plan(self, batch: int, num_heads_q: int, seqlen_q: int, seqlen_k: int) -> MaskPlan:
        """Return the plan for calls of this shape."""

    def visible(self, batch: int, num_heads_q: int, seqlen_q: int, seqlen_k: int) -> Tensor:
        """Return booleans from the definition of the mask, on the CPU."""


class DevicePlan(NamedTuple):
    """A mask's plan, and its buffer on one device."""

    plan: MaskPlan
    data: Tensor
    streams: set[int]  # cudaStream_t of each stream that was recorded with the allocator

    def hold(self, index: int) -> None:
        """Keep the buffer's memory from being reused before the current stream has read it.

        torch's allocator records a stream until the buffer is freed, so once per stream is enough.
        If the stream is being captured, the buffer is never freed.

        Args:
            index: Index of the GPU.
        """
        stream = torch._C._cuda_getCurrentRawStream(index)  # noqa: SLF001 - C only, like those below
        if stream == DEFAULT_STREAM and stream in self.streams:
            return
        if torch._C._cuda_getDevice() != index:  # noqa: SLF001
            with torch.cuda.device(index):
                self.hold(index)
            return
        if stream not in self.streams:
            self.data.record_stream(torch.cuda.current_stream())
            if len(self.streams) >= MAX_STREAMS:
                self.streams.clear()
            self.streams.add(stream)
        if torch._C._cuda_isCurrentStreamCapturing():  # noqa: SLF001
            _captured[id(self.data)] = self


class _DeviceCache:
    """The plans of one mask on one device, by shape."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.plans: OrderedDict[Shape, DevicePlan] = OrderedDict()

    def lookup(self, mask: Mask, device: torch.device, shape: Shape) -> DevicePlan:
        make = functools.partial(self._make, mask, device, shape)
        with self.lock:
            return lookup_or_make(self.plans, shape, make, MAX_SHAPES)

    def _make(self, mask: Mask, device: torch.device, shape: Shape) -> DevicePlan:
        plan = mask.plan(*shape)
        for known in self.plans.values():
            if known.plan is plan:  # another shape, different only in a broadcast axis
                return known
        return DevicePlan(plan, upload(plan.packed, device), set())


class _Entry:
    """A weak reference to a mask, and the mask's tensors on devices."""

    def __init__(self, mask: Mask) -> None:
        self.mask = weakref.ref(mask)
        self.caches: dict[torch.device, _DeviceCache] = {}
        self.last: dict[int, tuple[tuple[int, ...], int, DevicePlan]] = {}  # by GPU index


_entries: dict[int, _Entry] = {}
_handles = itertools.count(FIRST_HANDLE)
_cached: OrderedDict[int, Mask] = OrderedDict()
_cached_lock = threading.Lock()
_captured: dict[int, DevicePlan] = {}  # by id of the buffer


def register(mask: Mask) -> int:
    """Register a new mask, and return its handle."""
    handle = next(_handles)
    _entries[handle] = _Entry(mask)
    weakref.finalize(mask, _entries.pop, handle, None)
    return handle


def find(handle: int) -> Mask:
    """Return a mask by its handle.

    Raises:
        FlashDistError: The mask no longer exists.
    """
    return _find(handle)[1]


def cache(handle: int) -> None:
    """Keep a mask alive until MAX_CACHED other masks have been cached."""
    mask = find(handle)
    with _cached_lock:
        _cached[handle] = mask
        _cached.move_to_end(handle)
        dropped = _cached.popitem(last=False) if len(_cached) > MAX_CACHED else None
    del dropped  # after the lock is released, as this frees tensors


def lookup(handle: int, device: torch.device, shape: Shape) -> DevicePlan:
    """Return a mask's plan for calls of one shape.

    On a GPU, it is held for the device's current stream, see `DevicePlan.hold`.
    """
    entry, mask = _find(handle)
    cache_of_device = entry.caches.get(device) or entry.caches.setdefault(device, _DeviceCache())
    found = cache_of_device.lookup(mask, device, shape)
    if device.type == "cuda":
        found.hold(device.index)
    return found


def lookup_last(
    handle: int, index: int, sizes_q: tuple[int, ...], seqlen_k: int
) -> DevicePlan | None:
    """Return the plan of the mask's last call on a GPU, held for the current stream.

    Return None if that call had another `sizes_q` (shape of q) or seqlen_k. `lookup` takes several
    times as long, and most layers of a model have the same mask and sizes.
    """
    entry = _entries.get(handle)
    last = entry.last.get(index) if entry is not None else None
    if last is None or last[0] != sizes_q or last[1] != seqlen_k:
        return None
    last[2].hold(index)
    return last[2]


def cache_last(
    handle: int, index: int, sizes_q: tuple[int, ...], seqlen_k: int, found: DevicePlan
) -> None:
    """Store the result of `lookup` for `lookup_last`."""
    entry = _entries.get(handle)
    if entry is not None:
        entry.last[index] = sizes_q, seqlen_k, found


def _find(handle: int) -> tuple[_Entry, Mask]:
    entry = _entries.get(handle)
    mask = entry.mask() if entry is not None else None
    if entry is None or mask is None:
        message = (
            "the BlockMask of a compiled function must live until its backward, got one that was "
            f"dropped after {MAX_CACHED} other masks were used"
        )
        raise FlashDistError(message, hint="keep a reference to the mask until `backward` is done")
    return entry, mask
