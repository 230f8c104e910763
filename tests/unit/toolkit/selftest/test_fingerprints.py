"""Fingerprints: their comparison, and their file."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from flash_dist.toolkit.doctor.proof import add_agreement
from flash_dist.toolkit.errors import KernelsError
from flash_dist.toolkit.findings.proofs import SELFTEST_BITS_DIFFER
from flash_dist.toolkit.findings.result import CheckResult
from flash_dist.toolkit.selftest.child import run_first
from flash_dist.toolkit.selftest.fingerprints import (
    Fingerprint,
    Reference,
    Setting,
    compare_with,
    hash_code,
    make_fingerprints,
    merge_references,
    read_references,
    write_references,
)
from flash_dist.toolkit.selftest.report import CaseDigests, CasePlan, SelftestReport

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAMES = ("out", "lse", "dq", "dk", "dv")
SETTING = Setting("9.0", 132, 232448)
DIGESTS = {name: f"{number:064x}" for number, name in enumerate(NAMES)}
CASE = Fingerprint("odd bf16 d64", "plan", "code", "", DIGESTS)
OTHER = replace(CASE, case="full bf16 d64")
REFERENCE = Reference("NVIDIA H200", "2026-11-21", SETTING, {"fwd": "ab"}, (CASE, OTHER))
REPORT = SelftestReport(
    "0",
    30,
    2,
    digests=(
        CaseDigests("odd bf16 d64", CasePlan("a plan", ("bwd_sm90a", "fwd_sm90a")), DIGESTS),
        CaseDigests("odd bf16 d128", CasePlan("another plan", ("fwd_compute80",)), DIGESTS),
    ),
)


def test_equal_bits_are_counted() -> None:
    agreement = compare_with((REFERENCE,), SETTING, (CASE, OTHER))
    assert agreement
    assert agreement.sentence == (
        "2 cases bit-identical to another NVIDIA H200, recorded 2026-11-21"
    )


def test_a_case_without_a_reference_is_said() -> None:
    new = replace(CASE, case="new")
    agreement = compare_with((REFERENCE,), SETTING, (CASE, new))
    assert agreement.sentence.endswith("; 1 cases have no reference")


def test_another_bit_names_case_and_tensor() -> None:
    wrong = replace(OTHER, digests={**DIGESTS, "dk": "f" * 64})
    agreement = compare_with((REFERENCE,), SETTING, (CASE, wrong))
    assert not agreement
    assert "1 of 2 cases differ" in agreement.sentence
    assert agreement.sentence.endswith("dk in `full bf16 d64`")
    result = add_agreement(CheckResult("ok", "2 cases"), agreement)
    assert (result.status, result.id) == ("fail", "fingerprint-differs")
    assert result.details[0] == "2 cases"


@pytest.mark.parametrize(
    "setting",
    [
        replace(SETTING, sm_count=114),
        replace(SETTING, compute_capability="10.0"),
        replace(SETTING, smem_limit=65536),
    ],
)
def test_another_gpu_is_never_compared(setting: Setting) -> None:
    wrong = replace(CASE, digests=dict.fromkeys(NAMES, "f" * 64))
    agreement = compare_with((REFERENCE,), setting, (wrong,))
    assert (bool(agreement), agreement.compared) == (True, 0)
    assert "no recorded fingerprints" in agreement.sentence


def test_a_part_of_a_gpu_says_that_its_multiprocessors_were_not_recorded() -> None:
    part = replace(SETTING, sm_count=60)
    wrong = replace(CASE, digests=dict.fromkeys(NAMES, "f" * 64))
    recorded = (REFERENCE, replace(REFERENCE, setting=replace(SETTING, sm_count=16)))
    agreement = compare_with(recorded, part, (wrong,))
    assert agreement
    assert "no recorded fingerprints" in agreement.sentence
    assert re.search(r"16 and 132 multiprocessors.* 60$", agreement.sentence)
    assert add_agreement(CheckResult("ok", "1 case"), agreement).status == "ok"


def test_all_that_is_recorded_says_of_how_many_multiprocessors() -> None:
    settings = {reference.gpu: reference.setting for reference in read_references()}
    assert settings["NVIDIA H200"].sm_count == 132
    assert all(setting.sm_count > 0 for setting in settings.values())


@pytest.mark.parametrize(
    "other",
    [replace(CASE, code="x"), replace(CASE, plan="x"), replace(CASE, driver="580.1")],
)
def test_other_code_plan_or_driver_is_never_compared(other: Fingerprint) -> None:
    wrong = replace(other, digests=dict.fromkeys(NAMES, "f" * 64))
    assert compare_with((REFERENCE,), SETTING, (wrong,)).compared == 0


def test_a_finding_of_the_selftest_itself_comes_first() -> None:
    wrong = replace(CASE, digests={**DIGESTS, "dk": "f" * 64})
    agreement = compare_with((REFERENCE,), SETTING, (wrong,))
    failed = CheckResult("fail", "bits differ", entry=SELFTEST_BITS_DIFFER)
    assert add_agreement(failed, agreement).id == "selftest-bits-differ"


def test_a_fingerprint_has_the_plan_and_the_code_of_the_kernels_that_ran() -> None:
    kernels = {"fwd_sm90a": "1", "bwd_sm90a": "2", "fwd_fp16_sm90a": "3", "fwd_compute80": "4"}
    native, jit = make_fingerprints(REPORT, kernels, "580.159.04")
    assert (native.plan, jit.plan) == ("a plan", "another plan")
    assert native.code == hash_code(("bwd_sm90a", "fwd_sm90a"), kernels)
    assert native.code != hash_code(("bwd_sm90a", "fwd_sm90a"), {**kernels, "bwd_sm90a": "9"})
    assert (native.driver, jit.driver) == ("", "580.159.04")


def test_a_plan_is_of_all_that_was_decided_and_of_the_inputs() -> None:
    plans: list[dict[str, Any]] = [
        {"call": "fwd"},
        {"kernel": "b"},
        {"call": "bwd", "splits": 2},
        {"kernel": "a"},
    ]
    plan = CasePlan.of(plans, {})
    assert plan.kernels == ("a", "b")
    others = [*plans[:2], {"call": "bwd", "splits": 3}, plans[3]]
    digests = {CasePlan.of(one, {}).digest for one in (plans, others, plans[::-1])}
    assert len(digests | {CasePlan.of(plans, {"mask": "digest"}).digest}) == 4
    reworded = [dict(reversed(one.items())) for one in plans]
    assert CasePlan.of(reworded, {}) == plan


class Doubled:
    """A case that doubles its input."""

    def run(self, inputs: int) -> dict[str, int]:
        return {"out": 2 * inputs}

    def describe_inputs(self, inputs: int) -> dict[str, int]:
        return {"input": inputs}


def test_the_plan_of_a_run_is_what_the_library_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def recorded() -> Iterator[list[dict[str, str]]]:
        plans: list[dict[str, str]] = []
        yield plans
        plans.append({"kernel": "double_sm90a"})

    monkeypatch.setattr("flash_dist.toolkit.selftest.child.recorded_plans", recorded)
    case: Any = Doubled()
    results, plan = run_first(case, 3, torch.device("cuda"))
    assert results == {"out": 6}
    assert plan == CasePlan.of([{"kernel": "double_sm90a"}], {"input": 3})
    assert plan.kernels == ("double_sm90a",)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "fingerprints.json"
    other = replace(REFERENCE, gpu="NVIDIA H100", fingerprints=())
    write_references(path, (REFERENCE, other))
    assert read_references(path) == (REFERENCE, other)
    text = path.read_text()
    assert sum("odd bf16 d64" in line for line in text.splitlines()) == 1
    write_references(path, read_references(path))
    assert path.read_text() == text


def test_the_same_gpu_recorded_again_takes_the_place_of_the_old(tmp_path: Path) -> None:
    newer = replace(REFERENCE, recorded="2027-01-01")
    jit = replace(REFERENCE, fingerprints=(replace(CASE, driver="580"),))
    older = replace(REFERENCE, kernels={"fwd": "cd"}, toolkit="12.4")
    merged = merge_references((REFERENCE, jit, older), (newer,))
    assert sorted(merged, key=str) == sorted((newer, jit, older), key=str)
    write_references(tmp_path / "f", merged)
    assert set(map(str, read_references(tmp_path / "f"))) == set(map(str, merged))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot read .*`{path}`"),
        pytest.param("[" * 100_000, "cannot read .*`{path}`", id="nested too deep"),
        ("[]", "`{path}` is not "),
        ('{"version": 1}', "version 2, .* 1 .*`{path}`"),
        ('{"version": 2, "references": [{}]}', "`{path}` is not "),
    ],
)
def test_a_broken_file_is_a_sentence(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "f.json"
    path.write_text(text)
    with pytest.raises(KernelsError, match=said.replace("{path}", str(path))):
        read_references(path)
    with pytest.raises(KernelsError, match="absent` does not exist"):
        read_references(tmp_path / "absent")


def test_json_of_a_reference_is_plain_data() -> None:
    assert Reference.from_json(json.loads(json.dumps(asdict(REFERENCE)))) == REFERENCE
