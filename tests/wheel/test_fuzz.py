"""The programs that draw random problems, tested on the CPU, each with planted faults."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PLANTED = """
import sys
from tests.fuzz import attention

def attend_wrongly(problem, attend=attention.attend, **options):
    result = attend(problem, **options)
    return {**result, "dk": result["dk"] * 1.01}

attention.attend = attend_wrongly
sys.exit(attention.main(["--device", "cpu", "--cases", "6"]))
"""
PLANTED_IN_SINKS = """
import sys
from tests.fuzz import attention

def attend_wrongly(scored, attend=attention.attend_scored, **options):
    result = attend(scored, **options)
    return {name: x * (1.01 if name == "dsinks" else 1) for name, x in result.items()}

attention.attend_scored = attend_wrongly
sys.exit(attention.main(["--device", "cpu", "--cases", "60", "--longest", "80"]))
"""
PLANTED_IN_DOCUMENTS = """
import sys
from tests.fuzz import attention

def attend_wrongly(packed, attend=attention.attend_packed, *, alibi_slopes=None, **options):
    if alibi_slopes is not None and alibi_slopes.dim() == 2:  # another document's
        alibi_slopes = alibi_slopes.roll(1, 0)
    result = attend(packed, alibi_slopes=alibi_slopes, **options)
    return {name: x * (1.01 if name == "dsinks" else 1) for name, x in result.items()}

attention.attend_packed = attend_wrongly
sys.exit(attention.main(sys.argv[1:]))
"""
PLANTED_IN_NEW = """
import sys
import torch
from tests.fuzz import attention

def attend_wrongly(scored, attend=attention.attend_scored, **options):
    {before}
    result = attend(scored, **options)
    {after}
    return result

attention.attend_scored = attend_wrongly
sys.exit(attention.main(sys.argv[1:]))
"""
# Statements before and after a call with newer features, and the expected message.
NEW_FAULTS = {
    "bias": (
        "",
        "result |= {'dbias': result['dbias'] * 1.01} if 'dbias' in result else {}",
        "dbias",
    ),
    "dropout": ("torch.manual_seed(1)", "", "out"),
    "max_logit": (
        "",
        "result |= {'max_logit': result['max_logit'] + 1e-3} if 'max_logit' in result else {}",
        "max_logit",
    ),
}
DRAWN = """
from tests.fuzz.attention import New, draw_case

def has_new(case):
    return case.bias or case.dropout_p or case.with_max_logit or case.head_dim > 256

for share in (0.5, 1.0):
    cases = [draw_case(number, new=New(share)) for number in range(400)]
    assert cases == [draw_case(number, new=New(share)) for number in range(400)]
    print(sum(map(bool, map(has_new, cases))), len(set(map(str, cases))))
assert {case.head_dim for case in cases} & {*range(257, 512)}
assert not [case for case in cases if case.dtype == "fp32" and case.head_dim > 256]
"""
PLANTED_IN_A_CACHE = """
import sys
from flash_dist.kernels.budget import workspace_budget
from tests.fuzz import decode

def attend_wrongly(problem, tensors, attend=decode.attend):
    result = attend(problem, tensors)
    if {condition}:
        result.{result}.view(-1)[-1:] += 1
    return result

decode.attend = attend_wrongly
sys.exit(decode.main(["--device", "cpu", "--cases", "12", "--longest", "40"]))
"""
PLANTED_HANG = """
import sys, time
from tests.fuzz import attention

for name in ("attend", "attend_packed", "attend_scored"):
    setattr(attention, name, lambda *_, **__: time.sleep(99))
sys.exit(attention.main(["--device", "cpu", "--only", "1", "--patience", "0.5"]))
"""
# Each fault: a condition, the result whose last element then changes, and the expected message.
CACHE_FAULTS = {
    "alone": ("tensors.q.shape[0] < problem.batch", "out", " alone, 1536 MiB: other bits of out"),
    "in pages": (
        "(tensors.table is None) != (problem.page == 0)",
        "lse",
        "pages, 0 MiB: other bits of lse",
    ),
    "without workspace": (
        "workspace_budget() == 0",
        "values",
        "again, 0 MiB: other bits of values",
    ),
}


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Copy the tests out of the source tree, because its flash_dist has no kernels."""
    shutil.copytree(TESTS, tmp_path / "tests", ignore=shutil.ignore_patterns("unit", "*.pyc"))
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_random_problems_match_float64_on_the_cpu(copied: Path) -> None:
    done = run(copied, "-m", "tests.fuzz.attention", "--device", "cpu", "--cases", "25")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("25 cases of seed 0, 0 findings\n")


