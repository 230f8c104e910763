"""The forward with a bias on Hopper (csrc/sm90/fwd/bias.cuh), emulated: values and bits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch

from flash_dist import BlockMask
from tests.scores import place
from tests.unit.made.emulator import UNBOUNDED, Gpu, emulate_forward

if TYPE_CHECKING:
    from flash_dist.masks.plan import MaskPlan

Tensor = torch.Tensor

pytestmark = pytest.mark.slow  # the first test compiles: 40 s

# batch, seqlen_q, seqlen_k, heads, kv heads, head_dim
Shape = tuple[int, int, int, int, int, int]
SHAPES: Final[dict[str, Shape]] = {
    "several steps": (1, 130, 400, 2, 1, 64),
    "columns beyond the end": (2, 65, 136, 2, 2, 128),
    "an odd number of keys": (1, 100, 257, 2, 1, 128),
    "an even number of keys": (1, 100, 258, 1, 1, 64),
    "part of the head": (1, 64, 300, 1, 1, 72),
}
BROADCASTS: Final = [(1, 1, 1, 1), (0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (0, 0, 0, 1)]
DTYPES: Final = [torch.bfloat16, torch.float32]


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def inputs(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim = shape
    q = normal(0, batch, seqlen_q, heads, head_dim)
    k, v = (normal(seed, batch, seqlen_k, heads_kv, head_dim) for seed in (1, 2))
    return q, k, v


def draw(shape: Shape, taken: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a random bias, full on the axes that are `taken`; some of its numbers mask a key.

    Rows begin at multiples of 16 bytes, with NaN between them.
    """
    full = shape[0], shape[3], shape[1], shape[2]
    sizes = [n if takes else 1 for n, takes in zip(full, taken, strict=True)]
    bias = torch.full((*sizes[:3], (sizes[3] + 7) // 8 * 8), torch.nan, dtype=dtype)
    bias = bias[..., : sizes[3]].copy_(2 * normal(3, *sizes))
    if sizes[3] > 2:  # so that some keys stay visible
        bias[..., ::7] = -math.inf
        bias[..., 1::7] = -65536.0
    return bias


def solve(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, visible: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return out and lse in float64."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * q.shape[-1] ** -0.5
    scores = scores + bias.double().masked_fill(bias <= -65504, -math.inf)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp()
    return (weights @ v.repeat_interleave(group, 1)).transpose(1, 2), lse


def check(shape: Shape, bias: Tensor, visible: Tensor | None = None, **options: Any) -> Tensor:  # noqa: ANN401
    """Compare with float64, and two orders of warps with each other."""
    tensors = inputs(shape)
    exact, exact_lse = solve(*tensors, bias, visible)
    out, lse = emulate_forward(*tensors, bias=bias, gpu=Gpu(capability=90, plan=227), **options)
    assert (out.double() - exact).norm() <= 4e-3 * exact.norm()
    assert torch.equal(lse.isinf(), exact_lse.isinf())
    assert torch.allclose(lse.double(), exact_lse, atol=2e-5, rtol=0)
    other = Gpu(capability=90, plan=227, seed=1, sm_count=2)
    again, _ = emulate_forward(*tensors, bias=bias, gpu=other, **options)
    assert torch.equal(out, again)
    return out


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_values_are_right_and_bits_the_same_in_any_order(shape: Shape) -> None:
    for dtype in DTYPES:
        check(shape, draw(shape, (0, 1, 1, 1), dtype))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("taken", BROADCASTS, ids=str)
def test_every_axis_may_be_broadcast(
    taken: tuple[int, ...], dtype: torch.dtype, head_dim: int
) -> None:
    shape = (2, 70, 136, 2, 1, head_dim)
    check(shape, draw(shape, taken, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_without_a_key_are_zeros(dtype: torch.dtype) -> None:
    shape = (1, 140, 200, 1, 1, 64)
    bias = draw(shape, (1, 1, 1, 1), dtype)
    bias[:, :, ::3] = -torch.inf
    assert not check(shape, bias)[:, ::3].any()


def check_masks(shape: Shape, bias: Tensor) -> None:
    """Check a call with a window, and one with a list of tiles; the shape has one head."""
    _, seqlen_q, seqlen_k, *_ = shape
    places = torch.arange(seqlen_k) - torch.arange(seqlen_q)[:, None] - (seqlen_k - seqlen_q)
    check(shape, bias, places <= 0, window=(UNBOUNDED, 0))
    generator = torch.Generator().manual_seed(5)
    visible = torch.rand(seqlen_q, seqlen_k, generator=generator) < 0.4
    visible[:, 64:128] = visible[:128, 192:] = False
    plan: MaskPlan = BlockMask.from_dense(visible).plan(1, 1, seqlen_q, seqlen_k)
    check(shape, bias, visible, mask=plan)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_window_and_a_list_of_tiles(dtype: torch.dtype, head_dim: int) -> None:
    shape = (1, 150, 264, 1, 1, head_dim)
    check_masks(shape, draw(shape, (1, 1, 1, 1), dtype))


def refuse(shape: Shape, bias: Tensor) -> None:
    with pytest.raises(RuntimeError, match="no kernel fwd"):  # the general kernel is not emulated
        emulate_forward(*inputs(shape), bias=bias, gpu=Gpu(capability=90, plan=227))


@pytest.mark.parametrize("head_dim", [32, 136])
def test_other_head_dims_are_left_to_the_general_family(head_dim: int) -> None:
    shape = (1, 20, 40, 1, 1, head_dim)
    refuse(shape, draw(shape, (1, 1, 1, 1), torch.bfloat16))


def test_biases_with_distant_keys_are_left_to_the_general_family() -> None:
    shape = (1, 20, 40, 1, 1, 64)
    bias = draw(shape, (1, 1, 1, 1), torch.bfloat16)
    refuse(shape, bias.new_zeros(1, 1, 40, 24)[..., :20].transpose(2, 3))
    refuse(shape, bias[..., :1])


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("taken", BROADCASTS, ids=str)
def test_rows_may_begin_anywhere(taken: tuple[int, ...], dtype: torch.dtype, head_dim: int) -> None:
    shape = (2, 140, 201, 2, 1, head_dim)
    bias = draw(shape, taken, dtype)
    whole = check(shape, bias)
    for begin, row in [(0, 201), (1, 208), (7, 202), (2, 203)]:
        assert torch.equal(check(shape, place(bias, begin, row)), whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_begin_anywhere_under_a_window_and_a_list(dtype: torch.dtype) -> None:
    shape = (1, 150, 265, 1, 1, 64)
    check_masks(shape, place(draw(shape, (1, 1, 1, 1), dtype), 3, 265))
