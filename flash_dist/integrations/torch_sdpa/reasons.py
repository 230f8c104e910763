"""Why calls go to torch's own kernels: said once for each reason."""

from __future__ import annotations

import logging
from functools import cache
from typing import Final

import torch

_log: Final = logging.getLogger(__name__)


def tell(reason: str) -> None:
    """Log at level INFO, once for each reason; a graph of torch.compile says nothing."""
    if not torch.compiler.is_compiling():
        _tell(reason)


@cache
def _tell(reason: str) -> None:
    _log.info("torch's own attention is called: flash_dist has no kernel for %s", reason)