def test_a_gradient_one_percent_off_is_found(copied: Path) -> None:
    done = run(copied, "-c", PLANTED)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "dk max error" in done.stdout


def test_a_gradient_of_sinks_one_percent_off_is_found(copied: Path) -> None:
    done = run(copied, "-c", PLANTED_IN_SINKS)
    assert done.returncode == 1, done.stdout + done.stderr
    findings = done.stdout.splitlines()[:-1]
    assert findings
    assert all("dsinks is off by" in finding for finding in findings)


@pytest.mark.parametrize(
    ("number", "said"), [("110", "alibi-batch of documents"), ("149", "dsinks is off by")]
)
def test_scores_of_documents_that_are_off_are_found(number: str, said: str, copied: Path) -> None:
    options = ("--device", "cpu", "--longest", "80", "--only", number)
    assert run(copied, "-m", "tests.fuzz.attention", *options).returncode == 0
    done = run(copied, "-c", PLANTED_IN_DOCUMENTS, *options)
    assert done.returncode == 1, done.stdout + done.stderr
    assert said in done.stdout


def test_half_of_the_cases_have_a_newer_feature_or_all(copied: Path) -> None:
    done = run(copied, "-c", DRAWN)
    assert done.returncode == 0, done.stderr
    half, distinct, every, distinct_new = map(int, done.stdout.split())
    assert 160 < half < 240
    assert (distinct, every, distinct_new) == (400, 400, 400)


@pytest.mark.parametrize(("before", "after", "said"), NEW_FAULTS.values(), ids=NEW_FAULTS)
def test_a_newer_feature_that_is_off_is_found(
    before: str, after: str, said: str, copied: Path
) -> None:
    options = ("--device", "cpu", "--longest", "80", "--cases", "40", "--only-new")
    done = run(copied, "-c", PLANTED_IN_NEW.format(before=before, after=after), *options)
    assert done.returncode == 1, done.stdout + done.stderr
    findings = done.stdout.splitlines()[:-1]
    assert len([one for one in findings if f": {said} is off by" in one]) > 1


def test_two_processes_share_the_same_cases(copied: Path) -> None:
    arguments = ("--device", "cpu", "--cases", "4", "--jobs", "2")
    done = run(copied, "-m", "tests.fuzz.attention", *arguments)
    assert done.stdout.endswith("4 cases of seed 0, 0 findings\n"), done.stdout + done.stderr


def test_a_case_that_does_not_end_is_named_and_ends_the_program(copied: Path) -> None:
    done = run(copied, "-c", PLANTED_HANG)
    assert done.returncode == 3, done.stdout + done.stderr
    assert done.stdout.startswith("case 1: ")
    assert ": no end after 0.5 s\n" in done.stdout
    assert "in run_case" in done.stdout


def test_no_case_at_all_is_a_failure(copied: Path) -> None:
    done = run(copied, "-m", "tests.fuzz.attention", "--device", "cpu", "--seconds", "0")
    assert done.returncode == 1
    assert done.stdout == "0 cases of seed 0, 0 findings\n"


def test_sequences_of_random_caches_have_the_same_bits_on_the_cpu(copied: Path) -> None:
    arguments = ("--device", "cpu", "--cases", "12", "--longest", "40")
    done = run(copied, "-m", "tests.fuzz.decode", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "12 cases of seed 0, 0 findings\n"


@pytest.mark.parametrize(("condition", "result", "said"), CACHE_FAULTS.values(), ids=CACHE_FAULTS)
def test_a_bit_that_follows_from_the_way_of_asking_is_found(
    condition: str, result: str, said: str, copied: Path
) -> None:
    planted = PLANTED_IN_A_CACHE.format(condition=condition, result=result)
    done = run(copied, "-c", planted)
    assert done.returncode == 1, done.stdout + done.stderr
    assert said in done.stdout


def test_digests_are_held_against_those_of_an_earlier_run(copied: Path) -> None:
    bits = copied / "bits.json"
    command = ["-m", "tests.fuzz.attention", "--device", "cpu", "--cases", "3", "--bits", str(bits)]
    assert run(copied, *command).stdout == "3 cases of seed 0, 0 findings\n"
    known = json.loads(bits.read_text())
    first = next(iter(known))
    bits.write_text(json.dumps({**known, first: "of others"}))
    done = run(copied, *command)
    assert done.returncode == 1
    assert done.stdout == (
        f"3 cases are held against {bits}\n"
        f"{first}: other bits than in {bits}\n"
        "3 cases of seed 0, 1 findings\n"
    )
