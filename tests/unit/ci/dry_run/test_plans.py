"""The plans of all selftest cases from a dry run, and how planted rules change them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import pytest

from ci.dry_run.check import check, find_archs, find_changed, find_unrecorded
from ci.dry_run.plans import H200, Recorded, run_dry
from ci.places import SOURCES
from csrc.headers import LAYOUT
from flash_dist.toolkit.make.project import ROOT
from flash_dist.toolkit.make.wheels.fingerprints import RECORDED
from flash_dist.toolkit.selftest.fingerprints import hash_code, read_references
from flash_dist.toolkit.selftest.report import CasePlan
from tests.unit.made.planner import require_compiler

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from flash_dist.toolkit.selftest.fingerprints import Reference

pytestmark = pytest.mark.slow


@cache
def reference() -> Reference:
    """Return the recording of SASS by the newest CUDA."""
    return next(
        one
        for one in read_references(RECORDED)
        if one.toolkit == "13.0" and not any(each.driver for each in one.fingerprints)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the compiled host code; a planted rule recompiles only its own files."""
    require_compiler()
    return tmp_path_factory.mktemp("dry_run")


@pytest.fixture(scope="module")
def recorded(folder: Path) -> dict[str, Recorded]:
    return run_dry(H200, find_archs(reference()), folder)


def test_each_recorded_case_has_the_plan_that_a_dry_run_tells(
    recorded: dict[str, Recorded],
) -> None:
    assert reference().setting == H200
    plans = {case: one.plan for case, one in recorded.items()}
    assert find_changed(reference(), plans) == []


def test_plans_tell_masks_apart(recorded: dict[str, Recorded]) -> None:
    assert all(one.plan.kernels for one in recorded.values())
    by_mask = [one.plan for case, one in recorded.items() if "masked bf16 d64 b2 q150" in case]
    assert len(set(by_mask)) == len(by_mask) > 5


def backward_of(one: Recorded) -> dict[str, Any]:
    """Return the plan of the backward of a case; an empty dict if the case has no backward."""
    return next((entry["plan"] for entry in one.plans if entry.get("call") == "bwd"), {})


def splits_queries(one: Recorded) -> bool:
    """Tell if blocks share the queries of a key tile."""
    return bool(backward_of(one).get("query_split", 1) > 1)


def stores_ds(one: Recorded) -> bool:
    """Tell if dQ comes from a stored dS."""
    return bool(backward_of(one).get("spill"))


def splits_a_cache(one: Recorded) -> bool:
    """Tell if the keys of caches have more splits than the GPU has multiprocessors."""
    return any(entry.get("shares", 0) > H200.sm_count for entry in one.plans)


# Each rule: its file, its text, a wrong replacement, and the cases that it affects.
PLANTED: Final[dict[str, tuple[str, str, str, Callable[[Recorded], bool]]]] = {
    "cache": ("host/decode_splits.h", "SPLITS_PER_SM = 2", "SPLITS_PER_SM = 1", splits_a_cache),
    "what may be stored": ("host/plan.cpp", "has_dq_gemm && budget > 0", "false", stores_ds),
    "splits": ("host/splits.h", "LEAST_SAVED = 4", "LEAST_SAVED = 1 << 20", splits_queries),
}


@pytest.mark.parametrize("fault", PLANTED.values(), ids=PLANTED)
def test_a_planted_rule_changes_the_plans_of_its_own_cases_alone(
    tmp_path: Path,
    folder: Path,
    recorded: dict[str, Recorded],
    fault: tuple[str, str, str, Callable[[Recorded], bool]],
) -> None:
    name, old, new, concerns = fault
    csrc = tmp_path / "csrc"
    shutil.copytree(SOURCES, csrc)
    layout = csrc.parent / LAYOUT.relative_to(ROOT)  # csrc/headers.py reads it
    layout.parent.mkdir(parents=True)
    shutil.copy(LAYOUT, layout)
    text = (csrc / name).read_text(encoding="utf-8")
    assert text.count(old) == 1
    (csrc / name).write_text(text.replace(old, new), encoding="utf-8")
    planted = run_dry(H200, find_archs(reference()), folder, csrc)
    changed = {case for case, one in planted.items() if one.plan != recorded[case].plan}
    own = {case for case, one in recorded.items() if concerns(one)}
    assert 0 < len(own) < len(recorded)
    assert changed == own


# --- What the check says --------------------------------------------------------------------------


def test_a_case_of_another_plan_is_named_and_a_new_one_is_no_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, *others = reference().fingerprints
    told = {one.case: CasePlan(one.plan) for one in reference().fingerprints}
    kept = tuple(replace(one, code=hash_code((), {})) for one in (first, second))
    partial = replace(reference(), fingerprints=kept)
    monkeypatch.setattr("ci.dry_run.check.find_plans", lambda *_: told)
    assert find_unrecorded(partial, told) == sorted(one.case for one in others)
    told[second.case] = CasePlan("another")
    (problem,) = check((partial,))
    assert "1 cases have another plan" in problem
    assert problem.endswith(f"`{second.case}`")
    assert f"{len(others)} cases not recorded" in capsys.readouterr().out
