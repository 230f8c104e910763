"""Copies a tensor to a GPU such that any stream may read it, whatever the caller is doing there.

A mask's tensors stay for later calls, but their first use may come at any time: while a CUDA graph
is captured (nothing may be waited for, and the copy would be part of the graph), while torch routes
the allocations of this thread or stream into a graph's own memory, or in inference mode. All of it
is settings of a thread or a stream. So the copy is made by a new thread on an idle stream, and
waited for: the host waits, no stream does. When the call returns, there is no such thread any more.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import torch

from ..errors import FlashDistError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Tensor = torch.Tensor
Result = TypeVar("Result")

POOLED_STREAMS: Final = 32  # size of torch's stream pool, which it hands out in turn
RELAXED: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
THREADS: Final = Path("/proc/self/task")
LONGEST_END: Final = 5.0  # seconds to wait for a thread to end, which takes milliseconds


def upload(host: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a CPU tensor that is complete, and that no other stream need wait for."""
    if device.type != "cuda":
        return host.to(device)
    return in_a_thread(partial(_copy, host, device))


def in_a_thread(work: Callable[[], Result]) -> Result:
    """Return what work returns in a new thread, which has ended by then."""
    numbers: list[int] = []

    def numbered() -> Result:
        numbers.append(threading.get_native_id())
        return work()

    try:
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="flash_dist_upload") as thread:
            return thread.submit(numbered).result()
    finally:
        for number in numbers:
            _await_end(number)


def _await_end(number: int) -> None:
    """Wait for the end of a thread that Python has joined.

    NOTE: before Python 3.13 a join returns while the thread still frees what libraries keep for it.
    A process that exits meanwhile takes these libraries down under it.
    """
    latest = time.monotonic() + LONGEST_END
    while (THREADS / str(number)).exists() and time.monotonic() < latest:
        time.sleep(1e-5)


def _copy(host: Tensor, device: torch.device) -> Tensor:
    with (
        torch.cuda.device(device),
        _unaffected_by_captures(),
        torch.cuda.stream(_idle_stream(device)),
    ):
        return host.to(device)  # returns when the copy is complete


@contextlib.contextmanager
def _unaffected_by_captures() -> Iterator[None]:
    """Allow this thread to allocate and wait while another one captures (capture mode `global`)."""
    mode = ctypes.c_int(RELAXED)
    exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    if (code := exchange(ctypes.byref(mode))) != 0:
        message = f"cuThreadExchangeStreamCaptureMode must return 0, got {code}"
        raise FlashDistError(message)
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


def _idle_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream that is not being captured; torch's streams are shared."""
    for _ in range(POOLED_STREAMS):
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            if not torch.cuda.is_current_stream_capturing():
                return stream
    message = f"one of {POOLED_STREAMS} streams on {device} must be idle, got all being captured"
    raise FlashDistError(message)
