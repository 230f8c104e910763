"""Time the CPU cost of calls with little GPU work: ours, and SDPA's with its FLASH backend.

A loop is many calls of one kind in a row, then a wait for the GPU. Loops of our calls and loops of
SDPA's calls alternate in one process. SDPA gets contiguous tensors in its own layout, and no mask,
because FLASH supports none.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .baselines.problem import Problem
from .calls import SHAPES, Call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Run = Callable[[], object]
    Pair = tuple[Run, Run]  # our call, SDPA's call

Tensor = torch.Tensor

LOOPS: Final = 15  # loops per kind of call; the result is the median over the loops
CALLS: Final = 200  # calls per loop
WARM_UP: Final = 60  # calls before the first loop
BLOCK: Final = 16  # tokens per block of the block-causal mask


def measure_calls(device: torch.device, *, calls: int = CALLS) -> Iterator[Call]:
    """Yield each kind of call on each problem, with its times."""
    backends = [SDPBackend.FLASH_ATTENTION]
    if device.type == "cpu":  # FLASH on the CPU does not support GQA
        backends.append(SDPBackend.MATH)
    for shape in SHAPES:
        problem = Problem.draw(shape, device)
        with sdpa_kernel(backends):
            for name, pair in make_pairs(problem).items():
                times = time_pair(pair, device, calls)
                yield Call(name, shape, *times)


def time_pair(pair: Pair, device: torch.device, calls: int) -> tuple[float, float]:
    """Return the median microseconds of our call and of the peer's call."""
    for run in pair:
        for _ in range(WARM_UP):
            run()
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(LOOPS):
        for run, found in zip(pair, times, strict=True):
            found.append(time_loop(run, device, calls))
    return statistics.median(times[0]), statistics.median(times[1])


def time_loop(run: Run, device: torch.device, calls: int) -> float:
    """Return the microseconds per call of a loop, including the GPU's work."""
    _wait(device)
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    _wait(device)
    return (time.perf_counter() - begin) / calls * 1e6


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make_pairs(problem: Problem) -> dict[str, Pair]:
    """Return our call and SDPA's call by kind: the kinds in `calls.LIMITS` and two more."""
    from ..attention.batched import flash_attn_func  # noqa: PLC0415 - only needed for a measurement
    from ..kernels.problem import NOT_PACKED  # noqa: PLC0415
    from ..masks import Band, BlockMask  # noqa: PLC0415

    leaves = problem.inputs
    q, k, v = (x.detach() for x in leaves)
    mask = BlockMask.block_causal(torch.arange(problem.shape.seqlen_q, device="cpu") // BLOCK)
    band, scale = Band(), problem.shape.head_dim**-0.5
    numbers = torch.tensor(band.ints, device="cpu")
    operators = torch.ops.flash_dist
    peer = Peer(problem)

    def train(**options: Any) -> Tensor:  # noqa: ANN401 - options of flash_attn_func
        out: Tensor = flash_attn_func(*leaves, **options)
        return out

    def differentiate(out: Tensor) -> Run:
        return lambda: torch.autograd.grad(out, leaves, problem.dout, retain_graph=True)

    def step() -> object:
        return torch.autograd.grad(train(), leaves, problem.dout)

    backward = peer.differentiate(peer.train())
    return {
        "operator": (
            lambda: operators.attention_no_grad(q, k, v, numbers, None, scale),
            peer.infer,
        ),
        "operator with a formula": (
            lambda: operators.attention(q, k, v, None, band.ints, *NOT_PACKED, scale),
            peer.infer,
        ),
        "function": (lambda: flash_attn_func(q, k, v), peer.infer),
        "function, BlockMask": (lambda: flash_attn_func(q, k, v, mask=mask), peer.infer),
        "forward with gradients": (train, peer.train),
        "forward with gradients, BlockMask": (lambda: train(mask=mask), peer.train),
        "backward": (differentiate(train()), backward),
        "backward, BlockMask": (differentiate(train(mask=mask)), backward),
        "forward and backward": (step, peer.step),
    }


class Peer:
    """SDPA on a problem, in SDPA's layout [batch, heads, seqlen, head_dim]."""

    def __init__(self, problem: Problem) -> None:
        q, k, v = (x.detach().transpose(1, 2).contiguous() for x in problem.inputs)
        self.inputs = q, k, v
        self.leaves = tuple(x.clone().requires_grad_() for x in self.inputs)
        self.dout = problem.dout.transpose(1, 2).contiguous()
        shape = problem.shape
        self.options: dict[str, Any] = {}
        if shape.num_heads_q != shape.num_heads_kv:
            self.options["enable_gqa"] = True

    def infer(self) -> Tensor:
        """Run the forward on tensors that do not require gradients."""
        return scaled_dot_product_attention(*self.inputs, **self.options)

    def train(self) -> Tensor:
        """Run the forward on leaves that require gradients."""
        q, k, v = self.leaves
        return scaled_dot_product_attention(q, k, v, **self.options)

    def differentiate(self, out: Tensor) -> Run:
        """Return a function that runs the backward of `out`, a result of `train`."""
        return lambda: torch.autograd.grad(out, self.leaves, self.dout, retain_graph=True)

    def step(self) -> object:
        """Run forward and backward."""
        return torch.autograd.grad(self.train(), self.leaves, self.dout)
