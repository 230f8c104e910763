"""The supported names of the package flash_mla: a program changes only its import.

Write `import flash_dist.compat.flash_mla as flash_mla`.
"""

from __future__ import annotations

from ..attention.decoding.latent import flash_mla_with_kvcache
from .flash_attn.absent import refuse

__all__ = ["flash_mla_with_kvcache", "get_mla_metadata"]


def __getattr__(name: str) -> object:
    raise refuse(__name__, name, __all__)


def get_mla_metadata(*_: object, **__: object) -> tuple[None, None]:
    """Return (None, None), because `flash_mla_with_kvcache` needs no schedule.

    Accepts the arguments of any version of FlashMLA.
    """
    return None, None
