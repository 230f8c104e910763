"""Cases that `doctor` computes on each GPU: correct values, and equal bits in every run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ._toolkit.selftest.case import Case, make_values
from .ops import scale

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FACTOR = 1.5


@dataclass(frozen=True)
class ScaleCase(Case):
    """scale() of a vector of `count` elements."""

    count: int

    def make_inputs(self, device: torch.device) -> torch.Tensor:
        return make_values(0, (self.count,), torch.float32, device=device)

    def run(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": scale(inputs, FACTOR)}

    def exact(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": inputs * FACTOR}


def load_cases() -> Callable[[torch.device, Sequence[dict[str, Any]]], Sequence[Case]]:
    """Return a function that chooses the cases of a device."""
    return lambda device, selected: [ScaleCase(1), ScaleCase(1000), ScaleCase(100_003)]
