"""Layers on two devices share one mask, which is made on neither and needs no copies.

    python pipeline.py

With two GPUs the second half of the layers is on the second; otherwise all are on one GPU or on the
CPU. FlexAttention's BlockMask works, too, from any device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from flash_dist import BlockMask, flash_attn_func, flex_attention

count = torch.cuda.device_count()
first = "cuda:0" if count else "cpu"
second = "cuda:1" if count > 1 else first
dtype = torch.float16 if count else torch.float32

documents = torch.tensor([0] * 300 + [1] * 500 + [2] * 224)
mask = BlockMask.documents(documents) & BlockMask.causal()


def layer(x: Tensor) -> Tensor:
    return x + flash_attn_func(x, x, x, mask=mask)  # on the device of x


x = torch.randn(1, len(documents), 4, 64, dtype=dtype, device=first, requires_grad=True)
out = layer(layer(x).to(second))
(gradient,) = torch.autograd.grad(out.sum(), x)
print(f"{first} -> {second}: out {list(out.shape)}, gradient on {gradient.device}")

on_first = documents.to(first)


def mask_mod(_b: Tensor, _h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (on_first[i] == on_first[j]) & (i >= j)


theirs = create_block_mask(mask_mod, None, None, 1024, 1024, first)
q = torch.randn(1, 4, 1024, 64, dtype=dtype, device=second)
tokens = q.transpose(1, 2)
same = torch.equal(
    flex_attention(q, q, q, block_mask=theirs),
    flash_attn_func(tokens, tokens, tokens, mask=mask).transpose(1, 2),
)
print(
    f"torch's BlockMask made on {first}, used on {second}: {'the same bits' if same else 'OTHER'}"
)
assert same
