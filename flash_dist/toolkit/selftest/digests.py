"""Hashes that fingerprints consist of."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import ctypes

_DIGITS: Final = 32


def hash_bytes(data: bytes | ctypes.Array[ctypes.c_char]) -> str:
    """Return the first 128 bits of the SHA-256, in hexadecimal: a wheel holds thousands."""
    return hashlib.sha256(data).hexdigest()[:_DIGITS]
