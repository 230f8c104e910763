"""Measure contenders shape by shape. One that fails is an entry with its reason."""

from __future__ import annotations

import gc
import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from .agreement import (
    FLOAT64_LIMIT,
    LIMITS,
    compute,
    measure_against_float64,
    measure_errors,
)
from .contenders.failures import CannotRun, describe_failure, is_fatal
from .contenders.names import OURS, OURS_DETERMINISTIC, OWN, add_ours
from .contenders.problem import Problem
from .contenders.table import bind, make_attend
from .launched import launched_kernels
from .results import Entry, Row
from .timing import RunFailed, time_interleaved
from .workload import make_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .contenders.ours import Attend
    from .contenders.problem import Tensor
    from .contenders.shapes import Shape
    from .timing import Clock

    Run = Callable[[], object]


@dataclass(frozen=True)
class Plan:
    """What to measure, and for how many seconds each phase of each shape."""

    shapes: tuple[Shape, ...]
    peers: tuple[str, ...]
    phases: tuple[str, ...]
    states: tuple[str, ...]
    seconds: float


class ContextLostError(Exception):
    """The GPU takes no more work from this process."""


def phases_of(shape: Shape, phases: tuple[str, ...]) -> tuple[str, ...]:
    """Return the phases of a shape; a stack has only the checkpointed one."""
    return tuple(x for x in phases if shape.layers == 1 or x == "checkpointed")


def measure(plan: Plan, device: torch.device, clock: Clock) -> Iterator[Row]:
    """Yield a row per shape and state of L2.

    Raises:
        ContextLostError: After the row in which it happened.
    """
    torch.set_float32_matmul_precision("highest")  # no TF32 for anyone who asks torch
    for shape in plan.shapes:
        phases = phases_of(shape, plan.phases)
        if not phases:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bench = ShapeBench(shape, plan.peers, device, clock)
            for state in plan.states:
                for phase in phases:
                    bench.time_phase(phase, seconds=plan.seconds, cold=state == "cold")
                yield bench.finish_row(state)
                if bench.lost:
                    raise ContextLostError(bench.lost)
        del bench
        release_memory(device)


def release_memory(device: torch.device) -> None:
    """Give back what the last shape used."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class ShapeBench:
    """One shape and all who take part; tried out and compared on creation."""

    def __init__(
        self, shape: Shape, peers: tuple[str, ...], device: torch.device, clock: Clock
    ) -> None:
        self.shape = shape
        self.device = device
        self.clock = clock
        self.findings: list[str] = []
        self.lost = ""
        self.entries = {name: Entry(name) for name in add_ours(peers)}
        self.attends: dict[str, Attend] = {}
        self.problem = Problem.draw(shape, device)
        results: dict[str, tuple[Tensor, ...]] = {}
        for name in self.entries:
            self._attempt(name, partial(self._try_out, name, results))
            if name != OURS:
                results.pop(name, None)

    def _attempt(self, name: str, step: Run) -> None:
        """Take a step for a contender; if it fails, the contender is out."""
        if self.lost:
            self._drop(name, f"not measured: {self.lost}")
            return
        try:
            step()
        except Exception as error:  # noqa: BLE001 - any way to fail is a result
            self._fail(name, error)

    def _fail(self, name: str, error: Exception) -> None:
        reason = describe_failure(error)
        if is_fatal(error):
            self.lost = f"the GPU takes no more work after {name} on {self.shape.name}"
        if name in OWN:
            self.findings.append(f"{name} failed on {self.shape.name}: {reason}")
        self._drop(name, reason)

    def _drop(self, name: str, reason: str) -> None:
        self.entries[name] = replace(self.entries[name], reason=reason)
        self.attends.pop(name, None)
        if not self.lost:
            release_memory(self.device)

    def _try_out(self, name: str, results: dict[str, tuple[Tensor, ...]]) -> None:
        """Run it once, compare with ours, list its kernels."""
        attend = make_attend(name, self.problem)
        kernels: tuple[str, ...] = ()

        def run() -> object:
            return compute(attend, self.problem)

        results[name] = compute_as(name, attend, self.problem)
        if self.device.type == "cuda":
            kernels = profile(bind(name, run))
        if name == "flex" and kernels and not any("triton" in kernel for kernel in kernels):
            message = f"flex_attention ran eagerly (kernels {', '.join(kernels)})"
            raise CannotRun(message)
        errors = self._compare(name, results)
        self.entries[name] = replace(self.entries[name], kernels=kernels, errors=errors)
        self.attends[name] = attend

    def _compare(self, name: str, results: dict[str, tuple[Tensor, ...]]) -> dict[str, float]:
        shape = self.shape
        if name == OURS:
            if shape.dtype != "fp32" or shape.documents:
                return {}
            errors = measure_against_float64(results[OURS], self.problem)
            limit, whom = FLOAT64_LIMIT, "float64"
        elif OURS in results:
            errors = measure_errors(results[name], results[OURS])
            limit, whom = LIMITS[shape.dtype], OURS
            if name == OURS_DETERMINISTIC:
                limit = 0.0  # torch's mode changes nothing
        else:
            return {}
        for tensor, error in errors.items():
            if not error <= limit:
                self.findings.append(
                    f"{name} and {whom} differ on {shape.name}: {tensor} by {error:.2g}, "
                    f"at most {limit:g} is allowed"
                )
        return errors

    def time_phase(self, phase: str, *, seconds: float, cold: bool) -> None:
        """Time one phase of all that are still in."""
        runs: dict[str, Run] = {}
        for name in tuple(self.attends):
            self._attempt(name, partial(self._prepare, name, phase, runs))
        while runs:
            try:
                timings = time_interleaved(runs, self.clock, seconds=seconds, cold=cold)
            except RunFailed as failed:
                del runs[failed.name]
                self._fail(failed.name, failed.error)
                if self.lost:
                    break
                continue
            for name, timing in timings.items():
                self.entries[name] = self.entries[name].with_timing(phase, timing)
            break

    def _prepare(self, name: str, phase: str, runs: dict[str, Run]) -> None:
        run = make_run(name, self.attends[name], self.problem, phase)
        run()
        if self.device.type == "cuda":
            peak = measure_peak(run, self.device)
            entry = self.entries[name]
            self.entries[name] = replace(entry, memory={**entry.memory, phase: peak})
        runs[name] = run

    def finish_row(self, state: str) -> Row:
        """Return what was measured, and forget the times."""
        row = Row(self.shape, state, dict(self.entries), tuple(self.findings))
        self.entries = {name: replace(entry, timings={}) for name, entry in self.entries.items()}
        return row


def profile(run: Run) -> tuple[str, ...]:
    """Return the kernels of a run that worked before; none where the profiler does not."""
    try:
        return launched_kernels(run)
    except RuntimeError as error:
        if is_fatal(error):
            raise
        return ()


def compute_as(name: str, attend: Attend, problem: Problem) -> tuple[Tensor, ...]:
    """Return a contender's out, dq, dk, dv in its own mode."""
    found: list[tuple[Tensor, ...]] = []
    bind(name, lambda: found.append(compute(attend, problem)))()
    return found[0]


def measure_peak(run: Run, device: torch.device) -> int:
    """Return the most bytes that torch's allocator held during a run, above those before it."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
