"""A program written for flash_attn, with another import, on the CPU."""

from __future__ import annotations

import pytest
import torch

import flash_dist
from flash_dist.compat import flash_attn
from flash_dist.compat.flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_dist.compat.flash_attn.bert_padding import pad_input, unpad_input

Tensor = torch.Tensor


def test_the_functions_are_those_of_this_package() -> None:
    for name in flash_attn.__all__:
        assert getattr(flash_attn, name) is getattr(flash_dist, name)
        assert getattr(flash_attn.flash_attn_interface, name) is getattr(flash_dist, name)
    assert flash_attn_func is flash_dist.flash_attn_func


def test_the_interface_refuses_what_changes_with_every_version() -> None:
    with pytest.raises(
        ImportError, match=r"(?s)no `_flash_attn_forward`: .*hint: .*merge_attention"
    ):
        from flash_dist.compat.flash_attn.flash_attn_interface import (  # noqa: PLC0415
            _flash_attn_forward,  # noqa: F401
        )


def test_attention_without_padding_is_that_of_each_sequence() -> None:
    lengths = (3, 7, 1)
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(3, 7, 3, 2, 16, dtype=torch.float64, generator=generator).requires_grad_()
    mask = torch.arange(7) < torch.tensor(lengths)[:, None]
    tokens, indices, cu_seqlens, longest, _ = unpad_input(qkv, mask)
    q, k, v = tokens.unbind(1)
    out = flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, longest, longest, 0.0, causal=True
    )
    padded = pad_input(out, indices, 3, 7)
    want = torch.zeros_like(padded)
    for row, length in enumerate(lengths):
        q, k, v = qkv[row : row + 1, :length].unbind(2)
        want[row, :length] = flash_attn_func(q, k, v, 0.0, None, True)[0]  # noqa: FBT003
    torch.testing.assert_close(padded, want)
    upstream = torch.randn(padded.shape, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(
        torch.autograd.grad(padded, qkv, upstream), torch.autograd.grad(want, qkv, upstream)
    )
