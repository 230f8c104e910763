"""The forward that finds the largest score of each head (csrc/sm90/fwd), emulated."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import pytest
import torch

from tests.unit.made.emulator import UNBOUNDED, Gpu, emulate_forward

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor

pytestmark = pytest.mark.slow  # the first test compiles: 50 s

LARGE: Final = (384, 1000)  # queries and keys: tiles of 192 or 128 queries, 8 steps and more
SMALL: Final = (100, 310)  # tiles of 64 queries, and a separate step for the last keys
RISING: Final = torch.linspace(2.0, 0.01, LARGE[1])[None, :, None, None]  # from the last key on
CHANGES: Final[dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]]] = {
    "random": lambda q, k: (q, k),
    "rising": lambda q, k: (q.abs(), k.abs() * RISING),
    "negative": lambda q, k: (q.abs(), -k.abs() * RISING.flip(1)),
    "equal": lambda q, k: (torch.ones_like(q), torch.ones_like(k)),
    "tiny": lambda q, k: (q / 1024, k / 64),
    "large": lambda q, k: (q * 64, k * 8),
}


def draw(seqlen_q: int, seqlen_k: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors of two query heads and one key head, equal in every call."""
    made = torch.Generator().manual_seed(1)
    q = torch.randn(1, seqlen_q, 2, head_dim, generator=made)
    k, v = (torch.randn(1, seqlen_k, 1, head_dim, generator=made) for _ in range(2))
    return 2 * q, k, v


def check(tensors: tuple[Tensor, ...], visible: Tensor, *, sm_count: int) -> None:
    """Compare max_logit with float64, and the bits of out and lse with a call without max_logit."""
    q, k, v = (x.bfloat16() for x in tensors)
    causal = not bool(visible.all())
    gpu = Gpu(capability=90, plan=227, sm_count=sm_count)
    window = UNBOUNDED, 0 if causal else UNBOUNDED
    max_logit = torch.full((2,), -math.inf)
    got = emulate_forward(q, k, v, window=window, max_logit=max_logit, gpu=gpu)
    scores = torch.einsum("bqhd,bkgd->hqk", q.double(), k.double()) * q.shape[-1] ** -0.5
    want = scores.masked_fill(~visible, -math.inf).amax((1, 2)).float()
    torch.testing.assert_close(max_logit, want, rtol=1e-6, atol=0.0)
    plain = emulate_forward(q, k, v, window=window, gpu=gpu)
    assert all(map(torch.equal, got, plain))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", CHANGES)
def test_it_is_the_largest_score_however_they_are_spread(name: str, head_dim: int) -> None:
    q, k, v = draw(*LARGE, head_dim)
    check((*CHANGES[name](q, k), v), torch.ones(LARGE).bool(), sm_count=2)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("size", "sm_count"),
    [(LARGE, 2), ((384, 200), 2), (SMALL, 132)],
    ids=["large tiles", "rows without a key", "small tiles"],
)
def test_masked_scores_are_left_out(size: tuple[int, int], sm_count: int, head_dim: int) -> None:
    visible = torch.ones(size).tril(size[1] - size[0]).bool()
    check(draw(*size, head_dim), visible, sm_count=sm_count)
