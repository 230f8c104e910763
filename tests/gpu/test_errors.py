"""Wrong inputs raise in words, and the context stays usable."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from flash_dist import flash_attn_func
from tests.gpu.running import attend
from tests.reference import assert_close, random_problem

if TYPE_CHECKING:
    from collections.abc import Callable

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def cuda(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


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
    "float32": (
        lambda: same(1, 8, 2, 64, dtype=torch.float32),
        TypeError,
        "q must be float16 or bfloat16 on cuda",
    ),
    "head_dim": (lambda: same(1, 8, 2, 80), ValueError, "head_dim must be 64 or 128, got 80"),
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
        "must agree in batch and head_dim",
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
    case: tuple[Callable[[], Triple], type[Exception], str],
) -> None:
    make, error, text = case
    with pytest.raises(error, match=text):
        flash_attn_func(*make())
    problem = random_problem(seqlen_q=33)
    assert_close(attend(problem), problem)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_not_positive_raises(scale: float) -> None:
    with pytest.raises(ValueError, match="softmax_scale must be positive and finite"):
        flash_attn_func(*same(1, 8, 2, 64), softmax_scale=scale)


def test_an_allocation_that_fails_says_so_and_the_next_call_works() -> None:
    q = cuda(1, 1, 1, 64).expand(1, 2**29, 8, 64)
    k = cuda(1, 8, 8, 64)
    with pytest.raises(RuntimeError, match="CUDA out of memory"):
        flash_attn_func(q, k, k)
    problem = random_problem(seqlen_q=33)
    assert_close(attend(problem), problem)
