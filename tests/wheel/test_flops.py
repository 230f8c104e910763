"""Counts of torch's FlopCounterMode for our calls."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from flash_dist import (
    BlockMask,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    flash_mla_with_kvcache,
)

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
LEAVES = (2, 8, 4, 16), (2, 8, 2, 16), (2, 8, 2, 16)
IMPORTED_LATER = """
import sys
import torch
from flash_dist import flash_attn_func
q, k, v = (torch.randn(2, 8, 4, 16) for _ in range(3))
flash_attn_func(q, k, v)
assert "torch.utils.flop_counter" not in sys.modules
assert "triton" not in sys.modules
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    flash_attn_func(q, k, v)
print(counter.get_total_flops())
"""


def count(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


def test_the_counter_is_imported_by_who_counts_and_then_knows_our_operators() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED_LATER], capture_output=True, text=True, check=False
    )
    assert done.stdout == f"{2 * 2 * 4 * 8 * 8 * (16 + 16)}\n", done.stderr


def train(out: Tensor) -> None:
    out.sum().backward()


def draw() -> list[Tensor]:
    return [torch.randn(shape).requires_grad_() for shape in LEAVES]


@pytest.mark.parametrize("masked", [False, True], ids=["band", "mask"])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_forward_and_backward_count_what_torchs_attention_counts(
    softcap: float, *, masked: bool
) -> None:
    mask = BlockMask.documents([0] * 3 + [1] * 5) if masked else None
    q, k, v = draw()
    ours = count(lambda: train(flash_attn_func(q, k, v, mask=mask, softcap=softcap)))
    operators = torch.ops.aten
    with FakeTensorMode():
        q = torch.empty(2, 4, 8, 16, device="cuda", dtype=torch.float16)
        fwd = operators._scaled_dot_product_flash_attention
        theirs = count(lambda: fwd(q, q, q))
        lse, ends = torch.empty(2, 4, 8, device="cuda"), (None, None, 8, 8, 0.0, False)
        seed = torch.empty((), dtype=torch.int64)
        bwd = operators._scaled_dot_product_flash_attention_backward
        theirs += count(lambda: bwd(q, q, q, q, q, lse, *ends, seed, seed))
    assert ours == theirs > 0


def test_packed_sequences_count_the_pairs_of_each() -> None:
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    q = torch.randn(8, 2, 16)
    got = count(lambda: flash_attn_varlen_func(q, q, q, ends, ends, 5, 5))
    assert got == 2 * 2 * (3 * 3 + 5 * 5) * 32


def test_a_cache_counts_the_keys_that_it_has() -> None:
    q, k = torch.randn(2, 1, 4, 16), torch.randn(2, 32, 2, 16)
    lengths = torch.tensor([5, 9], dtype=torch.int32)
    got = count(lambda: flash_attn_with_kvcache(q, k, k, cache_seqlens=lengths))
    assert got == 2 * 4 * (5 + 9) * 32
    latent = torch.randn(2, 32, 1, 16)
    got = count(lambda: flash_mla_with_kvcache(q, latent, None, lengths, 8))
    assert got == 2 * 4 * (5 + 9) * 24
