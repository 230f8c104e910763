"""Description of the machine that is measured."""

from __future__ import annotations

import importlib.metadata
import time
from contextlib import suppress
from typing import Any, Final

import torch

from ..toolkit.machine.libcuda import read_cuda
from ..toolkit.version import read_version

_DISTRIBUTIONS: Final = {
    "triton": "triton",
    "fa4": "flash-attn-4",
    "fa3": "flash-attn-3",
    "cudnn-flex": "nvidia-cudnn-frontend",
}


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
        "flash_dist": read_version(),
        **_read_versions(),
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


def _read_versions() -> dict[str, str]:
    """Return the versions of installed packages by the names of their baselines."""
    found = {}
    for name, distribution in _DISTRIBUTIONS.items():
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(distribution)
    return found
