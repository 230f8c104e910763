"""Expected values of cases, stored in a folder.

All processes that share a folder compute each case once. The values are also correct if the folder
is absent, if its disk is full, or if its files are damaged.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NoReturn

import pytest
import torch

from flash_dist.proof.cases import Kernels, make_cases
from flash_dist.proof.inputs import Inputs
from flash_dist.proof.reference import NAMES
from flash_dist.proof.selftest import AttentionCase
from flash_dist.toolkit.selftest.child import check_values
from flash_dist.toolkit.selftest.exact import LIMIT, ExactValues

if TYPE_CHECKING:
    from pathlib import Path

    from flash_dist.toolkit.selftest.case import Exact


def never(*_: object, **__: object) -> NoReturn:
    """Replace attention, and fail: exact values are computed without it."""
    raise AssertionError


KERNELS = [Kernels("fp16", 32, 32), Kernels("fp32", 64, 64)]
CASES = [AttentionCase(case, never) for case in make_cases(KERNELS, 0)[:6]]
CASE = CASES[0]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the cases that were computed."""
    names: list[str] = []
    lock = threading.Lock()
    compute = AttentionCase.compute_exact

    def count(case: AttentionCase) -> Exact:
        with lock:
            names.append(case.name)
        return compute(case)

    monkeypatch.setattr(AttentionCase, "compute_exact", count)
    return names


def same(one: Exact, other: Exact) -> bool:
    return one.allowed == other.allowed and all(
        torch.equal(one.values[name], other.values[name]) for name in NAMES
    )


def test_all_who_share_a_folder_compute_each_case_once(tmp_path: Path, computed: list[str]) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = [
            list(pool.map(lambda _, case=case: ExactValues(tmp_path).get(case), range(8)))
            for case in CASES
        ]
    assert sorted(computed) == sorted(case.name for case in CASES)
    for case, values in zip(CASES, found, strict=True):
        right = case.compute_exact()
        assert all(same(right, one) for one in values)
        assert {one.values["out"].dtype for one in values} == {torch.float64}
    assert {path.suffix for path in tmp_path.iterdir()} == {".pt", ".lock"}


def test_without_a_folder_each_computes_for_itself(computed: list[str]) -> None:
    assert same(ExactValues().get(CASE), ExactValues().get(CASE))
    assert computed == [CASE.name] * 2


def test_a_folder_that_is_gone_costs_time_alone(tmp_path: Path, computed: list[str]) -> None:
    values = ExactValues(tmp_path / "absent")
    assert same(values.get(CASE), values.get(CASE))
    assert computed == [CASE.name] * 2


@pytest.mark.parametrize("damage", [b"", b"no zip file", None], ids=["empty", "other", "cut"])
def test_an_incomplete_value_is_computed_again(
    tmp_path: Path, computed: list[str], damage: bytes | None
) -> None:
    right = ExactValues(tmp_path).get(CASE)
    (path,) = tmp_path.glob("*.pt")
    path.write_bytes(path.read_bytes()[:-100] if damage is None else damage)
    assert same(ExactValues(tmp_path).get(CASE), right)
    assert same(ExactValues(tmp_path).get(CASE), right)
    assert computed == [CASE.name] * 2


def test_no_more_is_kept_than_the_limit(tmp_path: Path, computed: list[str]) -> None:
    first = CASE.compute_exact().values.values()
    computed.clear()
    values = ExactValues(tmp_path, limit=sum(one.nbytes for one in first))
    for case in (*CASES, *CASES):
        values.get(case)
    kept = list(tmp_path.glob("*.pt"))
    assert len(kept) == 1
    assert len(computed) == 2 * len(CASES) - 1
    assert LIMIT == 1 << 30


def test_a_full_disk_costs_time_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, computed: list[str]
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(torch, "save", fail)
    assert ExactValues(tmp_path).get(CASE)
    assert computed == [CASE.name]
    assert not list(tmp_path.glob("*.pt"))


def test_inputs_that_another_made_wrong_are_found_in_its_own_results() -> None:
    case = CASE.case
    inputs = Inputs.make(case, torch.device("cpu"))
    right = inputs.attend_exactly(case, torch.float32)
    assert check_values(CASE, right, ExactValues()) == ()
    wrong = Inputs(inputs.q + 1, inputs.k, inputs.v * 2, inputs.dout, inputs.mask)
    names = {
        one.tensor
        for one in check_values(CASE, wrong.attend_exactly(case, torch.float32), ExactValues())
    }
    assert "out" in names
