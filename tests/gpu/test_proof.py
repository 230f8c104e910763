"""The selftest of doctor on real GPUs: a dead child, equal GPUs, a fleet with a wrong rank."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from flash_dist.proof.cases import Kernels, make_cases
from flash_dist.proof.inputs import Inputs
from flash_dist.toolkit.checks.environment import gather_gpus
from flash_dist.toolkit.doctor.proof import Proof
from flash_dist.toolkit.machine.installed import read_installed
from flash_dist.toolkit.selftest.run import CHILD

TESTS = Path(__file__).resolve().parents[1]
TIMEOUT = 600.0
NO_PAIR = "needs two GPUs"

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_pair = pytest.mark.skipif(torch.cuda.device_count() < 2, reason=NO_PAIR)


def make_proof(*child: str) -> Proof:
    environment = gather_gpus(read_installed())
    return Proof(environment, runs=2, timeout=TIMEOUT, child=child or CHILD)


def run_fleet(rounds: int, **environment: str) -> subprocess.CompletedProcess[str]:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2")
    program = (str(TESTS / "wrong_fleet.py"), "2", str(rounds))
    return subprocess.run(
        [sys.executable, *launcher, *program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT,
    )


def test_a_kernel_that_aborts_in_the_child_does_not_take_the_parent_down() -> None:
    gpu = gather_gpus().cuda.gpus[0]
    result = make_proof(str(TESTS / "aborting_child.py")).run(gpu)
    assert result.status == "fail"
    assert result.id in {"selftest-error", "selftest-crashed"}
    assert float(torch.ones(8, device="cuda").sum()) == 8.0


def test_two_runs_of_a_gpu_have_the_same_fingerprints() -> None:
    proof = make_proof()
    gpu = gather_gpus().cuda.gpus[0]
    for _ in range(2):
        result = proof.run(gpu)
        assert result.status == "ok", result
        assert result.data["untested_families"] == []
    together = proof.compare_gpus()
    assert together is not None
    assert together.status == "ok"
    assert proof.proven[0][2] == proof.proven[1][2]
    assert len(proof.proven[0][2]) == result.data["cases"]


@needs_pair
def test_two_equal_gpus_compute_the_same_bits() -> None:
    proof = make_proof()
    for gpu in gather_gpus().cuda.gpus[:2]:
        assert proof.run(gpu).status == "ok"
    together = proof.compare_gpus()
    assert together is not None
    assert together.summary == "all 2 GPUs computed the same bits"


@needs_pair
@pytest.mark.alone  # would wait for other tests on the GPU
def test_two_gpus_are_proven_at_once_and_share_what_is_right() -> None:
    proof = Proof(gather_gpus(read_installed()), runs=30, timeout=TIMEOUT)
    gpus = gather_gpus().cuda.gpus[:2]
    began = time.monotonic()
    with proof.side_by_side(gpus):
        results = [proof.run(gpu) for gpu in gpus]
    seconds = time.monotonic() - began
    assert [result.status for result in results] == ["ok", "ok"], results
    together = proof.compare_gpus()
    assert together is not None
    assert together.status == "ok"
    assert seconds < 0.8 * sum(result.data["seconds"] for result in results)


@pytest.mark.parametrize("dtype_name", ["fp16", "bf16", "fp32"])
def test_the_inputs_made_on_a_gpu_are_those_made_on_the_cpu(dtype_name: str) -> None:
    case = make_cases([Kernels(dtype_name, 128, 128)], 0)[1]
    here, there = (Inputs.make(case, torch.device(name)) for name in ("cpu", "cuda"))
    for name in ("q", "k", "v", "dout"):
        assert torch.equal(getattr(here, name), getattr(there, name).cpu()), name


@needs_pair
def test_of_two_ranks_that_always_disagree_none_is_accused() -> None:
    done = run_fleet(1)
    assert done.returncode
    assert "majority" in done.stdout
    assert "fleet-disagrees" in done.stdout


@needs_pair
def test_rounds_find_the_wrong_rank(tmp_path: Path) -> None:
    done = run_fleet(2, TEST_FLIPPED=str(tmp_path / "flipped"))
    assert done.returncode
    odd = next(line for line in done.stdout.splitlines() if "dk in" in line)
    assert odd.startswith("[fail]  rank 1")
    assert "PCI" in odd
    assert "GPU-" in odd
    assert "fleet-odd-gpu" in done.stdout
