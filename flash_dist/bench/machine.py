"""Description of the machine that is measured."""

from __future__ import annotations

import importlib.metadata
import time
from typing import Any

import torch

from ..toolkit.machine.libcuda import read_cuda
from ..toolkit.version import read_version


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return the GPU and every version that decides about speed."""
    driver = read_cuda().driver
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "gpu": "CPU",
        "driver": driver.release if driver else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "triton": _triton_version(),
        "flash_dist": read_version(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "sm_count": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "memory_bytes": properties.total_memory,
        }
    return found


def _triton_version() -> str | None:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None
