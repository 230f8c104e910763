"""Long sequences of which an H200 cuts keys and queries, short enough for compute-sanitizer.

The planner's own tests ask it for them. Where one kernel makes all gradients there are no cells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Long:
    """A backward of one sequence, and a workspace that dS does not fit in as a whole."""

    seqlen_q: int
    seqlen_k: int
    num_heads: int
    causal: bool
    megabytes: int


LONG: Final = (Long(8192, 8192, 1, False, 80), Long(5000, 9000, 2, True, 100))  # noqa: FBT003
