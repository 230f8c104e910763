"""Score modifications of a case, the same on every machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from ..kernels.scores import Scores
from ..toolkit.selftest.comparison import make_values

if TYPE_CHECKING:
    from .cases import Case

SOFTCAP: Final = 3.0  # small, so that scores reach it
_SEED: Final = 6
_SINKS: Final = 2.0  # the largest
_SLOPES: Final = 8  # powers of two, which every machine has exactly


def make_scores(case: Case, device: torch.device) -> Scores:
    """Return the score modifications that `case.scores` names: softcap, alibi and sinks.

    Slopes are [batch, num_heads_q], of packed documents [num_heads_q]: both forms there are.
    """
    words = case.scores.split()
    return Scores(
        SOFTCAP if "softcap" in words else 0.0,
        _slopes(case, device) if "alibi" in words else None,
        _sinks(case, device) if "sinks" in words else None,
    )


def _slopes(case: Case, device: torch.device) -> torch.Tensor:
    def slope(entry: int, head: int) -> float:
        return 2.0 ** -(1 + (head + entry) % _SLOPES)

    entries = range(1 if case.lengths else case.batch)
    slopes = [[slope(entry, head) for head in range(case.num_heads_q)] for entry in entries]
    rows = torch.tensor(slopes, dtype=torch.float32, device=device)
    return rows[0] if case.lengths else rows


def _sinks(case: Case, device: torch.device) -> torch.Tensor:
    return make_values(_SEED, (case.num_heads_q,), torch.float32, device=device, scale=_SINKS)
