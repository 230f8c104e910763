"""Time one pass of one problem: attention or a stack of layers, in loops and in CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import torch
from torch.utils.checkpoint import checkpoint

from ..baselines.copying import make_copy
from ..baselines.failures import is_fatal
from ..baselines.names import COPY
from ..baselines.table import bind
from .timing import RunFailed, probe, time_in_rounds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..baselines.ours import Attend
    from ..baselines.problem import Problem
    from ..results import Timing
    from .baselines import Baselines
    from .clocks import Clock

    Run = Callable[[], object]
    Timings = dict[str, Timing]

GRAPHS_BELOW_MS: Final = 0.3  # shorter passes are replayed as graphs, since launches would dominate
_GRAPH_MS: Final = 1.0  # intended GPU time of a graph: gaps between graphs then do not matter
_MOST_REPEATS: Final = 64
_PARAMETER_SCALE: Final = 0.02


@dataclass(frozen=True)
class Pass:
    """Measures the time of one pass, for all baselines on a problem.

    name: One of PASSES.
    seconds: Length of a loop.
    cold: Whether L2 is flushed before each run.
    tell: Called with a description of the work that starts.
    """

    name: str
    baselines: Baselines
    clock: Clock
    seconds: float
    cold: bool
    tell: Callable[[str], None]

    def time(self) -> tuple[Timings, Timings]:
        """Return the times by baseline, and those of eager launches.

        The second dict is empty unless the first one has the times of CUDA graphs.
        """
        runs: dict[str, Run] = {}
        for name in self._taking_part():
            self.baselines.attempt(name, partial(self._prepare, name, runs))
        short = self._find_short(runs) if self.clock.captures else {}
        timings = self._time(runs, "eager" if short else "")
        if not short:
            return timings, {}
        return self._time_graphs({name: short[name] for name in timings}), timings

    def _taking_part(self) -> tuple[str, ...]:
        """Return the baselines that have not failed; COPY only for forward and backward passes."""
        entry = self.baselines.entries.get(COPY)
        copied = entry is not None and self.name in {"forward", "backward"} and not entry.reason
        return (*self.baselines.attends, *([COPY] if copied else []))

    def _prepare(self, name: str, runs: dict[str, Run]) -> None:
        run, device = self._make(name), self.baselines.problem.device
        run()
        if device.type == "cuda":
            entry = self.baselines.entries[name]
            peaks = {**entry.memory, self.name: measure_peak(run, device)}
            self.baselines.entries[name] = replace(entry, memory=peaks)
        runs[name] = run

    def _make(self, name: str) -> Run:
        problem = self.baselines.problem.with_own_leaves()
        if name == COPY:
            return make_copy(problem, self.name)
        return make_run(name, self.baselines.attends[name], problem, self.name)

    def _find_short(self, runs: dict[str, Run]) -> dict[str, float]:
        """Return an estimate of each run's milliseconds; `{}` if no attention needs a graph."""
        times: dict[str, float] = {}
        for name in tuple(runs):
            try:
                times[name] = probe(name, runs[name], self.clock, cold=self.cold).milliseconds
            except RunFailed as failed:  # noqa: PERF203 - a probe takes far longer than `try`
                del runs[name]
                self.baselines.fail(name, failed.error)
        least = min((times[name] for name in times if name != COPY), default=GRAPHS_BELOW_MS)
        return times if least < GRAPHS_BELOW_MS else {}

    def _time(
        self, runs: dict[str, Run], how: str, repeats: Mapping[str, int] | None = None
    ) -> Timings:
        """Time runs; if a baseline fails, exclude it and time the others again."""
        shape = self.baselines.problem.shape.name
        what = f"{shape}: {self.name} {how}".rstrip()
        while runs and not self.baselines.lost:
            try:
                return time_in_rounds(
                    runs,
                    self.clock,
                    seconds=self.seconds,
                    cold=self.cold,
                    repeats=repeats,
                    tell=lambda who: self.tell(f"{what}, {who}"),
                )
            except RunFailed as failed:  # noqa: PERF203 - loops take far longer than `try`
                del runs[failed.name]
                self.baselines.fail(failed.name, failed.error)
        return {}

    def _time_graphs(self, times: Mapping[str, float]) -> Timings:
        """Time replays of graphs; if a run cannot be captured, record why and skip its baseline."""
        runs: dict[str, Run] = {}
        repeats: dict[str, int] = {}
        for name, milliseconds in times.items():
            count = max(1, min(_MOST_REPEATS, round(_GRAPH_MS / milliseconds)))
            repeats[name] = 1 if self.cold else count  # L2 is flushed only between graphs
            try:
                runs[name] = self.clock.capture(partial(self._make, name), repeats[name])
            except Exception as error:  # noqa: BLE001 - any failure is a result
                if is_fatal(error):
                    self.baselines.fail(name, error)
                    break
                self.baselines.keep_uncaptured(name, self.name, error)
        return self._time(runs, "graph", repeats)


