"""Wrong inputs raise in words, and the context stays usable."""

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


def unaligned() -> Triple:
    flat = cuda(8 * 2 * 64 + 1)[1:]
    return flat.view(1, 8, 2, 64), cuda(1, 8, 2, 64), cuda(1, 8, 2, 64)


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
    "head_dim": (lambda: same(1, 8, 2, 84), ValueError, "head_dim must be a multiple of 8 up to"),
    "large-head_dim": (lambda: same(1, 8, 2, 264), ValueError, "up to 256, got 264"),
    "head_dim_v": (
        lambda: (*same(1, 8, 2, 64)[:2], cuda(1, 8, 2, 72)),
        ValueError,
        "head_dim_v must be at most head_dim, 64, got 72",
    ),
    "dims": (lambda: same(8, 2, 64), ValueError, "q must have 4 dimensions"),
    "empty": (lambda: same(1, 0, 2, 64), ValueError, "no dimension of q may be 0"),
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
    "unaligned": (unaligned, ValueError, "q must start at a multiple of 16 bytes"),
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
