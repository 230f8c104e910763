"""Long sequences whose keys and queries an H200 splits, short enough for compute-sanitizer.

The planner's own tests check that these sequences are split. A kernel that computes all gradients
splits nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Long:
    """A backward of one sequence, and a workspace that is too small for all of dS."""

    seqlen_q: int
    seqlen_k: int
    num_heads: int
    causal: bool
    megabytes: int


LONG: Final = (Long(8192, 8192, 1, False, 80), Long(5000, 9000, 2, True, 100))  # noqa: FBT003
