"""Runs our attention on a Problem."""

from __future__ import annotations

import gc
import os
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from flash_dist import flash_attn_func
from flash_dist.toolkit.loading.library import variants
from tests import scores
from tests.reference import Problem, find_faults

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tests.scores import Scored


def attend(problem: Problem, *, poison: bool = True, **options: Any) -> dict[str, torch.Tensor]:  # noqa: ANN401
    """Return out, lse, dq, dk, dv and other requested results; free memory is first set to NaN."""
    return _attend(problem, {}, {**problem.options, **options}, poison=poison)


def attend_scored(
    scored: Scored,
    *,
    poison: bool = True,
    **options: Any,  # noqa: ANN401 - of flash_attn_func
) -> dict[str, torch.Tensor]:
    """Return what `attend` returns, and gradients of sinks and bias."""
    problem = scored.problem
    assert problem.dlse is not None
    given = {**problem.options, **scored.options, **options}
    return _attend(problem, scored.learned, given, poison=poison)


def _attend(
    problem: Problem, learned: dict[str, torch.Tensor], options: dict[str, Any], *, poison: bool
) -> dict[str, torch.Tensor]:
    q, k, v = leaves = [x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    names = {"sinks": "learnable_sink", "bias": "bias"}
    for name, x in learned.items():
        leaves.append(x.detach().requires_grad_())
        options = {**options, names[name]: leaves[-1]}
    if poison:
        poison_memory(problem.q.device)
    scale = problem.softmax_scale
    out, lse, *rest = flash_attn_func(q, k, v, softmax_scale=scale, return_lse=True, **options)
    if poison:
        poison_memory(problem.q.device)
    outputs = (out,) if problem.dlse is None else (out, lse)
    given = (problem.dout,) if problem.dlse is None else (problem.dout, problem.dlse)
    grads = torch.autograd.grad(outputs, leaves, given)
    found = *scores.NAMES, *(f"d{name}" for name in learned)
    result = dict(zip(found, (out.detach(), lse.detach(), *grads), strict=True))
    return result | dict(zip(("max_logit",), rest, strict=False))


def check(problems: Iterable[Problem], **options: Any) -> None:  # noqa: ANN401 - of flash_attn_func
    """Run every problem; fail if a result is wrong, and describe the wrong results."""
    faults: list[str] = []
    for problem in problems:
        faults += find_faults(attend(problem, **options), problem)
    shown = "\n".join(faults[:12])
    assert not faults, f"{len(faults)} tensors are off:\n{shown}"


def has_whole_shared_memory() -> bool:
    """Tell if kernels may use all shared memory; with less, some tests are skipped."""
    return "FLASH_DIST_SMEM_LIMIT" not in os.environ


def require_smaller_plans() -> None:
    """Skip the test unless Hopper's code also has the tiles of smaller GPUs."""
    if "flash_dist_fwd_bf16_d128_smem64_sm90a" not in {one["symbol"] for one in variants()}:
        pytest.skip("this wheel was built without FLASH_DIST_EVERY_PLAN=ON")


def runs_on_hopper(family: str) -> bool:
    """Tell if a family for Hopper is built in and runs here. PTX builds have no such family."""
    on_hopper = torch.cuda.get_device_capability() == (9, 0) and has_whole_shared_memory()
    return on_hopper and any(one["family"] == family for one in variants())


def poison_memory(device: torch.device) -> None:
    """Fill free blocks of torch's allocator with 0xff bytes: NaN in every format."""
    if device.type != "cuda":
        return
    blocks = [
        torch.full((size,), 255, dtype=torch.uint8, device=device)
        for size in (1 << 16, 1 << 20, 1 << 24) * 2
    ]
    del blocks


@contextmanager
def workspace(megabytes: int) -> Iterator[None]:
    """Set the workspace budget for a scope."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASH_DIST_WORKSPACE_MB", str(megabytes))
        yield


@contextmanager
def no_wait_for_the_gpu() -> Iterator[None]:
    """In this scope, let torch raise an error instead of waiting for the GPU."""

    def set_mode(mode: str) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature")
            torch.cuda.set_sync_debug_mode(mode)

    try:
        set_mode("error")
        yield
    finally:
        set_mode("default")


def peak_of(call: Callable[[], object]) -> int:
    """Return the peak of the bytes that a call allocates.

    The backward's thread may free memory of the previous call during the measurement, which then
    looks smaller. The result is therefore the largest of several measurements.
    """
    call()  # one-time allocations happen here
    return max(_peak_of_one(call) for _ in range(3))


def _peak_of_one(call: Callable[[], object]) -> int:
    gc.collect()  # free the memory of failed tests now, not during the measurement
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = int(torch.cuda.memory_stats()["requested_bytes.all.current"])
    kept = call()
    torch.cuda.synchronize()
    peak = int(torch.cuda.memory_stats()["requested_bytes.all.peak"])
    del kept
    return peak - before
