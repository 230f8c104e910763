"""RMS norm and SiLU-and-multiply as CUDA kernels.

Importing this package needs neither torch nor a GPU, so that `python -m own_kernels doctor` starts
on a broken install.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .functions import rms_norm, silu_mul

__all__ = ["rms_norm", "silu_mul"]


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(import_module(".functions", __name__), name)
    message = f"module `{__name__}` has no attribute `{name}`"
    raise AttributeError(message)
