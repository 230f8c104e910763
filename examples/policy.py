"""A robotics policy: images and joints, then actions in blocks, with one mask for all layers.

    python policy.py

256 tokens of two cameras and a few of the joints attend to each other; actions come in chunks of
ten, and each chunk attends to itself and to all earlier tokens. One camera of the second robot is
missing.
Multi-query attention with 8 query heads on one key head, of head_dim 256.
"""

from __future__ import annotations

import torch

from flash_dist import BlockMask, flash_attn_func

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32

cameras, joints, chunk, chunks = (128, 128), 5, 10, 4
blocks = [0] * (sum(cameras) + joints)
for number in range(1, chunks + 1):
    blocks += [number] * chunk
seqlen = len(blocks)

there = torch.ones(2, seqlen, dtype=torch.bool)
there[1, cameras[0] : sum(cameras)] = False  # the second camera of the second robot

# The host makes one mask for all layers, both passes and every device. Keys of the missing camera
# get a larger id than every query, so that they are masked.
ids = torch.tensor(blocks).expand(2, -1)
mask = BlockMask.block_causal(ids, ids.masked_fill(~there, chunks + 1))

q = torch.randn(2, seqlen, 8, 256, dtype=dtype, device=device, requires_grad=True)
k, v = (torch.randn(2, seqlen, 1, 256, dtype=dtype, device=device) for _ in range(2))
x = q
for _ in range(3):  # layers
    x = flash_attn_func(x, k, v, mask=mask)
x.sum().backward()

# Actions of the last chunk do not affect earlier tokens.
changed = v.clone()
changed[:, -chunk:] += 1
moved = flash_attn_func(q, k, changed, mask=mask) != flash_attn_func(q, k, v, mask=mask)
print(f"{mask!r}")
print(
    f"rows that change with the last chunk: {int(moved.flatten(2).any(2).any(0).sum())} of {seqlen}"
)
assert moved[:, -chunk:].any()
assert not moved[:, :-chunk].any()
