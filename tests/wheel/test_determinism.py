"""The program that counts nondeterministic runs, tested on the CPU on short sequences."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "benchmarks" / "determinism.py"
SMALL = ("--device", "cpu", "--shorter", "128", "--runs", "2")
# Makes the last gradient differ in every third run.
PLANTED = """
import runpy, sys
import torch

calls = 0

def differentiate_wrongly(*arguments, grad=torch.autograd.grad):
    global calls
    calls += 1
    gradients = grad(*arguments)
    return (*gradients[:-1], gradients[-1] + (calls % 3 == 0)) if {condition} else gradients

torch.autograd.grad = differentiate_wrongly
sys.argv = {argv!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("scores", "runs"), [((), 128), (("--scores", "1"), 68)], ids=["", "bent"])
def test_runs_on_the_cpu_do_not_differ(scores: tuple[str, ...], runs: int) -> None:
    done = run(str(PROGRAM), *SMALL, *scores)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{runs} runs, 0 differ; " in done.stdout


@pytest.mark.parametrize(
    ("scores", "condition", "said"),
    [
        ((), "True", "one tile, bf16 causal d64, 1024 MB: 2 runs, 1 differ ("),
        (("--scores", "11"), "gradients[-1].dim() == 1", ", softcap sinks: 2 runs, 1 differ (8 "),
    ],
    ids=["dv", "dsinks"],
)
def test_a_run_with_another_bit_is_counted(
    scores: tuple[str, ...], condition: str, said: str
) -> None:
    argv = [str(PROGRAM), *SMALL, "--only", "one tile", *scores]
    done = run("-c", PLANTED.format(condition=condition, argv=argv))
    assert done.returncode == 1, done.stdout + done.stderr
    assert said in done.stdout


def test_digests_of_an_earlier_run_are_held_against(tmp_path: Path) -> None:
    bits = tmp_path / "bits.json"
    command = [str(PROGRAM), *SMALL, "--only", "one tile", "--bits", str(bits)]
    assert run(*command).returncode == 0
    (name,) = json.loads(bits.read_text())
    bits.write_text(json.dumps({name: "of others"}))
    done = run(*command)
    assert done.returncode == 1
    assert f"1 shapes, 1 have other bits than in {bits}\n  {name}\n" in done.stdout
