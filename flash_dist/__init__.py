"""Multi-arch CUDA attention kernels and the tools that build, inspect and prove their wheels.

Importing this needs neither torch nor a GPU: names are loaded on first use, so that
`python -m flash_dist doctor` starts on a broken install.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ._native import last_variant
    from .attention import flash_attn_func
    from .flex import flex_attention
    from .gpu_report import check
    from .masks import BlockMask
    from .merge import merge_attention
    from .sdpa import scaled_dot_product_attention
    from .varlen import flash_attn_varlen_func

    __version__: str

__all__ = [
    "BlockMask",
    "__version__",
    "check",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flex_attention",
    "last_variant",
    "merge_attention",
    "scaled_dot_product_attention",
]

logging.getLogger(__name__).addHandler(logging.NullHandler())  # a program decides what is shown

_MODULES: Final = {
    "BlockMask": ".masks",
    "check": ".gpu_report",
    "flash_attn_func": ".attention",
    "flash_attn_varlen_func": ".varlen",
    "flex_attention": ".flex",
    "last_variant": "._native",
    "merge_attention": ".merge",
    "scaled_dot_product_attention": ".sdpa",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from ._version import read_version  # noqa: PLC0415

        return read_version()
    if name in _MODULES:
        return getattr(import_module(_MODULES[name], __name__), name)
    message = f"module `flash_dist` has no attribute `{name}`"
    raise AttributeError(message)


def __dir__() -> list[str]:
    return sorted(__all__)
