"""What `doctor` computes on each GPU: the right values, and the same bits in every run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ._toolkit.selftest.case import Exact
from .ops import scale

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FACTOR = 1.5


@dataclass(frozen=True)
class Case:
    """scale() of so many numbers."""

    count: int
    fills_gpu: bool = False

    @property
    def name(self) -> str:
        return f"scale {self.count}"

    def make_inputs(self, device: torch.device) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.count)
        return torch.randn(self.count, generator=generator, device="cpu").to(device)

    def describe_inputs(self, inputs: torch.Tensor) -> dict[str, Any]:
        return {}

    def run(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": scale(inputs, FACTOR)}

    def compute_exact(self) -> Exact:
        x = self.make_inputs(torch.device("cpu"))
        return Exact({"out": x.double() * FACTOR}, {"out": 1e-6})


def load_cases() -> Callable[[torch.device, Sequence[dict[str, Any]]], Sequence[Case]]:
    """Return what chooses the cases of a device."""
    return lambda device, selected: [Case(1), Case(1000), Case(100_003)]
