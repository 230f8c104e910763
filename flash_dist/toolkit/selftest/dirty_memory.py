"""Fill memory that kernels may get with NaN, so that what reads before it writes is caught."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_NAN_BYTE = 0xFF  # NaN in float16, bfloat16 and float32
_SETTLED = 2  # calls after which a stream's free blocks come back in the same sizes


class DirtyMemory:
    """The free blocks of torch's allocator, by stream, of one case that runs many times.

    Asking the allocator takes milliseconds: the sizes are remembered once the case has settled.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sizes: dict[int, tuple[int, ...]] = {}
        self._calls: dict[int, int] = {}
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the blocks of other cases

    def fill(self) -> None:
        """Fill the free blocks of the current stream.

        Takes a tensor of each free block's size, largest first, fills them and gives them back. A
        block that is too large to be handed out whole is split, which changes nothing here.
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
