"""The base class of cases: defaults for a package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from flash_dist.toolkit.selftest.case import Case, make_values

CPU = torch.device("cpu")


class Inputs(NamedTuple):
    x: torch.Tensor
    rows: torch.Tensor


@dataclass(frozen=True)
class GatherRowsCase(Case):
    dtype: str
    rows: int
    offset: float = 0.5

    def make_inputs(self, device: torch.device) -> dict[str, Inputs]:
        x = make_values(0, (self.rows, 4), getattr(torch, self.dtype), device=device)
        return {"all": Inputs(x, torch.arange(self.rows, device=device))}

    def run(self, inputs: dict[str, Inputs]) -> dict[str, torch.Tensor]:
        x, rows = inputs["all"]
        return {"out": x[rows] + self.offset}

    def exact(self, inputs: dict[str, Inputs]) -> dict[str, torch.Tensor]:
        x, rows = inputs["all"]
        assert (x.dtype, rows.dtype) == (torch.float64, torch.int64)
        return {"out": x.requires_grad_()[rows] + self.offset}


def test_the_name_is_that_of_the_class_and_its_fields() -> None:
    assert GatherRowsCase("float16", 3).name == "gather_rows float16 rows=3 offset=0.5"
    assert not GatherRowsCase("float16", 3).fills_gpu
    assert GatherRowsCase("float16", 3).describe_inputs(None) == {}


@pytest.mark.parametrize(("dtype", "factor"), [("float16", 1), ("bfloat16", 1), ("float32", 8)])
def test_the_values_are_exact_and_rounding_is_allowed(dtype: str, factor: int) -> None:
    case = GatherRowsCase(dtype, 100)
    exact = case.compute_exact()
    values, allowed = exact.values["out"], exact.allowed["out"]
    assert values.dtype == torch.float64
    assert not values.requires_grad
    assert allowed == factor * torch.finfo(getattr(torch, dtype)).eps * float(values.abs().max())
    found = case.run(case.make_inputs(CPU))["out"]
    assert float((found.double() - values).abs().max()) <= allowed
    wrong = case.run({"all": case.make_inputs(CPU)["all"]._replace(rows=torch.zeros(100).long())})
    assert float((wrong["out"].double() - values).abs().max()) > allowed


def test_a_case_of_no_element_allows_nothing() -> None:
    assert GatherRowsCase("float16", 0).compute_exact().allowed == {"out": 0.0}


def test_a_case_without_a_required_method_is_rejected() -> None:
    case = Case()
    assert case.name == "case"
    for call in (lambda: case.make_inputs(CPU), lambda: case.run(()), lambda: case.exact(())):
        with pytest.raises(NotImplementedError):
            call()
