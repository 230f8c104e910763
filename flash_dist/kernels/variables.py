"""Environment variables that are read in every call, and that most processes do not set."""

from __future__ import annotations

import os


def is_unset(name: bytes) -> bool:
    """Whether a variable is known not to be set; os.environ raises twice inside to say so."""
    known = getattr(os.environ, "_data", None)
    return known is not None and name not in known
