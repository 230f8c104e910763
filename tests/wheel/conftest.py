"""The modules that wheel tests share with others, and processes that are the ranks of one group."""

from __future__ import annotations

import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Last, for `tests` alone: the installed package comes first, as the one beside it has no kernels.
sys.path.append(str(Path(__file__).resolve().parents[2]))

MOST_RANKS = 4
LIMIT = timedelta(seconds=120)  # for a rank to wait for a rank that has failed


@pytest.fixture(scope="module")
def processes(request: pytest.FixtureRequest) -> Iterator[list[ProcessPoolExecutor]]:
    """Yield processes that have torch loaded and wait, each an executor of its own."""
    import torch  # noqa: PLC0415 - only tests of several ranks

    with ExitStack() as stack, pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(request.path.parent)  # modules beside the test are importable
        context = multiprocessing.get_context("spawn")
        yield [
            stack.enter_context(ProcessPoolExecutor(1, context, torch.set_num_threads, (1,)))
            for _ in range(MOST_RANKS)
        ]


@pytest.fixture
def run(
    processes: list[ProcessPoolExecutor], tmp_path: Path
) -> Callable[[Callable[[], None], int], None]:
    """Return a function that runs its argument on all ranks, and raises the error of a rank."""

    def run_in(body: Callable[[], None], world_size: int) -> None:
        ranks = [
            process.submit(_join, rank, world_size, str(tmp_path / "store"), body)
            for rank, process in enumerate(processes[:world_size])
        ]
        for done in as_completed(ranks):
            done.result()

    return run_in


def _join(rank: int, world_size: int, store: str, body: Callable[[], None]) -> None:
    import torch.distributed as dist  # noqa: PLC0415

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"file://{store}", LIMIT, world_size, rank)
    try:
        body()
    finally:
        dist.destroy_process_group()
