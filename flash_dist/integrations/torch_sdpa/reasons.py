"""Log why calls go to torch's own kernels, once for each reason."""

from __future__ import annotations

import logging
import warnings
from typing import Final

import torch

from ...kernels.choices import find_match_kvcache
from ..additive import MASKED

_log: Final = logging.getLogger(__name__)

told: Final[list[str]] = []  # in the order in which they came up; `describe` shows them


def tell(reason: str) -> None:
    """Log at level INFO, once for each reason; a graph of torch.compile says nothing.

    Raises:
        ValueError: `flash_dist.match_kvcache` is chosen, and torch's kernels have other bits.
    """
    if find_match_kvcache():
        message = (
            f"match_kvcache must be False where torch's own attention is called, got True: "
            f"flash_dist has no kernel for {reason}"
        )
        raise ValueError(message)
    if not torch.compiler.is_compiling() and _is_new(reason):
        _log.info("torch's own attention is called: flash_dist has no kernel for %s", reason)


def warn_of_low(low: float | None) -> None:
    """Warn, once for each number, of a mask that is a bias by mistake; None: it is not.

    Args:
        low: What it adds.
    """
    if low is not None and _is_new(f"a mask that adds {low:g}, above {MASKED:g}"):
        message = (
            f"a mask must add 0 and numbers of at most {MASKED:g} to hide keys only, got {low:g}, "
            "which is a bias: torch's own attention is called\n\n"
            "hint: flash_dist serves `attn_mask == 0`, if the mask is to hide, and -inf in its "
            "place"
        )
        warnings.warn(message, UserWarning, stacklevel=2)


def _is_new(reason: str) -> bool:
    if reason in told:
        return False
    told.append(reason)
    return True
