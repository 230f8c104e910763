"""Invalid inputs raise with a sentence, and the context stays usable."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from flash_dist import flash_attn_func
from flash_dist.masks import BlockMask
from tests.gpu.running import attend
from tests.reference import assert_close, random_problem

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.gpu

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def cuda(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def odd_stride() -> Triple:
    return cuda(1, 8, 2, 65)[..., :64], cuda(1, 8, 2, 64), cuda(1, 8, 2, 64)


def transposed() -> Triple:
    return cuda(1, 64, 2, 64).transpose(1, 3), cuda(1, 64, 2, 64), cuda(1, 64, 2, 64)


def same(*shape: int, dtype: torch.dtype = torch.float16) -> Triple:
    return cuda(*shape, dtype=dtype), cuda(*shape, dtype=dtype), cuda(*shape, dtype=dtype)


CASES: dict[str, tuple[Callable[[], Triple], type[Exception], str]] = {
    "float64": (
        lambda: same(1, 8, 2, 64, dtype=torch.float64),
        TypeError,
        "q must be float16, bfloat16 or float32 on cuda, got float64",
    ),
    "head_dim": (lambda: same(1, 8, 2, 513), ValueError, "at most 512, got 513"),
    "head_dim-float32": (
        lambda: same(1, 8, 2, 264, dtype=torch.float32),
        ValueError,
        "at most 256 for float32 on cuda, got 264",
    ),
    "head_dim_v": (
        lambda: (*same(1, 8, 2, 64)[:2], cuda(1, 8, 2, 72)),
        ValueError,
        "head_dim_v must be at most head_dim, 64, got 72",
    ),
    "dims": (lambda: same(8, 2, 64), ValueError, "q must have 4 dimensions"),
    "no-heads": (lambda: same(1, 8, 0, 64), ValueError, "no dimension of q"),
    "heads": (
        lambda: (cuda(1, 8, 3, 64), cuda(1, 8, 2, 64), cuda(1, 8, 2, 64)),
        ValueError,
        "num_heads_kv must divide num_heads_q, got 2 .* and 3",
    ),
    "kv-shapes": (
        lambda: (cuda(1, 8, 2, 64), cuda(1, 8, 2, 64), cuda(1, 9, 2, 64)),
        ValueError,
        "k and v must have the same shape",
    ),
    "batch": (
        lambda: (cuda(1, 8, 2, 64), *same(2, 8, 2, 64)[:2]),
        ValueError,
        "must agree in batch",
    ),
    "device": (
        lambda: (cuda(1, 8, 2, 64), cuda(1, 8, 2, 64).cpu(), cuda(1, 8, 2, 64)),
        ValueError,
        "q and k must be on the same device, got cuda:0 and cpu",
    ),
    "mixed-dtype": (
        lambda: (cuda(1, 8, 2, 64), cuda(1, 8, 2, 64).bfloat16(), cuda(1, 8, 2, 64)),
        TypeError,
        "q and k must have the same dtype",
    ),
    "odd-stride": (odd_stride, ValueError, "q must have strides that are multiples of 8 elements"),
    "transposed": (transposed, ValueError, "q must be contiguous in its last dimension"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_wrong_input_raises_and_the_next_call_works(
    case: tuple[Callable[[], Triple], type[Exception], str], any_half: torch.dtype
) -> None:
    make, error, text = case
    with pytest.raises(error, match=text):
        flash_attn_func(*make())
    problem = random_problem(seqlen_q=33, dtype=any_half)
    assert_close(attend(problem), problem)


def test_a_mask_of_another_shape_is_refused() -> None:
    mask = BlockMask.from_dense(torch.ones(9, 9, dtype=torch.bool).tril())
    with pytest.raises(ValueError, match=r"seqlen_q must be 9.* got 8"):
        flash_attn_func(*same(1, 8, 2, 64), mask=mask)


MOST = 2**31 - 1


def rows(count: int, dtype: torch.dtype, *, packed: bool = False) -> torch.Tensor:
    """Return a tensor whose rows all use the memory of one row."""
    row = torch.ones(1, 1, 1, 64, device="cuda", dtype=dtype).expand(1, count, 1, 64)
    return row[0] if packed else row


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(64, MOST), (MOST, 64), (64, 2**30), (MOST, MOST)], ids=str
)
@pytest.mark.parametrize("packed", [False, True], ids=["batched", "packed"])
def test_lengths_that_32_bits_do_not_hold_are_refused(
    seqlen_q: int, seqlen_k: int, any_half: torch.dtype, *, packed: bool
) -> None:
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    q, k = (rows(seqlen, any_half, packed=packed) for seqlen in (seqlen_q, seqlen_k))
    ends = [torch.tensor([0, len(x)], device="cuda", dtype=torch.int32) for x in (q, k)]
    packing = (*ends, MOST, MOST) if packed else (None, None, 0, 0)
    ops, band = torch.ops.flash_dist, [0, -1, -1, 1]
    name = "seqlen_q" if seqlen_q > 2**30 - 128 else "seqlen_k"
    text = rf"{name} must be at most 1073741696, got \d+"
    with pytest.raises(RuntimeError, match=text):
        ops.attention(q, k, k, None, band, *packing, 1.0)
    lse = torch.zeros(1, device="cuda")
    with pytest.raises(RuntimeError, match=text):
        ops.attention_backward(q, q, k, k, q, lse, None, None, None, band, *packing, 1.0, 0, False)  # noqa: FBT003
    assert torch.cuda.max_memory_allocated() <= held + (64 << 20)


def test_a_longest_sequence_that_is_said_too_long_is_cut_to_the_tokens(
    any_half: torch.dtype,
) -> None:
    q = torch.randn(128, 2, 64, device="cuda").to(any_half)
    ends = torch.tensor([0, 60, 128], device="cuda", dtype=torch.int32)
    results = [
        torch.ops.flash_dist.attention(q, q, q, None, [0, -1, -1, 1], ends, ends, most, most, 0.125)
        for most in (68, MOST)
    ]
    assert all(map(torch.equal, *results))
