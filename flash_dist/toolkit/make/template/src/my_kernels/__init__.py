"""CUDA kernels of my_kernels.

Importing this package needs neither torch nor a GPU: `python -m my_kernels doctor` starts on any
machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .ops import scale

__all__ = ["scale"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from . import ops

        return getattr(ops, name)
    raise AttributeError(f"module `{__name__}` has no attribute `{name}`")
