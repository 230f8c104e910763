"""What the selftest asks of a case, which the package brings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from .comparison import Tensors

    # The cases for a device, given what the dispatcher selects on it; for the CPU that is nothing.
    ChooseCases = Callable[[torch.device, Sequence[dict[str, Any]]], Sequence["Case"]]


@dataclass(frozen=True)
class Exact:
    """The values that a case must give, and how far off each tensor may be."""

    values: Tensors
    allowed: dict[str, float]


class Case(Protocol):
    """One problem that kernels compute, the same on every machine."""

    @property
    def name(self) -> str:
        """A name that says everything; no other case has it."""

    @property
    def fills_gpu(self) -> bool:
        """Whether it is too large for `compute_exact`: then its results must be finite."""

    def make_inputs(self, device: torch.device) -> Any:  # noqa: ANN401 - the package's own
        """Return the inputs of `run`."""

    def describe_inputs(self, inputs: Any) -> dict[str, Any]:  # noqa: ANN401
        """Return, as plain data, what decides bits and is neither in the name nor in the plan."""

    def run(self, inputs: Any) -> Tensors:  # noqa: ANN401
        """Compute the results once, on the current stream."""

    def compute_exact(self) -> Exact:
        """Compute the values on the CPU, in float64."""
