"""Times runs on a GPU: one at a time, many between two events, or in CUDA graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from ...toolkit.machine.libcuda import read_cuda
from ...toolkit.machine.nvml import Gauge, Reading

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[[], object]
    Milliseconds = Callable[[], float]

_CYCLES_PER_US: Final = 2000  # at 2 GHz, about the highest clock of data-center GPUs
_SMALLEST_FLUSH: Final = 256 << 20  # bytes
_WARM_UPS: Final = 2  # runs before a capture; the first ones compile and allocate


class Mark(Protocol):
    """A moment between runs, such as a torch event."""

    def synchronize(self) -> None:
        """Wait until all work launched before this moment is done."""

    def elapsed_time(self, later: Any, /) -> float:  # noqa: ANN401 - a mark of the same class
        """Return the milliseconds until a later mark; both must have been synchronized."""


class Clock(Protocol):
    """Times runs on one kind of device."""

    captures: bool  # true if runs can be captured in CUDA graphs

    def start(self, run: Run, *, cold: bool, cover_us: float) -> Milliseconds:
        """Launch a run; return a function that returns its milliseconds, to be called after `wait`.

        Args:
            run: The run to time.
            cold: Flush L2 before the run.
            cover_us: Microseconds that the device sleeps before the run, so that the time of the
                launch is not measured.
        """

    def mark(self) -> Mark:
        """Record the current moment."""

    def wait(self) -> None:
        """Wait until all launched work is done."""

    def capture(self, make: Callable[[], Run], repeats: int) -> Run:
        """Make a run, capture it `repeats` times in a CUDA graph, and return the graph's replay."""

    def read(self) -> Reading:
        """Return the device's current clock frequency and power."""


class GpuClock:
    """Times runs with events.

    Before a run that is timed alone, the GPU sleeps for as long as the CPU needs to launch the run,
    so that launches are not measured. Before a cold run, a buffer larger than L2 is overwritten.
    """

    captures = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        l2_bytes: int = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(
            max(4 * l2_bytes, _SMALLEST_FLUSH), dtype=torch.uint8, device=device
        )
        gpus = read_cuda().gpus
        index = device.index or 0
        self._gauge = Gauge(gpus[index].uuid if index < len(gpus) else "")

    def start(self, run: Run, *, cold: bool, cover_us: float) -> Milliseconds:
        """Launch a run between two events."""
        if cold:
            self._flush.zero_()
        torch.cuda._sleep(int(cover_us * _CYCLES_PER_US))  # noqa: SLF001 - no public GPU sleep
        begin = self.mark()
        run()
        end = self.mark()
        return lambda: begin.elapsed_time(end)

    @staticmethod
    def mark() -> Mark:
        """Record an event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize(self.device)

    def capture(self, make: Callable[[], Run], repeats: int) -> Run:
        """Capture runs in a CUDA graph.

        NOTE: autograd runs a backward on the stream of its forward, so `make`, which may run a
        forward, is called on the stream of the capture.
        """
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            run = make()
            for _ in range(_WARM_UPS):
                run()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self.wait()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeats):
                run()

        def replay(kept: Run = run) -> None:
            del kept  # the default keeps the run's tensors alive as long as the graph
            graph.replay()

        return replay

    def read(self) -> Reading:
        """Read clock frequency and power from NVML."""
        return self._gauge.read()
