"""The tokens of each rank, and equal work for each rank, computed without other processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from flash_dist.context_parallel.shards import (
    find_length,
    find_rank,
    positions,
    require_chunks,
    ring_positions,
    ring_shard,
    ring_unshard,
)
from flash_dist.toolkit.errors import GroupError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

X = torch.zeros(2, 8, device="cpu")

WORLD_SIZES = (1, 2, 3, 4, 8)
each_size = pytest.mark.parametrize("world_size", WORLD_SIZES)


@each_size
def test_every_token_is_on_one_rank(world_size: int) -> None:
    seqlen = 2 * world_size * 3
    everywhere = torch.cat([positions(seqlen, rank, world_size) for rank in range(world_size)])
    assert sorted(everywhere.tolist()) == list(range(seqlen))


@each_size
def test_causal_work_is_the_same_on_every_rank(world_size: int) -> None:
    seqlen = 2 * world_size * 3
    work = {int((positions(seqlen, rank, world_size) + 1).sum()) for rank in range(world_size)}
    assert len(work) == 1


@pytest.mark.parametrize(("seqlen", "missing"), [(7, 1), (9, 7), (4, 4)])
def test_tokens_that_cannot_be_spread_evenly_are_refused(seqlen: int, missing: int) -> None:
    message = rf"multiple of 8, got {seqlen}\b[\s\S]*hint: add {missing}\b"
    with pytest.raises(ValueError, match=message):
        require_chunks(seqlen, 8)


@each_size
def test_no_tokens_are_spread_as_none(world_size: int) -> None:
    require_chunks(0, 2 * world_size)
    assert [positions(0, rank, world_size).tolist() for rank in range(world_size)] == (
        [[]] * world_size
    )


@pytest.mark.parametrize("dim", [2, -3])
def test_an_axis_that_is_not_there_is_refused(dim: int) -> None:
    with pytest.raises(ValueError, match=rf"dim must be -2 to 1 .* \[2, 8\], got {dim}"):
        find_length(torch.zeros(2, 8), dim)
    assert [find_length(torch.zeros(2, 8), dim) for dim in (0, 1, -1, -2)] == [2, 8, 8, 2]


def test_without_a_process_group_the_way_to_one_is_named() -> None:
    with pytest.raises(GroupError, match="is not initialized") as error:
        find_rank(None)
    assert "torchrun" in str(error.value)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """Make a process group of this process alone."""
    met = f"file://{tmp_path}/met"
    dist.init_process_group("gloo", init_method=met, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ring_positions(8.0), "seqlen must be an int, got float"),  # type: ignore[arg-type]
        (lambda: ring_shard(X, dim=1.0), "dim must be an int, got float"),  # type: ignore[arg-type]
        (lambda: ring_unshard(X, dim="1"), "dim must be an int, got str"),  # type: ignore[arg-type]
        (
            lambda: ring_shard(X, [0]),  # type: ignore[arg-type]
            "group must be a torch.distributed.ProcessGroup or None, got list",
        ),
    ],
    ids=["seqlen", "dim", "dim of what is put together", "group"],
)
def test_what_is_of_another_type_is_named(call: Callable[[], object], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        call()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("seqlen", [-2, 2**62, 10**5000], ids=["negative", "large", "digits"])
def test_a_sequence_that_no_rank_can_have_is_refused(seqlen: int) -> None:
    with pytest.raises(ValueError, match=r"seqlen must be from 0 to .*, 1 times .*, got "):
        ring_positions(seqlen)
