"""Calls to torch's allocator for a mask's buffer, with a fake GPU."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch

from flash_dist.masks import BlockMask, registry
from flash_dist.masks.registry import DevicePlan

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass
class Buffer:
    """Stub of a tensor on a GPU."""

    device: torch.device
    told: list[int] = field(default_factory=list)

    def record_stream(self, stream: int) -> None:
        self.told.append(stream)


class Gpus:
    """Stub of torch.cuda: current device, current stream of each device, and capture state."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.device, self.streams, self.capturing = 0, {0: 0, 1: 0}, False
        self.asked: list[str] = []
        patch.setattr(torch._C, "_cuda_getDevice", lambda: self.tell("device"), raising=False)
        patch.setattr(
            torch._C, "_cuda_getCurrentRawStream", lambda index: self.streams[index], raising=False
        )
        patch.setattr(torch.cuda, "current_stream", lambda: self.streams[self.device])
        patch.setattr(
            torch._C,
            "_cuda_isCurrentStreamCapturing",
            lambda: self.tell("capturing"),
            raising=False,
        )
        patch.setattr(torch.cuda, "device", self.switch)
        patch.setattr(registry, "_captured", {})

    def tell(self, name: str) -> Any:  # noqa: ANN401 - as torch does
        self.asked.append(name)
        return getattr(self, name)

    @contextmanager
    def switch(self, index: int) -> Iterator[None]:
        before, self.device = self.device, index
        yield
        self.device = before


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    return Gpus(monkeypatch)


def make_plan(index: int = 0) -> tuple[DevicePlan, Buffer]:
    buffer = Buffer(torch.device("cuda", index))
    parts: tuple[Any, Any] = None, buffer
    return DevicePlan(*parts, set()), buffer


def test_each_stream_is_told_once(gpus: Gpus) -> None:
    resident, buffer = make_plan()
    for stream in (0, 7, 0, 7, 9):
        gpus.streams[0] = stream
        resident.hold(0)
    assert buffer.told == [0, 7, 9]


def test_the_stream_is_that_of_the_buffers_gpu(gpus: Gpus) -> None:
    resident, buffer = make_plan(1)
    gpus.streams = {0: 5, 1: 6}
    resident.hold(1)
    resident.hold(1)
    assert buffer.told == [6]
    assert gpus.device == 0


def test_past_a_number_of_streams_they_are_told_again(gpus: Gpus) -> None:
    resident, buffer = make_plan()
    for stream in (*range(registry.MAX_STREAMS + 1), 0):
        gpus.streams[0] = stream
        resident.hold(0)
    assert buffer.told == [*range(registry.MAX_STREAMS + 1), 0]
    assert len(resident.streams) <= registry.MAX_STREAMS


def test_what_a_graph_is_captured_with_stays_also_on_a_stream_that_is_known(gpus: Gpus) -> None:
    resident, buffer = make_plan()
    gpus.streams[0] = 7
    resident.hold(0)
    assert not registry._captured
    gpus.capturing = True
    resident.hold(0)
    assert registry._captured == {id(buffer): resident}
    assert buffer.told == [7]


def test_of_the_default_stream_nothing_is_asked_once_it_is_known(gpus: Gpus) -> None:
    resident, buffer = make_plan(1)
    resident.hold(1)
    assert (buffer.told, gpus.asked) == ([0], ["device", "device", "capturing"])
    gpus.asked.clear()
    resident.hold(1)
    assert (buffer.told, gpus.asked) == ([0], [])
    gpus.streams[1] = 7
    resident.hold(1)
    assert (buffer.told, gpus.asked) == ([0, 7], ["device", "device", "capturing"])


def test_the_last_call_on_a_gpu_is_recalled_by_its_sizes(gpus: Gpus) -> None:
    mask, (resident, buffer) = BlockMask.documents([0, 0, 1]), make_plan()
    call = mask.handle, 0, (1, 3, 2, 16), 3
    assert registry.lookup_last(*call) is None
    registry.cache_last(*call, resident)
    gpus.streams[0] = 4
    assert registry.lookup_last(*call) is resident
    assert buffer.told == [4]
    for other in ((mask.handle, 1, *call[2:]), (*call[:2], (2, 3, 2, 16), 3), (*call[:3], 4)):
        assert registry.lookup_last(*other) is None
    registry.cache_last(*call[:3], 4, make_plan()[0])
    assert registry.lookup_last(*call) is None


def test_nothing_is_recalled_of_a_mask_that_was_dropped() -> None:
    mask, (resident, buffer) = BlockMask.documents([0, 0, 1]), make_plan()
    call, kept = (mask.handle, 0, (1, 3, 2, 16), 3), weakref.ref(buffer)
    registry.cache_last(*call, resident)
    del mask, resident, buffer
    gc.collect()
    assert kept() is None
    assert registry.lookup_last(*call) is None
    registry.cache_last(*call, make_plan()[0])
    assert registry.lookup_last(*call) is None
