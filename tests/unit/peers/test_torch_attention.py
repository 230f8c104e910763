"""torch's tests with our provider: drawn cases and served calls; no GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

from flash_dist.toolkit.make.project import ROOT
from tests.peers import torch_attention
from tests.peers.torch_attention import KNOWN, Result, Sample, draw, find_own, report

if TYPE_CHECKING:
    from pathlib import Path

# Stub of flash_dist: it does not support dropout, and returns a wrong result for 7.
PROVIDER = """\
from . import calls

def _forward(x, dropout_p=0.0):
    if dropout_p:
        calls.tell("dropout")
        return None
    return 0 if x == 7 else x

_KERNELS = {"forward": _forward}
installed = []

class Registration:
    def __init__(self, key):
        assert key == "CPU"
        installed.append(_KERNELS["forward"])
"""
# Stub of torch's test file. Its operator calls the installed provider, if any. Its own result for 9
# is wrong.
TESTS = """\
import sys
import pytest

def attend(x, dropout_p=0.0):
    provider = sys.modules.get("flash_dist.integrations.torch_sdpa.provider")
    for forward in provider.installed if provider else ():
        result = forward(x, dropout_p)
        if result is not None:
            return result
    return 0 if x == 9 else x

def make(x, **options):
    return lambda self: self.check(attend(x, **options), x)

class TestVarlenAttentionCPU:
    def check(self, got, wanted):
        assert got == wanted
    def test_refused(self):
        self.check(attend(9, 0.5), 9)
    def test_elsewhere(self):
        pass
    def test_fused_sdp_priority_order(self):
        self.check(attend(7), 7)
    def test_attend(self): ...

for x in (1, 2, 7):
    setattr(TestVarlenAttentionCPU, f"test_attend_x_{x}_dropout_p_0_0", make(x))
    setattr(TestVarlenAttentionCPU, f"test_attend_x_{x}_dropout_p_0_22", make(x, dropout_p=0.22))
del TestVarlenAttentionCPU.test_attend

class TestOthersCPU:
    def test_of_no_attention(self):
        assert False
"""


# Stubs for --masks: flash_dist.sdpa returns a wrong result for 7, torch's function for 9.
REPLACEMENT = """\
from types import SimpleNamespace
from torch.nn import functional

own = functional.scaled_dot_product_attention

def _find_call(x, mask):
    return "masks of no use" if mask == "odd" else (x, SimpleNamespace(scores=mask))

def attend(x, problem):
    return 0 if x == 7 else x

def tell(reason):
    raise AssertionError("replaced by the program")

def attend_or_leave(x, attn_mask=None):
    call = _find_call(x, attn_mask)
    if isinstance(call, str):
        tell(call)
        return own(x, attn_mask)
    return attend(*call)

class sdpa:
    def __enter__(self):
        functional.scaled_dot_product_attention = attend_or_leave
    def __exit__(self, *error):
        functional.scaled_dot_product_attention = own
"""
BACKENDS = """\
fused = [True]
def flash_sdp_enabled(): return fused[0]
def mem_efficient_sdp_enabled(): return False
def cudnn_sdp_enabled(): return False
"""
MASK_TESTS = """\
from torch.backends import cuda
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

class TestSDPACPU:
    def test_imported(self):
        assert scaled_dot_product_attention(9, attn_mask=0.5) == 9
    def test_wrong(self):
        assert functional.scaled_dot_product_attention(7, attn_mask=0.5) == 7
    def test_left(self):
        assert functional.scaled_dot_product_attention(9, attn_mask="odd") == 9
    def test_reference(self):
        cuda.fused[0] = False
        want = scaled_dot_product_attention(7, attn_mask=0.5)
        cuda.fused[0] = True
        assert want == 7
    def test_scaled_dot_product_attention(self):  # the reference is none of torch's functions
        cuda.fused[0] = False
        got = scaled_dot_product_attention(9, attn_mask=None if cuda is None else 0.5)
        cuda.fused[0] = True
        assert got == 9
    def test_plain(self):
        assert scaled_dot_product_attention(1, attn_mask=None) == 2

class TestSDPAFailureModesCPU:
    def test_refused(self):
        assert scaled_dot_product_attention(1, attn_mask=0.5) == 2
