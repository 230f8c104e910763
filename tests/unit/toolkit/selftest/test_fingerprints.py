"""Fingerprints: what is compared with what, and the file that keeps them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.doctor.proof import add_agreement
from flash_dist.toolkit.errors import FlashDistError
from flash_dist.toolkit.findings.proofs import SELFTEST_BITS_DIFFER
from flash_dist.toolkit.findings.result import CheckResult
from flash_dist.toolkit.selftest.fingerprints import (
    Fingerprint,
    Identity,
    Reference,
    Setting,
    compare_with,
    find_symbols,
    hash_code,
    make_fingerprints,
    merge_references,
    read_references,
    write_references,
)
from flash_dist.toolkit.selftest.report import CaseDigests, SelftestReport
from flash_dist.toolkit.targets.archs import Arch
from flash_dist.toolkit.targets.verdict import Build, Variant, read_size

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("out", "lse", "dq", "dk", "dv")
SETTING = Setting("9.0", 132, 232448, "planner")
DIGESTS = {name: f"{number:064x}" for number, name in enumerate(NAMES)}
CASE = Fingerprint("odd bf16 d64", 1 << 30, "code", "", DIGESTS)
OTHER = replace(CASE, case="full bf16 d64")
REFERENCE = Reference("NVIDIA H200", "2026-11-21", SETTING, {"fwd": "ab"}, (CASE, OTHER))
REPORT = SelftestReport(
    "0",
    30,
    2,
    selected={
        "fwd bf16 64": "fwd_sm90a",
        "bwd bf16 64": "bwd_sm90a",
        "fwd fp16 64": "fwd_fp16_sm90a",
        "fwd bf16 128": "fwd_compute80",
    },
    digests=(
        CaseDigests("odd bf16 d64", ["bf16", "64"], 7, DIGESTS),
        CaseDigests("odd bf16 d128", ["bf16", "128"], 7, DIGESTS),
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
        replace(SETTING, planner="another"),
    ],
)
def test_another_gpu_or_planner_is_never_compared(setting: Setting) -> None:
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
    [replace(CASE, code="x"), replace(CASE, budget=1), replace(CASE, driver="580.1")],
)
def test_other_code_budget_or_driver_is_never_compared(other: Fingerprint) -> None:
    wrong = replace(other, digests=dict.fromkeys(NAMES, "f" * 64))
    assert compare_with((REFERENCE,), SETTING, (wrong,)).compared == 0


def test_a_finding_of_the_selftest_itself_comes_first() -> None:
    wrong = replace(CASE, digests={**DIGESTS, "dk": "f" * 64})
    agreement = compare_with((REFERENCE,), SETTING, (wrong,))
    failed = CheckResult("fail", "bits differ", entry=SELFTEST_BITS_DIFFER)
    assert add_agreement(failed, agreement).id == "selftest-bits-differ"


def test_a_fingerprint_knows_the_code_of_all_kernels_that_may_serve_its_case() -> None:
    kernels = {"fwd_sm90a": "1", "bwd_sm90a": "2", "fwd_fp16_sm90a": "3", "fwd_compute80": "4"}
    native, jit = make_fingerprints(REPORT, Identity(kernels, "p"), "580.159.04")
    assert native.code == hash_code(("bwd_sm90a", "fwd_sm90a"), kernels)
    assert native.code != hash_code(("bwd_sm90a", "fwd_sm90a"), {**kernels, "bwd_sm90a": "9"})
    assert (native.driver, jit.driver) == ("", "580.159.04")


def variant(family: str, size: str, target: str = "sm_90a") -> Variant:
    """Return a kernel for bf16."""
    arch = Arch.parse(target)
    head_dim, head_dim_v = read_size(size)
    name = f"{family}_{size}_{arch.identifier}"
    return Variant(name, family, "bf16", head_dim, 227, arch, head_dim_v=head_dim_v)


def test_what_serves_bent_scores_alone_is_among_the_code_of_their_cases() -> None:
    variants = (
        variant("fwd", "64"),
        variant("fwd_sm90", "64"),
        variant("fwd_scored_sm90", "64"),
        variant("fwd_scored_sm90", "128"),
        variant("bwd_dkdv", "64"),
        variant("fwd", "64", "compute_80"),
    )
    build = Build("test", variants)
    selected = {"fwd bf16 64": "fwd_sm90_64_sm90a", "fwd bf16 128": "fwd_sm90_128_sm90a"}
    plain = CaseDigests("odd bf16 d64", ["bf16", "64"], 7, DIGESTS)
    scored = replace(plain, scored=True)
    assert find_symbols(plain, selected, build) == ("fwd_sm90_64_sm90a",)
    assert find_symbols(scored, selected, build) == (
        "fwd_64_sm90a",
        "fwd_scored_sm90_64_sm90a",
        "fwd_sm90_64_sm90a",
    )

    def code_of(one: CaseDigests, changed: str) -> str:
        kernels = {**dict.fromkeys((v.symbol for v in variants), "1"), changed: "2"}
        report = replace(REPORT, selected=selected, digests=(one,))
        (found,) = make_fingerprints(report, Identity(kernels, "p", build), "")
        return found.code

    changed = "fwd_scored_sm90_64_sm90a"
    assert code_of(plain, changed) == code_of(plain, "")
    assert code_of(scored, changed) != code_of(scored, "")


def test_a_role_without_a_kernel_of_a_size_counts_with_that_of_the_next_larger_one() -> None:
    selected = {
        "fwd bf16 48": "fwd_48",
        "fwd bf16 64": "fwd_64",
        "bwd_fused bf16 128": "fused_128",
        "bwd_fused bf16 64": "fused_64",
        "bwd_fused fp16 64": "fused_fp16",
        "bwd_dkdv bf16 32": "dkdv_32",
        "append bf16 256": "append_256",
        "mla bf16 576/512": "mla",
    }
    case = CaseDigests("odd bf16 d48", ["bf16", "48"], 7, DIGESTS)
    assert find_symbols(case, selected, None) == ("append_256", "fused_64", "fwd_48")
    latent = CaseDigests("latent bf16 d576v512", ["bf16", "576/512"], 7, DIGESTS)
    assert find_symbols(latent, selected, None) == ("mla",)


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
    newer = replace(REFERENCE, recorded="2027-01-01", setting=replace(SETTING, planner="new"))
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
        ('{"version": 2}', "version 1, .* 2 .*`{path}`"),
        ('{"version": 1, "references": [{}]}', "`{path}` is not "),
    ],
)
def test_a_broken_file_is_a_sentence(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "f.json"
    path.write_text(text)
    with pytest.raises(FlashDistError, match=said.replace("{path}", str(path))):
        read_references(path)
    with pytest.raises(FlashDistError, match="absent` does not exist"):
        read_references(tmp_path / "absent")


def test_json_of_a_reference_is_plain_data() -> None:
    assert Reference.from_json(json.loads(json.dumps(REFERENCE.to_json()))) == REFERENCE
