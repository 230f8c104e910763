"""Logs why calls go to torch's own kernels, each reason once."""

from __future__ import annotations

import logging
from typing import Final

import torch

from ...kernels.choices import find_match_kvcache

_log: Final = logging.getLogger(__name__)

told: Final[list[str]] = []  # in order of occurrence, for `describe`


def tell(reason: str) -> None:
    """Log once, at level INFO, why torch's kernels compute a call. Log nothing in torch.compile.

    Raises:
        ValueError: `flash_dist.match_kvcache` is on: the bits of torch's kernels do not match.
    """
    if find_match_kvcache():
        message = (
            f"match_kvcache must be False where torch's own attention is called, got True: "
            f"flash_dist has no kernel for {reason}"
        )
        raise ValueError(message)
    if not torch.compiler.is_compiling() and _is_new(reason):
        _log.info("torch's own attention is called: flash_dist has no kernel for %s", reason)


def _is_new(reason: str) -> bool:
    if reason in told:
        return False
    told.append(reason)
    return True
