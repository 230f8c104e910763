"""Programs of benchmarks/ and examples/ that cannot run here end at once, with a sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ("batch_invariance", "decoding", "determinism", "overhead", "ring")


def run(program: Path) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if key != "RANK"}
    environ["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, str(program)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_without_a_gpu_is_a_sentence(name: str) -> None:
    done = run(ROOT / "benchmarks" / f"{name}.py")
    assert (done.returncode, done.stdout) == (1, "")
    first, _, hint = done.stderr.partition("\n\n")
    assert first == "error: nothing was measured: torch sees no GPU here"
    assert hint.startswith("hint: ")


def test_a_ring_that_torchrun_did_not_start_is_a_sentence() -> None:
    done = run(ROOT / "examples" / "ring.py")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ring.py is started by torchrun, which tells its rank\n\n")
    assert "hint: `torchrun --standalone --nproc-per-node 2 ring.py`" in done.stderr
