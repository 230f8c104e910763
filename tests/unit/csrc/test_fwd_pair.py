"""The forward of pairs of blocks (csrc/sm90/fwd_pair), emulated: values and bits."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from typing import Final

import pytest
import torch

from flash_dist import BlockMask
from tests.unit.made.emulator import UNBOUNDED, Gpu, emulate_forward

Tensor = torch.Tensor

pytestmark = pytest.mark.slow  # the first test compiles: 40 s

CAUSAL: Final = (UNBOUNDED, 0)
FULL: Final = (UNBOUNDED, UNBOUNDED)
Shape = tuple[int, int, int, int, int, int, int, tuple[int, int]]
SHAPES: Final[
    dict[str, Shape]
] = {  # head_dim, head_dim_v, batch, seqlen_q, seqlen_k, heads, kv heads, window
    "one step": (512, 512, 1, 64, 64, 1, 1, FULL),
    "an odd number of steps": (512, 512, 1, 130, 300, 1, 1, FULL),
    "many steps": (384, 384, 1, 128, 900, 1, 1, FULL),
    "causal, heads in groups": (384, 384, 1, 130, 330, 2, 1, CAUSAL),
    "part of the columns": (264, 264, 2, 70, 129, 1, 1, CAUSAL),
    "rows without a key": (512, 512, 1, 200, 70, 1, 1, CAUSAL),
    "a tile without a key": (392, 392, 1, 300, 70, 1, 1, CAUSAL),
    "window": (512, 512, 1, 200, 300, 1, 1, (70, 30)),
    "fewer columns of v": (512, 200, 1, 100, 200, 1, 1, CAUSAL),
    "one key": (440, 440, 1, 65, 1, 1, 1, FULL),
}


def gpu(seed: int) -> Gpu:
    """Return an H100 that runs warps in an order that the seed decides."""
    return Gpu(capability=90, plan=227, seed=seed)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def solve(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Return out and lse in float64; visible: [seqlen_q, seqlen_k]."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~visible, -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp()
    return (weights @ v.repeat_interleave(group, 1)).transpose(1, 2), lse


def in_window(seqlen_q: int, seqlen_k: int, window: tuple[int, int]) -> Tensor:
    places = torch.arange(seqlen_k) - torch.arange(seqlen_q)[:, None] - (seqlen_k - seqlen_q)
    return (places >= -window[0]) & (places <= window[1])


def draw_visible(kind: str, shape: tuple[int, int, int], hidden_keys: tuple[int, int]) -> Tensor:
    """Return the visible keys of a mask of tiles, or of an interval of keys for each query.

    Args:
        kind: `lists` for tiles, `intervals`.
        shape: head_dim, which is the seed, seqlen_q and seqlen_k.
        hidden_keys: The keys that queries 64 to 127 do not see, of `lists`.
    """
    seed, seqlen_q, seqlen_k = shape
    random = torch.Generator().manual_seed(seed)
    if kind == "lists":
        visible = torch.rand(seqlen_q, seqlen_k, generator=random) < 0.3
        visible[64:128, slice(*hidden_keys)] = False
        visible[5] = False
        return visible
    ends = torch.randint(seqlen_k + 1, (2, seqlen_q, 1), generator=random)
    keys = torch.arange(seqlen_k)
    return (keys >= ends[0]) & (keys < ends[1])


def cu_seqlens(ends_q: list[int], ends_k: list[int]) -> tuple[Tensor, Tensor]:
    return torch.tensor(ends_q, dtype=torch.int32), torch.tensor(ends_k, dtype=torch.int32)


def require_near(got: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> None:
    """Check out and lse; rows without a key are 0 and -inf."""
    error = (got[0].double() - exact[0]).norm() / exact[0].norm()
    assert error < 3e-3
    assert torch.equal(got[1].isinf(), exact[1].isinf())
    assert torch.allclose(got[1].double(), exact[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_values_are_right_and_bits_the_same_in_any_order(shape: Shape) -> None:
    head_dim, head_dim_v, batch, seqlen_q, seqlen_k, heads, heads_kv, window = shape
    q = normal(0, batch, seqlen_q, heads, head_dim)
    k = normal(1, batch, seqlen_k, heads_kv, head_dim)
    v = normal(2, batch, seqlen_k, heads_kv, head_dim_v)
    out, lse = emulate_forward(q, k, v, window=window, gpu=gpu(0))
    require_near((out, lse), solve(q, k, v, in_window(seqlen_q, seqlen_k, window)))
    again = emulate_forward(q, k, v, window=window, gpu=gpu(1))
    assert torch.equal(out, again[0])
    assert torch.equal(lse, again[1])


@pytest.mark.parametrize("head_dim", [328, 512])
def test_documents_see_their_own_keys_alone(head_dim: int) -> None:
    lengths_q, lengths_k, before, behind = (130, 0, 65, 70, 3), (200, 3, 0, 70, 64), 5, 9
    q = normal(0, 1, before + sum(lengths_q) + behind, 2, head_dim)
    k, v = (normal(seed, 1, before + sum(lengths_k) + behind, 1, head_dim) for seed in (1, 2))
    ends_q, ends_k = ([before, *accumulate(x, initial=before)][1:] for x in (lengths_q, lengths_k))
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full((1, 2, q.shape[1]), -math.inf, dtype=torch.float64)
    for (q0, q1), (k0, k1) in zip(pairwise(ends_q), pairwise(ends_k), strict=True):
        if q1 > q0 and k1 > k0:
            own = in_window(q1 - q0, k1 - k0, CAUSAL)
            exact = solve(q[:, q0:q1], k[:, k0:k1], v[:, k0:k1], own)
            out[:, q0:q1], lse[:, :, q0:q1] = exact
    for x in (k, v):  # unused keys must not be read
        x[:, :before] = x[:, ends_k[-1] :] = math.nan
    got = emulate_forward(
        *(q, k, v),
        window=CAUSAL,
        documents=cu_seqlens(ends_q, ends_k),
        longest=(max(lengths_q), max(lengths_k)),
        gpu=gpu(head_dim),
    )
    require_near(got, (out, lse))


@pytest.mark.parametrize("kind", ["lists", "intervals"])
@pytest.mark.parametrize(("head_dim", "seqlen_q", "seqlen_k"), [(512, 150, 190), (384, 257, 450)])
def test_masks_of_tiles_and_of_intervals(
    kind: str, head_dim: int, seqlen_q: int, seqlen_k: int
) -> None:
    visible = draw_visible(kind, (head_dim, seqlen_q, seqlen_k), (128, 320))
    plan = BlockMask.from_dense(visible).plan(1, 1, seqlen_q, seqlen_k)
    q = normal(0, 1, seqlen_q, 1, head_dim)
    k, v = (normal(seed, 1, seqlen_k, 1, head_dim) for seed in (1, 2))
    require_near(emulate_forward(q, k, v, mask=plan, gpu=gpu(2)), solve(q, k, v, visible))


@pytest.mark.parametrize("seqlen_k", [64, 190])  # odd numbers of steps
def test_an_infinite_value_stays_infinite(seqlen_k: int) -> None:
    q, k, v = (normal(seed, 1, rows, 1, 512) for seed, rows in enumerate((70, seqlen_k, seqlen_k)))
    v[:, [0, -1], :, :2] = torch.tensor([math.inf, -math.inf]).bfloat16()
    out, _ = emulate_forward(q, k, v, gpu=gpu(3))
    assert (out[..., 0] == math.inf).all()
    assert (out[..., 1] == -math.inf).all()
    assert out[..., 2:].isfinite().all()
