"""Tests of scale() against torch."""

import pytest
import torch

import my_kernels

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [0, 1, 1000, 100_003])
def test_scale_multiplies_by_the_factor(count: int, device: str) -> None:
    x = torch.randn(count, device=device, requires_grad=True)
    out = my_kernels.scale(x, 1.5)
    out.sum().backward()
    assert torch.equal(out, x * 1.5)
    assert torch.equal(x.grad, torch.full_like(x, 1.5))


def test_a_compiled_call_has_the_same_bits() -> None:
    x = torch.randn(1000, device="cpu")
    torch.library.opcheck(torch.ops.my_kernels.scale, (x, 1.5))
