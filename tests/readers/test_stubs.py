"""Stubs of every kind, planted and compiled, are found; small real kernels are not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.gpucode.coverage import Coverage, Verdict, find_coverage
from flash_dist.toolkit.gpucode.fatbin import open_fatbin
from tests.readers.planted import COMPLAINTS, SOURCE, STUBS
from tests.readers.tools import compile_code, gencode, needs

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = needs("nvcc")


def compile_and_cover(tmp_path: Path, source: str, *options: str) -> Coverage:
    built = compile_code(tmp_path / "planted.fatbin", source, "-fatbin", *options)
    with open_fatbin(built) as fatbin:
        return find_coverage(fatbin)


def verdicts(found: Coverage, name: str) -> dict[str, Verdict]:
    (row,) = (row for row in found.rows if row.name == name)
    return row.verdicts


def test_planted_stubs_are_found_and_small_kernels_are_left_alone(tmp_path: Path) -> None:
    good = ("sm_80", "sm_90a", "sm_120", "compute_90")
    bad = ("sm_75", "compute_75")
    found = compile_and_cover(tmp_path, SOURCE, "-lineinfo", *gencode(*bad, *good))
    assert found.warnings == ()
    assert {row.container for row in found.rows} == {0}
    for row in found.rows:
        expected: Verdict = "missing" if row.name == "missing" else STUBS.get(row.name, "real")
        wanted = dict.fromkeys(bad, expected) | dict.fromkeys(good, "real")
        assert row.verdicts == wanted, row.name
    assert len(found.rows) == len(STUBS) + 8


@pytest.mark.parametrize("target", ["sm_75", "compute_75", "sm_90"])
def test_planted_complaints_are_found_for_a_single_target(tmp_path: Path, target: str) -> None:
    found = compile_and_cover(tmp_path, SOURCE, *gencode(target))
    stubs = {row.name: row.verdicts[target] for row in found.rows if row.verdicts[target] != "real"}
    assert stubs == (COMPLAINTS if target.endswith("75") else {})


def test_the_plain_ptx_that_comes_with_an_arch_specific_build_is_a_stub(tmp_path: Path) -> None:
    guard = SOURCE.replace("__CUDA_ARCH__ >= 800", "defined(__CUDA_ARCH_FEAT_SM90_ALL)")
    found = compile_and_cover(tmp_path, guard, "-arch=sm_90a")
    assert found.targets == ("compute_90", "sm_90a", "compute_90a")
    for name in (*STUBS, "legit_tiny", "legit_empty"):
        expected = STUBS.get(name, "real")
        row = {"compute_90": expected, "sm_90a": "real", "compute_90a": "real"}
        assert verdicts(found, name) == row, name
