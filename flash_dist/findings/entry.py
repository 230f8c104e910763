"""What one finding id stands for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """An id in words: one line, what it means, and what to do."""

    title: str
    meaning: str
    remedy: str
