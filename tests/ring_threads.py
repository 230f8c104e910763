"""A ring whose ranks are threads of this process, for tests of ring attention."""

from __future__ import annotations

from dataclasses import dataclass
from queue import SimpleQueue
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import torch

from flash_dist.context_parallel.exchange import Arriving, Gathered, Messages, Ring

Tensor = torch.Tensor
Queue = SimpleQueue[tuple[Tensor, ...]]
SECONDS = 60.0  # to wait for a rank that has failed


class Links:
    """Queues between all pairs of ranks, and the number of elements that each rank has sent."""

    def __init__(self, size: int) -> None:
        self.queues: list[list[Queue]] = [[SimpleQueue() for _ in range(size)] for _ in range(size)]
        self.board: list[Any] = [None] * size  # a tensor of each rank, which all ranks read
        self.barrier = Barrier(size, timeout=SECONDS)
        self.sent = [0] * size


@dataclass
class Coming:
    """Tensors that another thread puts into a queue; a stub of a process group's Work."""

    received: tuple[Tensor, ...]
    queue: Queue

    def wait(self) -> None:
        for into, x in zip(self.received, self.queue.get(timeout=SECONDS), strict=True):
            assert x.shape == into.shape
            into.copy_(x)


@dataclass(frozen=True)
class Threads(Ring):
    """A ring whose ranks are threads of this process, all on one stream."""

    links: Links

    def pass_on(self, *tensors: Tensor) -> Arriving:
        if self.size == 1:
            return super().pass_on(*tensors)
        self._send(self.find_user(1), *tensors)
        received = tuple(torch.empty_like(x) for x in tensors)
        return Arriving(received, tensors, (self._receive(self.find_source(1), *received),))

    def exchange(self, sent: Messages, received: Messages) -> Arriving:
        for peer, x in sent:
            self._send(peer, x)
        works = [self._receive(peer, x) for peer, x in received]
        return Arriving(tuple(x for _, x in received), tuple(x for _, x in sent), works)

    def gather(self, numbers: Tensor) -> Gathered:
        self.links.board[self.rank] = numbers
        self.links.barrier.wait()
        everyone = torch.stack(self.links.board).cpu()
        self.links.barrier.wait()
        return Gathered(everyone, None)

    def _send(self, peer: int, *tensors: Tensor) -> None:
        assert all(x.is_contiguous() for x in tensors)
        self.links.queues[self.rank][peer].put(tuple(x.clone() for x in tensors))
        self.links.sent[self.rank] += sum(x.numel() for x in tensors)

    def _receive(self, peer: int, *tensors: Tensor) -> Any:  # noqa: ANN401 - a stub of a Work
        return Coming(
            tuple(x.fill_(torch.nan) for x in tensors), self.links.queues[peer][self.rank]
        )


def differentiate(
    function: Any,  # noqa: ANN401 - a torch.autograd.Function
    tensors: tuple[Tensor, Tensor, Tensor],
    call: object,
    upstream: tuple[Tensor, Tensor],
) -> list[Tensor]:
    """Return out, lse, dq, dk and dv of a rank; autograd would run all ranks in one thread."""
    ctx = SimpleNamespace(set_materialize_grads=lambda _: None)
    ctx.save_for_backward = lambda *saved: setattr(ctx, "saved_tensors", saved)
    with torch.no_grad():
        out, lse = function.forward(ctx, *tensors, call)
        *gradients, _ = function.backward(ctx, *upstream)
    return [out, lse, *gradients]
