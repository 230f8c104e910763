"""The supported names of the package flash_attn: a program changes only its import.

Write `import flash_dist.compat.flash_attn as flash_attn`. Importing this module does not import
torch; the first use of a name does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from .absent import refuse

if TYPE_CHECKING:
    from ...attention.batched import flash_attn_func
    from ...attention.decoding.kvcache import flash_attn_with_kvcache
    from ...attention.packed import flash_attn_varlen_func
    from ...attention.stacked import (
        flash_attn_kvpacked_func,
        flash_attn_qkvpacked_func,
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
    )
    from . import bert_padding, flash_attn_interface  # noqa: F401 - for type checkers

__version__ = "2.8.3"  # the version that has these signatures

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

_MODULES: Final = ("bert_padding", "flash_attn_interface")


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name in __all__:
        return getattr(import_module(".flash_attn_interface", __name__), name)
    raise refuse(__name__, name, __all__)


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, "__version__"])
