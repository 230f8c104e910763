"""The baselines on one problem, and why some failed."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..baselines.failures import describe_failure, is_fatal
from ..baselines.names import OWN
from ..results import Entry

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..baselines.ours import Attend
    from ..baselines.problem import Problem


class Baselines:
    """The baselines on a problem. The entry of a baseline that fails has the reason."""

    def __init__(self, problem: Problem, names: tuple[str, ...]) -> None:
        self.problem = problem
        self.entries = {name: Entry(name) for name in names}
        self.attends: dict[str, Attend] = {}  # of baselines that ran and have not failed since
        self.findings: list[str] = []
        self.lost = ""  # why the GPU accepts no more work; empty if it does

    def attempt(self, name: str, step: Callable[[], object]) -> None:
        """Run a step of a baseline; if it fails, exclude the baseline."""
        if self.lost:
            self._drop(name, f"not measured: {self.lost}")
            return
        try:
            step()
        except Exception as error:  # noqa: BLE001 - any failure is a result
            self.fail(name, error)

    def fail(self, name: str, error: Exception) -> None:
        """Exclude a baseline; report a finding if it is ours."""
        reason, shape = describe_failure(error), self.problem.shape.name
        if is_fatal(error):
            self.lost = f"the GPU accepts no work after {name} failed on {shape}"
        if name in OWN:
            self.findings.append(f"{name} failed on {shape}: {reason}")
        self._drop(name, reason)

    def _drop(self, name: str, reason: str) -> None:
        self.entries[name] = replace(self.entries[name], reason=reason)
        self.attends.pop(name, None)
        if not self.lost:
            release_memory(self.problem.device)

    def keep_uncaptured(self, name: str, pass_: str, error: Exception) -> None:
        """Record why a pass has no CUDA graph, without excluding the baseline."""
        entry = self.entries[name]
        reasons = {**entry.uncaptured, pass_: describe_failure(error)}
        self.entries[name] = replace(entry, uncaptured=reasons)
        release_memory(self.problem.device)

    def forget_times(self) -> None:
        """Drop all times, before the same baselines are timed with another state of L2."""
        self.entries = {
            name: replace(entry, timings={}, uncaptured={}) for name, entry in self.entries.items()
        }


def release_memory(device: torch.device) -> None:
    """Collect garbage, and return the memory in torch's CUDA cache to the GPU."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
