"""Use flash_dist in a flash-attn program by changing its import line.

python from_flash_attn.py
"""

from __future__ import annotations

import torch

from flash_dist.compat import flash_attn  # instead of: import flash_attn

device = "cuda" if torch.cuda.is_available() else "cpu"
qkv = torch.randn(2, 512, 3, 8, 64, dtype=torch.float16, device=device, requires_grad=True)

out = flash_attn.flash_attn_qkvpacked_func(qkv, causal=True, window_size=(255, 0))
(gradient,) = torch.autograd.grad(out.sum(), qkv)
print(f"out {list(out.shape)}, gradient {list(gradient.shape)}")

# Concatenated sentences of different lengths, as from bert_padding.unpad_input.
lengths = torch.tensor([100, 0, 412], dtype=torch.int32, device=device)
cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
packed = flash_attn.flash_attn_varlen_qkvpacked_func(qkv[0], cu_seqlens, 412, causal=True)
print(f"packed out {list(packed.shape)}")

# The argument deterministic of flash-attention costs nothing here: every call is deterministic.
again = flash_attn.flash_attn_qkvpacked_func(qkv, causal=True, window_size=(255, 0))
print(f"the same bits again: {torch.equal(out, again)}")
