"""Passes tensors around a ring, or directly to another rank, concurrently with other work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..toolkit.errors import GroupError
from .shards import find_rank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup, Work

Tensor = torch.Tensor
Tensors = tuple[Tensor, ...]
Messages = list[tuple[int, Tensor]]  # (rank to send to or receive from, contiguous tensor)


@dataclass
class Arriving:
    """Tensors that are being received from other ranks."""

    received: Tensors
    sent: Tensors  # keeps the memory until the send is done
    works: Sequence[Work]

    def wait(self) -> Tensors:
        """Return the received tensors; on a GPU only the current stream waits for them."""
        for work in self.works:
            work.wait()
        self.sent = ()
        return self.received


@dataclass(frozen=True)
class Gathered:
    """Integers of all ranks that are being copied to the host."""

    numbers: Tensor
    copied: torch.cuda.Event | None  # None: the numbers are on the CPU already

    def wait(self) -> Tensor:
        """Return [size, ...] on the CPU; the host waits for the copy."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.numbers


@dataclass(frozen=True)
class Ring:
    """The ranks of a process group in order; the last rank sends to the first."""

    group: ProcessGroup | None
    rank: int
    size: int

    @classmethod
    def of(cls, group: ProcessGroup | None, device: torch.device) -> Ring:
        """Return the ring of a group, whose backend must support tensors on `device`.

        Raises:
            GroupError: There is no group, this rank is not in it, or its backend does not support
                the device.
        """
        rank, size = find_rank(group)
        backend = str(dist.get_backend(group))
        if device.type == "cuda" and backend == "gloo":
            message = "q is on a GPU, but the process group has the backend gloo"
            raise GroupError(message, hint='`init_process_group("nccl")`, or CPU tensors')
        if device.type == "cpu" and backend == "nccl":
            message = "q is on the CPU, but the process group has the backend nccl"
            raise GroupError(message, hint='`init_process_group("cpu:gloo,cuda:nccl")` takes both')
        return cls(group, rank, size)

    def pass_on(self, *tensors: Tensor) -> Arriving:
        """Send contiguous tensors to the next rank; receive the previous rank's tensors.

        NOTE: NCCL sends with a kernel, and an attention kernel occupies every multiprocessor until
        it ends. The kernel that starts first delays the other. So call this before small kernels,
        not right before attention.
        """
        if self.size == 1 or not any(x.numel() for x in tensors):
            return Arriving(tensors, tensors, ())
        received = tuple(torch.empty_like(x) for x in tensors)
        following, before = (self._global_rank(self.rank + step) for step in (1, -1))
        operations = [
            dist.P2POp(which, x, peer, self.group, tag)
            for tag, (out, into) in enumerate(zip(tensors, received, strict=True))
            for which, x, peer in ((dist.isend, out, following), (dist.irecv, into, before))
        ]
        return Arriving(received, tensors, dist.batch_isend_irecv(operations))

    def exchange(self, sent: Messages, received: Messages) -> Arriving:
        """Send tensors to other ranks; receive tensors from other ranks.

        All ranks must make the same number of calls. A rank must receive exactly the tensors that
        another rank sends to it in the same call, in the same order. The note of `pass_on` applies.
        """
        operations = []
        for which, messages in ((dist.isend, sent), (dist.irecv, received)):
            counts = [0] * self.size
            for peer, x in messages:
                tag, counts[peer] = counts[peer], counts[peer] + 1
                if x.numel():
                    where = self._global_rank(peer)
                    operations.append(dist.P2POp(which, x, where, self.group, tag))
        works = dist.batch_isend_irecv(operations) if operations else ()
        return Arriving(tuple(x for _, x in received), tuple(x for _, x in sent), works)

    def gather(self, numbers: Tensor) -> Gathered:
        """Gather integers of all ranks; the host may do other work before it waits for them."""
        everyone = numbers.new_empty((self.size, *numbers.shape))
        dist.all_gather(list(everyone), numbers, self.group)
        if everyone.device.type == "cpu":
            return Gathered(everyone, None)
        host = torch.empty_like(everyone, device="cpu", pin_memory=True)
        host.copy_(everyone, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return Gathered(host, copied)

    def find_source(self, step: int) -> int:
        """Return the rank whose tensors this rank holds after `step` calls of `pass_on`."""
        return (self.rank - step) % self.size

    def find_user(self, step: int) -> int:
        """Return the rank that holds this rank's tensors after `step` calls of `pass_on`."""
        return (self.rank + step) % self.size

    def require_same(self, *words: str) -> None:
        """Raise GroupError on every rank if any rank's words differ from those of rank 0."""
        mine = ", ".join(words)
        said: list[str] = [""] * self.size
        dist.all_gather_object(said, mine, self.group)
        other = next((rank for rank, words in enumerate(said) if words != said[0]), None)
        if other is not None:
            message = (
                f"all ranks must make the same call, got on rank 0: {said[0]}; "
                f"on {other}: {said[other]}"
            )
            hint = (
                "`ring_shard` gives every rank the same number of tokens; a rank without gradients "
                "leaves the others waiting in their backward"
            )
            raise GroupError(message, hint=hint)

    def _global_rank(self, rank: int) -> int:
        rank %= self.size
        return rank if self.group is None else dist.get_global_rank(self.group, rank)