def measure_peak(run: Run, device: torch.device) -> int:
    """Return the peak bytes of torch's allocator during a run, minus the bytes before the run."""
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def make_run(name: str, attend: Attend, problem: Problem, pass_: str) -> Run:
    """Return a function that runs only the pass. The forward that a backward needs runs here, once.

    For a stack of layers, the function runs forward and backward.
    """
    if problem.shape.layers > 1:
        return bind(name, Stack(attend, problem).run)
    make = {
        "forward": _make_forward,
        "backward": _make_backward,
        "both": _make_both,
        "checkpointed": _make_checkpointed,
    }[pass_]
    return bind(name, make(attend, problem))


def _make_forward(attend: Attend, problem: Problem) -> Run:
    def run() -> object:
        with torch.no_grad():
            return attend(*problem.inputs)

    return run


def _make_backward(attend: Attend, problem: Problem) -> Run:
    out = attend(*problem.inputs)
    return lambda: _differentiate(out, problem, retain_graph=True)


def _make_both(attend: Attend, problem: Problem) -> Run:
    return lambda: _differentiate(attend(*problem.inputs), problem)


def _make_checkpointed(attend: Attend, problem: Problem) -> Run:
    def run() -> object:
        out = checkpoint(attend, *problem.inputs, use_reentrant=False)
        return _differentiate(out, problem)

    return run


def _differentiate(out: torch.Tensor, problem: Problem, *, retain_graph: bool = False) -> object:
    return torch.autograd.grad(
        out, problem.inputs, problem.dout, retain_graph=retain_graph, allow_unused=True
    )  # allow_unused, because `plain` ignores the bias


class Stack:
    """Pre-norm attention layers with residuals, each in its own activation checkpoint.

    A layer is x + W_out attention(W_q norm(x), W_k norm(x), W_v norm(x)), where x has num_heads_q *
    head_dim columns. There is no feed-forward part: it would take all baselines the same time.
    """

    def __init__(self, attend: Attend, problem: Problem) -> None:
        shape = problem.shape
        self.attend = attend
        self.heads = (shape.num_heads_q, shape.num_heads_kv, shape.num_heads_kv)
        self.head_dims = (shape.head_dim, shape.head_dim, shape.head_dim_v)
        width = shape.num_heads_q * shape.head_dim
        widths = [heads * dim for heads, dim in zip(self.heads, self.head_dims, strict=True)]
        generator = torch.Generator(problem.device).manual_seed(1)

        def draw(*size: int) -> torch.Tensor:
            x = torch.randn(size, generator=generator, device=problem.device)
            return (x * _PARAMETER_SCALE).to(problem.q.dtype).requires_grad_()

        width_out = shape.num_heads_q * shape.head_dim_v
        self.layers = [
            (*(draw(one, width) for one in widths), draw(width, width_out))
            for _ in range(shape.layers)
        ]
        size = (shape.batch, shape.seqlen_q, width)
        self.x = torch.randn(size, generator=generator, device=problem.device).to(problem.q.dtype)
        self.dout = torch.randn_like(self.x)
        self.parameters = [weight for layer in self.layers for weight in layer]

    def _layer(self, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        *projections, last = weights
        normed = torch.nn.functional.rms_norm(x, x.shape[-1:])
        q, k, v = (
            (normed @ weight.T).unflatten(-1, (heads, head_dim))
            for weight, heads, head_dim in zip(projections, self.heads, self.head_dims, strict=True)
        )
        return x + self.attend(q, k, v).flatten(2) @ last.T

    def run(self) -> object:
        """Run forward and backward through all layers."""
        x = self.x
        for weights in self.layers:
            x = checkpoint(self._layer, x, *weights, use_reentrant=False)
        return torch.autograd.grad(x, self.parameters, self.dout)
