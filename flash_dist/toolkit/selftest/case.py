"""Base class of the selftest's cases. A package derives its own cases from it.

    from ._toolkit.selftest.case import Case, make_values

    @dataclass(frozen=True)
    class ScaleCase(Case):
        dtype: str
        count: int

        def make_inputs(self, device): ...  # the same values on every machine
        def run(self, inputs): ...  # {"out": tensor}, on the device of the inputs
        def exact(self, inputs): ...  # {"out": tensor}, of the inputs in float64 on the CPU

The other methods have defaults: the class and its fields give the name, the dtype gives the allowed
error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .comparison import make_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .comparison import Tensors

    # Returns the cases for a device. Arguments: the device, and the dispatcher's selections for it,
    # which are empty for the CPU or without a dispatcher.
    ChooseCases = Callable[[torch.device, Sequence[dict[str, Any]]], Sequence["Case"]]

__all__ = ["Case", "ChooseCases", "Exact", "make_values"]


@dataclass(frozen=True)
class Exact:
    """The expected values of a case, and the allowed error of each tensor."""

    values: Tensors
    allowed: dict[str, float]


class Case:
    """One problem for the kernels to compute, the same on every machine.

    A package derives a frozen dataclass, whose fields define the problem.
    """

    @property
    def name(self) -> str:
        """A unique name that states every field: `scale fp16 count=100`."""
        kind = re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", type(self).__name__).lower()
        told = vars(self)  # the fields of a dataclass, in order
        words = (one if isinstance(one, str) else f"{name}={one}" for name, one in told.items())
        return " ".join([kind.removesuffix("_case"), *words])

    @property
    def fills_gpu(self) -> bool:
        """Tell if the case is too large for `exact`.

        The selftest then checks its values only for NaN and inf.
        """
        return False

    def make_inputs(self, device: torch.device) -> Any:  # noqa: ANN401 - the package's own
        """Return the inputs of `run`: a tensor, or tensors in tuples, lists and dicts."""
        raise NotImplementedError

    def run(self, inputs: Any) -> Tensors:  # noqa: ANN401
        """Compute the results once, on the current stream."""
        raise NotImplementedError

    def exact(self, inputs: Any) -> Tensors:  # noqa: ANN401
        """Compute the same results on the CPU, from inputs in float64."""
        raise NotImplementedError

    def bound(self, name: str, values: torch.Tensor, dtype: torch.dtype) -> float:
        """Return the allowed error of a result.

        The default is twice the error of rounding the largest value of the result to the dtype. For
        float32 the default is 16 times that error, because sums in float32 round as well.

        Args:
            name: Name of the result.
            values: The correct values.
            dtype: The least precise dtype of the inputs.
        """
        del name
        largest = float(values.abs().max()) if values.numel() else 0.0
        return torch.finfo(dtype).eps * largest * (8 if dtype == torch.float32 else 1)

    def describe_inputs(self, inputs: Any) -> dict[str, Any]:  # noqa: ANN401
        """Return properties of the inputs that affect bits, besides the case's name and plan."""
        del inputs
        return {}

    def compute_exact(self) -> Exact:
        """Compute the expected values on the CPU, in float64, and the allowed errors."""
        inputs = self.make_inputs(torch.device("cpu"))
        dtypes = {one.dtype for one in _find_tensors(inputs) if one.is_floating_point()}
        dtype = max(dtypes, key=lambda one: torch.finfo(one).eps, default=torch.float32)
        values = {name: one.detach() for name, one in self.exact(_to_float64(inputs)).items()}
        return Exact(values, {name: self.bound(name, one, dtype) for name, one in values.items()})


def _find_tensors(inputs: object) -> Iterator[torch.Tensor]:
    if isinstance(inputs, torch.Tensor):
        yield inputs
    elif isinstance(inputs, (dict, list, tuple)):
        for one in inputs.values() if isinstance(inputs, dict) else inputs:
            yield from _find_tensors(one)


def _to_float64(inputs: Any) -> Any:  # noqa: ANN401
    """Convert floating-point tensors to float64; keep indices and masks."""
    if isinstance(inputs, torch.Tensor):
        return inputs.double() if inputs.is_floating_point() else inputs
    if isinstance(inputs, dict):
        return {name: _to_float64(one) for name, one in inputs.items()}
    if isinstance(inputs, tuple) and hasattr(inputs, "_fields"):  # a named tuple
        return type(inputs)(*map(_to_float64, inputs))
    if isinstance(inputs, (list, tuple)):
        return type(inputs)(map(_to_float64, inputs))
    return inputs
