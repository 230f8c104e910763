"""Copies a tensor to a GPU such that any stream may read it, whatever the caller is doing there.

A mask's tensors stay for later calls, but their first use may come at any time: while a CUDA graph
is captured (nothing may be waited for, and the copy would be part of the graph), while torch routes
the allocations of this thread or stream into a graph's own memory, or in inference mode. All of it
is settings of a thread or a stream. So the copy is made by a new thread on an idle stream, and
waited for: the host waits, no stream does.
"""

from __future__ import annotations

import contextlib
import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import torch

from ..errors import FlashDistError

if TYPE_CHECKING:
    from collections.abc import Iterator

Tensor = torch.Tensor

POOLED_STREAMS: Final = 32  # torch hands out so many, then the first again
RELAXED: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def upload(host: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a CPU tensor that is complete, and that no other stream need wait for."""
    if device.type != "cuda":
        return host.to(device)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="flash_dist_upload") as thread:
        return thread.submit(_copy, host, device).result()


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
