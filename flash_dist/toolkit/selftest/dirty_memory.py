"""Fills free memory with NaN, to catch kernels that read before they write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_NAN_BYTE = 0xFF  # NaN in float16, bfloat16 and float32
_SETTLED = 2  # calls after which the sizes of a stream's free blocks repeat


class DirtyMemory:
    """The free blocks of torch's allocator, by stream, of one case that runs many times.

    Asking the allocator takes milliseconds, so the sizes are cached once the case has settled.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sizes: dict[int, tuple[int, ...]] = {}
        self._calls: dict[int, int] = {}
        if device.type == "cuda":
            torch.cuda.empty_cache()  # blocks of other cases

    def fill(self) -> None:
        """Fill the free blocks of the current stream.

        Allocates a tensor of each free block's size, largest first, fills all and frees them. A
        block that is too large to be allocated whole is split, which does no harm.
        """
        if self._device.type != "cuda":
            return
        cuda: Any = torch.cuda
        stream = int(cuda.current_stream(self._device).cuda_stream)
        calls = self._calls[stream] = self._calls.get(stream, 0) + 1
        if calls <= _SETTLED:
            torch.cuda.synchronize(self._device)
            blocks = sorted(_free_blocks(self._device, stream), reverse=True)
            self._sizes[stream] = tuple(blocks)
        held = []
        for size in self._sizes[stream]:
            block = torch.empty(size, dtype=torch.uint8, device=self._device)
            held.append(block.fill_(_NAN_BYTE))


def _free_blocks(device: torch.device, stream: int) -> Iterator[int]:
    cuda: Any = torch.cuda
    for segment in cuda.memory_snapshot():
        if segment["device"] == device.index and segment["stream"] == stream:
            for block in segment["blocks"]:
                if block["state"] == "inactive":
                    yield block["size"]
