"""The supported functions of flash_attn.flash_attn_interface."""

from __future__ import annotations

from ...attention.batched import flash_attn_func
from ...attention.decoding.kvcache import flash_attn_with_kvcache
from ...attention.packed import flash_attn_varlen_func
from ...attention.stacked import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .absent import refuse

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def __getattr__(name: str) -> object:
    raise refuse(__name__, name, __all__)
