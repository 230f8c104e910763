"""Calls on several streams, threads and GPUs: masks are shared, cached state is per device."""

from __future__ import annotations

import gc
from threading import Barrier, Thread
from typing import TYPE_CHECKING

import pytest
import torch

from flash_dist import BlockMask, flash_attn_func
from flash_dist.masks import registry
from flash_dist.masks.inputs import Shape
from flash_dist.masks.upload import POOLED_STREAMS

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
pytestmark = pytest.mark.gpu

LONG = 100_000_000  # cycles: tens of milliseconds
SHAPE = (1, 300, 4, 64)
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def make_mask() -> BlockMask:
    return BlockMask.block_causal([token // 50 for token in range(SHAPE[1])])


def draw(device: str = "cuda:0") -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, *SHAPE, generator=generator).bfloat16().to(device)).unbind()
    return q, k, v


def plan_of(mask: BlockMask, device: str = "cuda:0") -> registry.DevicePlan:
    shape = Shape(SHAPE[0], SHAPE[2], SHAPE[1], SHAPE[1])
    return registry.lookup(mask.handle, torch.device(device), shape)


def overwrite_free_blocks(elements: int) -> None:
    """Overwrite free blocks of a size on every stream that may have copied a mask."""
    for _ in range(POOLED_STREAMS):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.full((elements,), 2**30, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("calls_before", [0, 1, 2])
def test_a_dropped_mask_lives_until_a_stream_has_read_it(calls_before: int) -> None:
    q, k, v = draw()
    want = flash_attn_func(q, k, v, mask=make_mask())
    mask, side = make_mask(), torch.cuda.Stream()
    elements = plan_of(mask).data.numel()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(calls_before):
            flash_attn_func(q, k, v, mask=mask)
        torch.cuda._sleep(LONG)
        out = flash_attn_func(q, k, v, mask=mask)
    del mask
    gc.collect()
    overwrite_free_blocks(elements)
    torch.cuda.synchronize()
    assert torch.equal(out, want)


def test_the_streams_of_a_mask_are_those_it_was_used_on() -> None:
    q, k, v = draw()
    mask, sides = make_mask(), [torch.cuda.Stream() for _ in range(2)]
    want = flash_attn_func(q, k, v, mask=mask)
    torch.cuda.synchronize()
    for side in (*sides, *sides):
        with torch.cuda.stream(side):
            out = flash_attn_func(q, k, v, mask=mask)
        side.synchronize()
        assert torch.equal(out, want)
    streams = {0, *(side.cuda_stream for side in sides)}
    assert plan_of(mask).streams == streams


def test_a_graph_captured_on_a_stream_that_was_used_before_outlives_its_mask() -> None:
    q, k, v = draw()
    mask, side = make_mask(), torch.cuda.Stream()
    want = flash_attn_func(q, k, v, mask=mask)
    elements = plan_of(mask).data.numel()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        flash_attn_func(q, k, v, mask=mask)
        with torch.cuda.graph(graph, stream=side):
            out = flash_attn_func(q, k, v, mask=mask)
    del mask
    gc.collect()
    overwrite_free_blocks(elements)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)


def run_in_threads(works: list[Callable[[], None]]) -> None:
    failures: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised below, in the test's own thread
            failures.append(error)

    threads = [Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("masked", [False, True], ids=["band", "mask"])
@pytest.mark.parametrize("devices", [(0, 0), pytest.param((0, 1), marks=two_gpus)], ids=str)
def test_two_threads_on_streams_of_their_own_get_the_same_bits(
    devices: tuple[int, int], *, masked: bool
) -> None:
    mask, barrier = make_mask() if masked else None, Barrier(2)

    def train(device: int) -> list[Tensor]:
        q, k, v = (x.requires_grad_() for x in draw(f"cuda:{device}"))
        out = flash_attn_func(q, k, v, mask=mask)
        return [x.cpu() for x in (out.detach(), *torch.autograd.grad(out.sum(), (q, k, v)))]

    want = train(0)
    found: list[list[Tensor]] = []

    def work(device: int) -> None:
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            barrier.wait()
            found.extend(train(device) for _ in range(20))

    run_in_threads([lambda device=one: work(device) for one in devices])  # type: ignore[misc]
    assert len(found) == 40
    assert all(torch.equal(a, b) for one in found for a, b in zip(one, want, strict=True))


@two_gpus
def test_a_call_runs_on_the_current_stream_of_its_own_gpu() -> None:
    q, k, v = draw("cuda:1")
    mask, side = make_mask(), torch.cuda.Stream("cuda:1")
    want = flash_attn_func(q, k, v, mask=mask)
    torch.cuda.synchronize("cuda:1")
    with torch.cuda.stream(side):
        torch.cuda.set_device(0)  # cuda:1 keeps its stream
        out = flash_attn_func(q, k, v, mask=mask)
        assert torch.cuda.current_device() == 0
    side.synchronize()
    assert torch.equal(out, want)
    assert plan_of(mask, "cuda:1").streams == {0, side.cuda_stream}


@two_gpus
def test_each_gpu_has_a_buffer_and_streams_of_its_own() -> None:
    mask = make_mask()
    for device in ("cuda:0", "cuda:1"):
        flash_attn_func(*draw(device), mask=mask)
    first, second = plan_of(mask), plan_of(mask, "cuda:1")
    assert (first.data.device.index, second.data.device.index) == (0, 1)
    assert first.plan is second.plan
    assert first.streams is not second.streams
