"""Makes inputs from an integer hash, and compares results. Needs torch, but no GPU."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from .report import hash_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Tensors = dict[str, torch.Tensor]  # results by their names
Number = TypeVar("Number", int, torch.Tensor)

_MASK = 0xFFFFFFFF
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """The first place where two tensors differ, and the number of differing elements."""

    tensor: str
    coordinate: tuple[int, ...]
    expected: float
    actual: float
    count: int
    total: int

    def __str__(self) -> str:
        return (
            f"{self.tensor} differs in {self.count} of {self.total} elements, first at "
            f"{list(self.coordinate)}: {self.actual!r} instead of {self.expected!r}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the difference as plain data; NaN and inf, which JSON lacks, become text."""
        numbers = {"expected": _json_number(self.expected), "actual": _json_number(self.actual)}
        return {**vars(self), "coordinate": list(self.coordinate), **numbers}


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _mix(value: Number) -> Number:
    """Mix 32 bits (the "lowbias32" integer hash); exact in Python integers and in int64 tensors."""
    value = ((value ^ (value >> 16)) * 0x7FEB352D) & _MASK
    value = ((value ^ (value >> 15)) * 0x846CA68B) & _MASK
    return value ^ (value >> 16)


def hash_bits(seed: int, count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Hash (seed, index) to 32 bits: mix(index ^ mix(seed)), as int64 [count].

    The hash uses integer operations only, so that inputs are the same on every machine and with
    every version of torch.
    """
    index = torch.arange(count, dtype=torch.int64, device=device)
    return _mix(index ^ _mix(seed & _MASK))


def make_values(
    seed: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    device: torch.device | str = "cpu",
    scale: float = 1.0,
) -> torch.Tensor:
    """Fill a tensor with values in [-scale, scale): the hash's top 24 bits as a fraction.

    This is exact in float32 if the scale is a power of two. Only the conversion to `dtype` rounds.
    """
    bits = hash_bits(seed, math.prod(shape), device) >> 8
    values = (bits - (1 << 23)).to(torch.float32) * (scale / (1 << 23))
    return values.to(dtype).reshape(shape)


def all_equal(expected: Tensors, others: Iterable[Tensors]) -> bool:
    """Tell if all others have the same bits as `expected`. Synchronises with the device once."""
    same = [
        (_bits(expected[name]) == _bits(other[name])).all() for other in others for name in expected
    ]
    return bool(torch.stack(same).all()) if same else True


def digest(tensors: Tensors) -> dict[str, str]:
    """Return the hash of each tensor's elements, by the tensor's name."""
    return {name: _hash(tensor.detach().contiguous().cpu()) for name, tensor in tensors.items()}


def _hash(tensor: torch.Tensor) -> str:
    size = tensor.numel() * tensor.element_size()
    elements = (ctypes.c_char * size).from_address(tensor.data_ptr()) if size else b""
    return hash_bytes(elements)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(_BITS[tensor.element_size()])


def compare_bits(expected: Tensors, actual: Tensors) -> tuple[Difference, ...]:
    """Compare bit by bit: two NaN may be equal, and 0.0 differs from -0.0."""
    found = (find_bit_difference(name, expected[name], actual[name]) for name in expected)
    return tuple(filter(None, found))


def find_bit_difference(
    name: str, expected: torch.Tensor, actual: torch.Tensor
) -> Difference | None:
    """Describe the elements whose bits differ; None if all are equal.

    Raises:
        ValueError: The shapes or the dtypes differ.
    """
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        message = (
            f"{name} is {actual.dtype} {list(actual.shape)}, "
            f"not {expected.dtype} {list(expected.shape)}"
        )
        raise ValueError(message)
    differs = _bits(expected) != _bits(actual)
    return first_difference(name, differs, expected, actual)


def compare_values(
    expected: Tensors, allowed: Mapping[str, float], actual: Tensors
) -> tuple[Difference, ...]:
    """Return the differences from a float64 reference that exceed the allowed error.

    Args:
        expected: The float64 reference.
        allowed: The allowed absolute error of each tensor.
        actual: The results of the kernels, on any device.
    """
    found = []
    for name in actual:
        reference = expected[name]
        values = actual[name].to("cpu", torch.float64)
        error = torch.where(values == reference, 0.0, (values - reference).abs())
        wrong = ~(error <= allowed[name])
        found.append(first_difference(name, wrong, reference, values))
    return tuple(filter(None, found))


def first_difference(
    name: str, differs: torch.Tensor, expected: torch.Tensor, actual: torch.Tensor
) -> Difference | None:
    """Count the elements that `differs` marks, and describe the first; None if there are none."""
    count = int(differs.sum())
    if not count:
        return None
    coordinate = tuple(int(axis) for axis in differs.nonzero()[0])
    return Difference(
        name,
        coordinate,
        float(expected[coordinate]),
        float(actual[coordinate]),
        count,
        differs.numel(),
    )
