"""Distribution of tokens over ranks, so that causal masks give every rank equal work.

A sequence is cut into 2 * world_size chunks. Rank r has chunks r and 2 * world_size - 1 - r: one
whose queries see few keys, and one whose queries see many. This is the zigzag order of
https://github.com/zhuzilin/ring-flash-attention and of Llama 3 (arXiv:2407.21783, 3.3.2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..attention.arguments import describe_value, require_tensor, require_whole
from ..masks.inputs import MAX_SEQLEN
from ..toolkit.errors import GroupError, show

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Tensor = torch.Tensor


def ring_positions(seqlen: int, group: ProcessGroup | None = None) -> Tensor:
    """Return the positions of this rank's tokens in the whole sequence, for rotary embeddings.

    Args:
        seqlen: Tokens of the whole sequence, a multiple of 2 * world_size.
        group: The ranks, in their order; by default all.

    Returns:
        [seqlen / world_size], int64, on the CPU.

    Raises:
        TypeError: seqlen is not an int.
        GroupError: torch.distributed is not initialized, or this rank is not in the group.
        ValueError: seqlen cannot be cut into equal chunks.
    """
    rank, world_size = find_rank(group)
    number = require_whole("seqlen", seqlen)
    most = MAX_SEQLEN * world_size
    if not 0 <= number <= most:
        message = f"seqlen must be from 0 to {most}, {world_size} times {MAX_SEQLEN}, got "
        raise ValueError(message + show(number))
    return positions(number, rank, world_size)


def ring_shard(x: Tensor, group: ProcessGroup | None = None, *, dim: int = 1) -> Tensor:
    """Return this rank's tokens of a whole sequence, for `ring_attention`. Differentiable.

    Args:
        x: A tensor with all tokens along `dim`, equal on every rank: ids, labels, q, k or v.
        group: The ranks, in their order; by default all.
        dim: The axis of the tokens.

    Returns:
        A tensor with seqlen / world_size tokens along `dim`; token i has position
        `ring_positions(seqlen)[i]`.

    Raises:
        TypeError: x is not a tensor.
        GroupError: torch.distributed is not initialized, or this rank is not in the group.
        ValueError: x has no such axis, or seqlen cannot be cut into equal chunks.
    """
    require_tensor("x", x)
    rank, world_size = find_rank(group)
    require_chunks(find_length(x, dim), 2 * world_size)
    chunks = x.chunk(2 * world_size, dim)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim)


def ring_unshard(x: Tensor, group: ProcessGroup | None = None, *, dim: int = 1) -> Tensor:
    """Return the whole sequence in order, on every rank, from each rank's tokens.

    Differentiable: as in torch.distributed.nn, the loss is the sum of all ranks' losses.

    Args:
        x: A tensor with this rank's tokens along `dim`, of the same shape on every rank.
        group: The ranks, in their order; by default all.
        dim: The axis of the tokens.

    Raises:
        TypeError: x is not a tensor.
        GroupError: torch.distributed is not initialized, or this rank is not in the group.
        ValueError: x has no such axis, or an odd number of tokens.
    """
    require_tensor("x", x)
    find_rank(group)
    require_chunks(find_length(x, dim), 2)
    return _Unshard.apply(x, group, dim)  # type: ignore[no-any-return, no-untyped-call]


def positions(seqlen: int, rank: int, world_size: int) -> Tensor:
    """Return the positions of a rank's tokens in the whole sequence."""
    require_chunks(seqlen, 2 * world_size)
    chunks = torch.arange(seqlen, device="cpu").chunk(2 * world_size)
    return torch.cat((chunks[rank], chunks[-1 - rank]))


def find_length(x: Tensor, dim: int) -> int:
    """Return the length of an axis; raise ValueError if it does not exist."""
    axis = require_whole("dim", dim)
    if not -x.dim() <= axis < x.dim():
        message = (
            f"dim must be {-x.dim()} to {x.dim() - 1} for a tensor of shape {list(x.shape)}, "
            f"got {show(axis)}"
        )
        raise ValueError(message)
    return x.shape[axis]


def require_chunks(seqlen: int, count: int) -> None:
    """Raise ValueError if tokens cannot be divided into `count` chunks of equal length."""
    if seqlen % count:
        missing = -seqlen % count
        message = (
            f"the number of tokens must be a multiple of {count}, got {seqlen}"
            f"\n\nhint: add {missing} at the end, which causal attention hides from the others"
        )
        raise ValueError(message)


def find_rank(group: ProcessGroup | None) -> tuple[int, int]:
    """Return the rank of this process in a group, and the group's size.

    Raises:
        TypeError: group is not a process group.
        GroupError: torch.distributed is not initialized, or this process is not in the group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        message = "ring attention needs a process group, and torch.distributed is not initialized"
        raise GroupError(message, hint="`torch.distributed.init_process_group()` under torchrun")
    given: Any = group
    known = given is None or isinstance(given, dist.ProcessGroup)
    if not known and given is not dist.GroupMember.NON_GROUP_MEMBER:
        message = (
            f"group must be a torch.distributed.ProcessGroup or None, got {describe_value(group)}"
        )
        if hasattr(group, "get_group"):
            message += "\n\nhint: `mesh.get_group()` is that of a DeviceMesh"
        raise TypeError(message)
    rank = dist.get_rank(group)
    if rank < 0:
        message = f"rank {dist.get_rank()} is not in the process group that it was given"
        raise GroupError(message, hint="call with the group that `dist.new_group` gave this rank")
    return rank, dist.get_world_size(group)


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None, dim: int) -> Tensor:  # noqa: ANN401
        ctx.group, ctx.dim = group, dim
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x, group)
        halves = [part.chunk(2, dim) for part in parts]
        firsts, seconds = zip(*halves, strict=True)
        return torch.cat((*firsts, *reversed(seconds)), dim)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        total = dout.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return ring_shard(total, ctx.group, dim=ctx.dim), None, None
