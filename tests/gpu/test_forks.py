"""A process can use the GPUs even if it was forked after flash_dist had looked for GPUs."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

# Calls that a program may make before it starts workers. None may initialise CUDA.
BEFORE = """
import os
import sys

import torch

import flash_dist

report = flash_dist.check()
assert report, report.sentence
assert flash_dist.check(report.usable[:1])
x = torch.ones(1, 2, 8, 64)
seen = torch.ones(8, 8, dtype=torch.bool).tril()
flash_dist.scaled_dot_product_attention(x, x, x, attn_mask=seen)
flash_dist.BlockMask.from_dense(seen)
assert not torch.cuda.is_initialized()


def attend(index):
    q = torch.ones(1, 8 + index, 1, 64, device="cuda", dtype=torch.float16)
    return float(flash_dist.flash_attn_func(q, q, q).float().mean())
"""

FORK = (
    BEFORE
    + """
child = os.fork()
if child == 0:
    ok = False
    try:
        ok = attend(0) == 1.0
    finally:
        os._exit(0 if ok else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
)

WORKERS = (
    BEFORE
    + """
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return attend(index)


loader = torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context="fork")
values = [float(x) for x in loader]
assert values == [1.0] * 8, values
assert attend(0) == 1.0  # and so can this one
"""
)

# After this process has used CUDA, `check()` returns the same report as before, also in a forked
# child.
AFTER = """
import os
import sys

import torch

import flash_dist

before = flash_dist.check()
torch.ones(1, device="cuda")
assert flash_dist.check() == before
child = os.fork()
if child == 0:
    ok = False
    try:
        ok = flash_dist.check() == before
    finally:
        os._exit(0 if ok else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("script", [FORK, WORKERS, AFTER], ids=["fork", "DataLoader", "in-use"])
def test_forked_processes_have_cuda_after_check(script: str) -> None:
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
