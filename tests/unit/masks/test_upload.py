"""Each call waits for the thread that copies its mask to a GPU, so no thread outlives it."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from flash_dist.masks.upload import THREADS, in_a_thread, upload
from flash_dist.toolkit.make.project import ROOT


def test_a_thread_has_ended_when_its_call_returns() -> None:
    for _ in range(50):  # repeat: with Python 3.11, join left every second one alive
        number = in_a_thread(lambda: (torch.ones(9).sum(), threading.get_native_id())[1])
        assert number != threading.get_native_id()
        assert not (THREADS / str(number)).exists()


def test_a_thread_that_fails_has_ended_when_its_error_is_raised() -> None:
    numbers = []

    def fail() -> None:
        numbers.append(threading.get_native_id())
        message = "no memory"
        raise RuntimeError(message)

    with pytest.raises(RuntimeError, match="no memory"):
        in_a_thread(fail)
    assert len(numbers) == 1
    assert not (THREADS / str(numbers[0])).exists()


def test_threads_of_the_caller_are_its_own() -> None:
    before = set(threading.enumerate())
    assert in_a_thread(threading.current_thread) not in before
    assert set(threading.enumerate()) == before


def test_on_the_cpu_there_is_no_thread_and_no_copy() -> None:
    plan = torch.arange(3, dtype=torch.int32)
    assert upload(plan, torch.device("cpu")) is plan
    assert upload(plan, torch.device("meta")).is_meta


# Makes a mask with 70,000 rows per head, and exits right after a thread has copied its arrays.
PROGRAM = """
import threading, torch
from flash_dist.masks import BlockMask
from flash_dist.masks.upload import in_a_thread
rows = torch.arange(70_000).expand(1, 4, -1) // 2
widths = torch.tensor([9, 40, 400, 4000]).view(1, 4, 1)
plan = BlockMask.from_intervals(rows, rows + widths).plan(1, 4, 70_000, 70_000)
copied = in_a_thread(plan.packed.clone)
assert torch.equal(copied, plan.packed)
assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
"""


@pytest.mark.slow
def test_a_process_that_made_a_mask_of_70000_rows_of_heads_ends_quietly() -> None:
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], check=False, cwd=ROOT, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
