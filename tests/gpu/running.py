"""Running the product on a Problem."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch

from flash_dist import flash_attn_func
from tests.reference import NAMES, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator


def attend(problem: Problem, *, poison: bool = True) -> dict[str, torch.Tensor]:
    """Return out, lse, dq, dk, dv; memory that the call may get is full of NaN before."""
    q, k, v = (x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v))
    if poison:
        poison_memory(problem.q.device)
    out, lse = flash_attn_func(
        q, k, v, softmax_scale=problem.softmax_scale, causal=problem.causal, return_lse=True
    )
    if poison:
        poison_memory(problem.q.device)
    grads = torch.autograd.grad(out, (q, k, v), problem.dout)
    return dict(zip(NAMES, (out.detach(), lse.detach(), *grads), strict=True))


def poison_memory(device: torch.device) -> None:
    """Fill free blocks of torch's allocator with 0xff bytes: NaN in every format."""
    blocks = [
        torch.full((size,), 255, dtype=torch.uint8, device=device)
        for size in (1 << 16, 1 << 20, 1 << 24) * 4
    ]
    del blocks


@contextmanager
def workspace(megabytes: int) -> Iterator[None]:
    """Set the workspace budget for a scope."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASH_DIST_WORKSPACE_MB", str(megabytes))
        yield
