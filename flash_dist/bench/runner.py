"""Describe the machine, estimate how long a plan takes, and measure shape by shape.

A baseline that fails becomes an entry with the reason.
"""

from __future__ import annotations

import importlib.metadata
import time
import warnings
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import torch

from ..toolkit.machine.libcuda import read_cuda
from ..toolkit.version import read_version
from .baselines.names import COPY, add_ours
from .baselines.problem import Problem
from .baselines.shapes import count_flops
from .measuring.baselines import Baselines, release_memory
from .measuring.checks import check_baselines
from .measuring.passes import GRAPHS_BELOW_MS, Pass
from .measuring.timing import LEAD, ROUNDS
from .results import Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from .baselines.shapes import Shape
    from .measuring.clocks import Clock
    from .plan import Plan
    from .results import Timing

    Tell = Callable[[str], None]

# Rough FLOP/s per multiprocessor: a third of an H200's peak in 16 bits, and a tenth of that third
# in float32.
_FLOPS_PER_SM: Final = {"bf16": 2.5e12, "fp16": 2.5e12, "fp32": 0.25e12}
_TRY_OUT: Final = 0.5  # seconds to check a baseline, plus _PASSES forward and backward passes
_PASSES: Final = 3
_COMPILE: Final = {"flex": 12.0, "fa4": 20.0, "fa4-deterministic": 20.0}  # seconds per shape

_DISTRIBUTIONS: Final = {
    "triton": "triton",
    "fa4": "flash-attn-4",
    "fa3": "flash-attn-3",
    "cudnn-flex": "nvidia-cudnn-frontend",
}


class ContextLostError(Exception):
    """The GPU accepts no more work from this process."""


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return the GPU's properties, and the versions of all software that affects speed."""
    driver = read_cuda().driver
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "gpu": "CPU",
        "driver": driver.release if driver else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "flash_dist": read_version(),
        **_read_versions(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "sm_count": properties.multi_processor_count,
            "l2_bytes": properties.L2_cache_size,
            "memory_bytes": properties.total_memory,
        }
    return found


def _read_versions() -> dict[str, str]:
    """Return the versions of the installed packages in _DISTRIBUTIONS, with the same keys."""
    found = {}
    for name, distribution in _DISTRIBUTIONS.items():
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(distribution)
    return found


def estimate_seconds(plan: Plan, sm_count: int) -> float:
    """Estimate the seconds that a plan takes on a GPU with sm_count multiprocessors."""
    return sum(_estimate_shape(plan, shape, sm_count) for shape in plan.shapes)


def _estimate_shape(plan: Plan, shape: Shape, sm_count: int) -> float:
    passes = plan.passes_of(shape)
    if not passes:
        return 0.0
    names = add_ours(plan.peers_of(shape))
    rate = _FLOPS_PER_SM[shape.dtype] * sm_count
    loops = 0.0
    for pass_ in passes:
        run = shape.layers * count_flops(shape, pass_) / rate
        both = 2 if run * 1e3 < GRAPHS_BELOW_MS else 1  # timed with graphs and eagerly
        loops += both * ROUNDS * max(plan.seconds * (1 + LEAD), run)
    tried = [name for name in names if name != COPY]
    trial = len(tried) * (_TRY_OUT + _PASSES * count_flops(shape, "both") / rate)
    compiled = sum(_COMPILE.get(name, 0.0) for name in tried)
    return trial + compiled + len(names) * len(plan.states) * loops


def say_duration(seconds: float) -> str:
    """Return a duration as text: `about 40 s`, `about 12 min`, `about 2 h 10 min`."""
    if seconds < 90:  # noqa: PLR2004 - longer durations are easier to read in minutes
        return f"about {max(10, 10 * round(seconds / 10))} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"about {hours} h {minutes} min" if hours else f"about {minutes} min"


def measure(
    plan: Plan, device: torch.device, clock: Clock, tell: Tell = lambda _: None
) -> Iterator[Row]:
    """Yield a row per shape and state of L2; an eager row follows each row with CUDA graphs.

    Args:
        plan: What to measure.
        device: The device to use.
        clock: The clock of the device.
        tell: Called with a description of the work that starts.

    Raises:
        ContextLostError: The GPU accepts no more work; raised after the row in which this happened.
    """
    torch.set_float32_matmul_precision("highest")  # no TF32 in baselines that read this setting
    for shape in plan.shapes:
        if not plan.passes_of(shape):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            baselines = Baselines(Problem.draw(shape, device), add_ours(plan.peers_of(shape)))
            check_baselines(baselines, tell)
            for state in plan.states:
                yield from _measure_state(plan, baselines, clock, state, tell)
                if baselines.lost:
                    raise ContextLostError(baselines.lost)
        del baselines
        release_memory(device)


def _measure_state(
    plan: Plan, baselines: Baselines, clock: Clock, state: str, tell: Tell
) -> Iterator[Row]:
    """Yield the row for a state of L2; an eager row follows a row with CUDA graphs."""
    shape = baselines.problem.shape
    eager: dict[str, Mapping[str, Timing]] = {}
    for name in plan.passes_of(shape):
        pass_ = Pass(name, baselines, clock, plan.seconds, state == "cold", tell)
        timings, beside = pass_.time()
        for who, timing in timings.items():
            baselines.entries[who] = baselines.entries[who].with_timing(name, timing)
        if beside:
            eager[name] = beside
    yield Row(shape, state, dict(baselines.entries), tuple(baselines.findings))
    if eager:
        entries = {
            who: replace(
                entry,
                timings={name: found[who] for name, found in eager.items() if who in found},
                uncaptured={},
            )
            for who, entry in baselines.entries.items()
        }
        yield Row(shape, state, entries, eager=True)
    baselines.forget_times()
