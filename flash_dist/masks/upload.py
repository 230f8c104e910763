"""Copies a tensor to a GPU so that any stream may read it, whatever state the caller is in.

A mask's tensors are kept for later calls, but the first use may happen at any time: during the
capture of a CUDA graph (where waiting is forbidden, and the copy would become part of the graph),
while torch allocates from a graph's private memory pool, or in inference mode. All of these are
states of a thread or a stream. So a new thread copies on an idle stream and waits for the copy. The
caller's thread waits for the new thread, but no stream waits.
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

POOLED_STREAMS: Final = 32  # number of streams in torch's pool; torch returns them in turn
RELAXED: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
THREADS: Final = Path("/proc/self/task")
LONGEST_END: Final = 5.0  # maximum seconds to wait until a thread ends; usually milliseconds


def upload(host: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device. The returned copy is complete: no stream needs to wait."""
    if device.type != "cuda":
        return host.to(device)
    return in_a_thread(partial(_copy, host, device))


def in_a_thread(work: Callable[[], Result]) -> Result:
    """Run `work` in a new thread and return its result; the thread has ended by then."""
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
    """Wait until a thread that Python has joined has really ended, or for LONGEST_END seconds.

    NOTE: before Python 3.13, join returns while the thread is still freeing libraries' thread-local
    data. A process that exits meanwhile unloads these libraries too early.
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
    """Let this thread allocate and wait while another one captures a graph in mode `global`."""
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
    """Return a stream of torch's shared pool that is not being captured."""
    for _ in range(POOLED_STREAMS):
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            if not torch.cuda.is_current_stream_capturing():
                return stream
    message = f"one of {POOLED_STREAMS} streams on {device} must be idle, got all being captured"
    raise FlashDistError(message)