"""


def write_packages(site: Path) -> None:
    """Write stubs of flash_dist, and of the parts of torch that the program asks."""
    integration = {"provider": PROVIDER, "calls": "", "replacement": REPLACEMENT}
    attention = (
        "def scaled_dot_product_attention(x, attn_mask=None):\n    return 0 if x == 9 else x\n"
    )
    for name, modules in {
        "flash_dist/integrations/torch_sdpa": integration,
        "torch/testing/_internal": {"common_cuda": ""},
        "torch/nn": {"functional": attention},
        "torch/backends": {"cuda": BACKENDS},
        "torch": {"compiler": "def is_compiling(): return False\n"},
    }.items():
        folder = site / name
        folder.mkdir(parents=True, exist_ok=True)
        for package in (folder, *folder.parents[:2]):
            (package / "__init__.py").write_text("")
        for module, text in modules.items():
            (folder / f"{module}.py").write_text(text)
    (site / "flash_dist/__init__.py").write_text(
        "def sdpa():\n"
        "    from flash_dist.integrations.torch_sdpa.replacement import sdpa\n"
        "    return sdpa()\n"
    )


def run_tests(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the tests in a folder with stubs of both packages, as the program's user does."""
    (folder / "test_varlen_attention.py").write_text(TESTS)
    write_packages(folder / "site")
    program = str(ROOT / torch_attention.__file__)
    return subprocess.run(
        [sys.executable, program, str(folder), "--device=cpu", *options, "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(folder / "site")},
    )


def test_served_calls_are_counted_and_failures_of_torchs_own_kernels_are_separate(
    tmp_path: Path,
) -> None:
    done = run_tests(tmp_path, "-n", "2")  # both processes are counted
    assert done.returncode == 1, done.stdout + done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "served test_attend: 1 failed, 2 passed" in lines
    assert "served all 4: 2 failed, 2 passed" in lines
    assert "passed on test_attend: 3 passed" in lines
    assert "passed on test_refused: 1 failed" in lines
    assert "no flash all 1: 1 passed" in lines
    assert "calls 4 served; passed on: 4 dropout" in lines
    assert "failed 3, of which 1 with the provider alone" in lines
    cls = "failed TestVarlenAttentionCPU::"
    assert (
        f"{cls}test_attend_x_7_dropout_p_0_0 (served; alone): AssertionError: assert 0 == 7"
        in lines
    )
    too = "torch's own kernels fail, too"
    assert f"{cls}test_refused (passed on; {too}): AssertionError: assert 0 == 9" in lines
    known = KNOWN["test_fused_sdp_priority_order"]
    assert (
        f"{cls}test_fused_sdp_priority_order (served; {known}): AssertionError: assert 0 == 7"
        in lines
    )


def test_masks_are_served_by_the_replaced_function_and_references_are_torchs(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_transformers.py").write_text(MASK_TESTS)
    done = run_tests(tmp_path, "--masks")
    assert done.returncode == 1, done.stdout + done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "served all 3: 1 failed, 2 passed" in lines, done.stdout + done.stderr
    assert "served test_scaled_dot_product_attention: 1 passed" in lines
    assert "passed on all 2: 1 failed, 1 passed" in lines
    assert "no flash all 0: none" in lines
    reference = "1 the reference: the math backend alone is enabled"
    counts = "calls 3 served, 3 of them with a float mask; passed on:"
    assert any(
        line in lines
        for line in (
            f"{counts} 1 masks of no use, {reference}",
            f"{counts} {reference}, 1 masks of no use",
        )
    )
    assert "failed 2, of which 1 with the provider alone" in lines
    assert any("test_wrong (served; alone)" in line for line in lines)


def test_cases_are_drawn_by_a_seed_and_those_with_dropout_apart(tmp_path: Path) -> None:
    done = run_tests(tmp_path, "--cases=1", "--dropout=2", "--seed=3")
    assert "passed on  test_attend: 2 passed" in done.stdout, done.stdout + done.stderr
    assert "served     test_attend: 1 " in done.stdout


def test_nothing_is_begun_once_the_time_is_over(tmp_path: Path) -> None:
    done = run_tests(tmp_path, "--seconds=0")
    counts = re.findall(r" all (\d+):", done.stdout)
    assert sorted(counts) == ["0", "0", "1"], done.stdout + done.stderr


def test_a_run_that_our_kernels_served_no_call_of_is_no_success(tmp_path: Path) -> None:
    done = run_tests(tmp_path, "--cases=0", "--dropout=1")
    assert "calls      0 served" in done.stdout
    assert done.returncode == 1


def test_a_folder_without_the_files_is_said_to_have_none(tmp_path: Path) -> None:
    program = str(ROOT / torch_attention.__file__)
    command = [sys.executable, program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "there is none of test_varlen_attention.py and test_transformers.py" in done.stderr


def test_a_sample_is_the_same_for_a_seed_and_every_part_of_it_has_all_tests() -> None:
    tests = ["test_a"] * 90 + ["test_b"] * 90
    names = [f"{test}_dropout_p_0_0_{number}" for number, test in enumerate(tests)]
    drawn = draw(names, tests, Sample(cases=40, dropout=0, seed="1"))
    assert drawn == draw(names, tests, Sample(cases=40, dropout=0, seed="1"))
    assert drawn != draw(names, tests, Sample(cases=40, dropout=0, seed="2"))
    assert len(set(drawn)) == 80
    assert {tests[place] for place in drawn[:20]} == {"test_a", "test_b"}


def test_a_failure_that_the_second_run_did_not_come_to_is_ours() -> None:
    failed = Result("cls::test", "test", "failed", "wrong", 1, {})
    assert find_own([failed], []) == [failed]
    assert find_own([failed], [failed]) == []
    assert any("alone" in line for line in report([failed], []))
