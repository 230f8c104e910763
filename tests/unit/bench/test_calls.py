"""Costs of calls: limits, findings, and files of results."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from flash_dist.bench.calls import LIMITS, SHAPES, Call, CallReport, read_run
from flash_dist.bench.results import Report, write_json
from flash_dist.toolkit.errors import UsageError
from tests.unit.made.bench_results import MACHINE, make_report

if TYPE_CHECKING:
    from pathlib import Path


def make_calls(ratio: float) -> CallReport:
    """Return a run in which our calls take `ratio` times as long as the peer's."""
    calls = (Call(name, shape, 20 * ratio, 20.0) for shape in SHAPES for name in LIMITS)
    return CallReport(MACHINE, tuple(calls))


def test_a_call_within_its_limit_is_no_finding() -> None:
    assert make_calls(1.0).findings == ()


def test_a_call_past_its_limit_is_a_finding_on_the_first_problem_alone() -> None:
    report = make_calls(1.5)
    missed = [call.name for call in report.calls if not call.is_within]
    assert missed == [name for name, limit in LIMITS.items() if limit < 1.5]
    assert report.findings[0] == (
        "operator takes 1.50 times as long as SDPA with FLASH on bf16 d64 full 1x128 h4/4, "
        "at most 1.1 is allowed"
    )


def test_a_kind_of_call_without_a_limit_may_take_what_it_takes() -> None:
    assert Call("forward and backward", SHAPES[0], 100.0, 1.0).is_within


def test_a_run_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "calls.json"
    write_json(make_calls(1.5).to_json(), path)
    assert read_run(path) == make_calls(1.5)


def test_a_run_of_the_other_kind_is_told_by_its_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_json(make_report().to_json(), path)
    assert isinstance(read_run(path), Report)


@pytest.mark.parametrize(
    "changed", [{"version": 2}, {"calls": [{}]}], ids=["version", "call-without-fields"]
)
def test_what_is_no_run_is_refused(tmp_path: Path, changed: dict[str, object]) -> None:
    path = tmp_path / "calls.json"
    path.write_text(json.dumps(make_calls(1.0).to_json() | changed))
    with pytest.raises(UsageError, match=r"calls\.json.*`bench`"):
        read_run(path)


def test_a_run_that_nests_too_deep_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "calls.json"
    path.write_text("[" * 100_000)
    with pytest.raises(UsageError, match=r"calls\.json.*`bench`"):
        read_run(path)
