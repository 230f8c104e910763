"""Several GPUs in one machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import flash_dist
from flash_dist import flash_attn_func, last_variant
from tests.gpu.running import attend
from tests.masks import masked_problem
from tests.reference import Problem, assert_close, assert_same_bits, random_problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
PIPELINE = Path(__file__).parent / "pipeline.py"
RING = Path(__file__).parent / "ring.py"
CONTEXT_PARALLEL = Path(__file__).parent / "context_parallel.py"
DATA_PARALLEL = Path(__file__).parent / "data_parallel.py"


def move(problem: Problem, device: str) -> Problem:
    names = ("q", "k", "v", "dout", "visible", "dlse")
    tensors = {name: getattr(problem, name) for name in names}
    moved = {name: x.to(device) for name, x in tensors.items() if x is not None}
    return replace(problem, **moved)


@pytest.mark.parametrize("name", ["causal", "sixteen-blocks", "dense-per-head"])
def test_tensors_on_another_gpu_than_the_current_one_work(name: str, half: torch.dtype) -> None:
    problem = masked_problem(name, batch=2, seqlen_q=200, num_heads=4, dtype=half)
    there = move(problem, "cuda:1")
    assert torch.cuda.current_device() == 0
    result = attend(there, poison=False)
    assert torch.cuda.current_device() == 0
    assert all(x.device == torch.device("cuda:1") for x in result.values())
    assert last_variant()["fwd"]["device"] == 1
    assert_close(result, there)


@pytest.mark.parametrize("name", ["full", "sixteen-blocks", "dense-per-head"])
def test_equal_gpus_give_the_same_bits(name: str, half: torch.dtype) -> None:
    if len({torch.cuda.get_device_name(i) for i in range(2)}) > 1:
        pytest.skip("the two GPUs differ")
    problem = masked_problem(name, batch=2, seqlen_q=300, num_heads=4, num_heads_kv=2, dtype=half)
    first = attend(problem)
    second = attend(move(problem, "cuda:1"), poison=False)
    assert_same_bits(first, {name: x.cpu().cuda() for name, x in second.items()}, "cuda:0 and 1")


def test_one_compiled_function_takes_one_mask_on_two_gpus(any_half: torch.dtype) -> None:
    problem = masked_problem("dense-per-head", batch=2, seqlen_q=200, num_heads=4, dtype=any_half)
    mask = problem.options["mask"]
    torch._dynamo.reset()

    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attn_func(q, k, v, mask=mask)

    for device in ("cuda:0", "cuda:1", "cuda:0", "cuda:1"):
        there = move(problem, device)
        q, k, v = (x.detach().requires_grad_() for x in (there.q, there.k, there.v))
        out = attention(q, k, v)
        grads = torch.autograd.grad(out, (q, k, v), there.dout)
        result = dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))
        assert_close(result, there)
    assert counter.frame_count == 2, "one compilation for each device"


def test_tensors_on_two_gpus_are_refused() -> None:
    q = random_problem(seqlen_q=8).q
    with pytest.raises(
        ValueError, match="q and k must be on the same device, got cuda:0 and cuda:1"
    ):
        flash_attn_func(q, q.to("cuda:1"), q)


def require_gpus(count: int) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs, there are {torch.cuda.device_count()}")


def run_program(program: Path, *words: str, seconds: int = 200) -> dict[str, Any]:
    """Run a program in its own process, because the program may break its CUDA context."""
    package = str(Path(flash_dist.__file__).parents[1])
    try:
        result = subprocess.run(
            [sys.executable, str(program), *words],
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            env={**os.environ, "PYTHONPATH": package},
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no result after {seconds} s"}
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    if not lines:
        said = (result.stderr or result.stdout).strip().splitlines() or ["no output"]
        return {"error": f"exit status {result.returncode}: {said[-1]}"}
    return dict(json.loads(lines[-1]))


@pytest.mark.alone
def test_a_pipeline_over_two_gpus_shares_one_flex_mask(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours = run_program(PIPELINE, "flash_dist", seconds=60)
    theirs = run_program(PIPELINE, "flex", seconds=40)
    with capsys.disabled():
        print(f"\npipeline over two GPUs, flash_dist: {ours}")  # noqa: T201 - the record
        print(f"pipeline over two GPUs, FlexAttention: {theirs}")  # noqa: T201
    assert "error" not in ours, ours
    assert ours["same_bits_again"]
    for name, error in ours["errors"].items():
        assert error < 0.02, (name, error)


@pytest.mark.parametrize("gpus", [2, 4])
def test_a_ring_of_gpus_is_float64_attention(gpus: int, capsys: pytest.CaptureFixture[str]) -> None:
    require_gpus(gpus)
    found = run_program(RING, str(gpus))
    with capsys.disabled():
        print(f"\nring attention on {gpus} GPUs: {found}")  # noqa: T201 - the record
    assert "error" not in found, found
    limits = {"bfloat16": 0.02, "float16": 0.003, "float32": 1e-5}
    for name, one in found.items():
        assert one["differing"] == 0, name
        limit = next(limit for dtype, limit in limits.items() if dtype in name)
        assert max(one["errors"]["ring"].values()) < limit, (name, one["errors"])


def test_torchs_context_parallelism_runs_on_our_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_program(CONTEXT_PARALLEL)
    with capsys.disabled():
        print(f"\ncontext_parallel: {found}")  # noqa: T201 - the record
    assert "error" not in found, found
    for one in found.values():
        assert not one["same as torch's kernels"]  # other rounding
        assert one["differing"] == 0
        assert max(one["errors"].values()) < 0.02, one["errors"]


@pytest.mark.parametrize("gpus", [2, 4])
def test_data_parallel_training_has_the_same_losses_and_weights(
    gpus: int, capsys: pytest.CaptureFixture[str]
) -> None:
    require_gpus(gpus)
    pytest.importorskip("transformers")
    first, second = (run_program(DATA_PARALLEL, str(gpus)) for _ in range(2))
    with capsys.disabled():
        print(f"\nFSDP2 on {gpus} GPUs: {first}")  # noqa: T201 - the record
    assert "error" not in first, first
    assert first["losses"][-1] < first["losses"][0]
    assert first == second
