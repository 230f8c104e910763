"""Reads the kernels of a file, or of some of its images, as the commands do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flash_dist.toolkit.gpucode.fatbin import open_fatbin
from flash_dist.toolkit.gpucode.images import FatbinEntry

if TYPE_CHECKING:
    from flash_dist.toolkit.gpucode.cubin import KernelInfo
    from flash_dist.toolkit.gpucode.images import FatbinReport
    from flash_dist.toolkit.targets.archs import Arch


def read_kernels(
    report: FatbinReport, selected: FatbinEntry | Arch | None = None
) -> tuple[KernelInfo, ...]:
    """Return the kernels of one entry or target; of all usable images when None."""
    entries = (selected,) if isinstance(selected, FatbinEntry) else report.select(selected)
    with open_fatbin(report.path) as fatbin:
        return tuple(kernel for entry in entries for kernel in fatbin.kernels(entry))
