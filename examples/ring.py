"""One sequence over several processes, each with one part of the tokens.

    torchrun --standalone --nproc-per-node 2 ring.py

With as many GPUs as processes, each uses one, with NCCL; otherwise all use the CPU, with gloo.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from flash_dist import flash_attn_func, ring_attention, ring_shard, ring_unshard

if "RANK" not in os.environ:
    command = "torchrun --standalone --nproc-per-node 2 ring.py"
    sys.exit(f"error: ring.py is started by torchrun, which tells its rank\n\nhint: `{command}`")

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
on_gpus = torch.cuda.device_count() >= world_size
device = f"cuda:{rank}" if on_gpus else "cpu"
if on_gpus:
    torch.cuda.set_device(rank)
dist.init_process_group("nccl" if on_gpus else "gloo")

# Here every process has all tokens, to compare the result; in training it has only its part.
torch.manual_seed(0)
dtype = torch.bfloat16 if on_gpus else torch.float32
q, k, v = (torch.randn(1, 1024, heads, 64).to(device, dtype) for heads in (8, 2, 2))
parts = [ring_shard(x).requires_grad_() for x in (q, k, v)]
out = ring_attention(*parts, causal=True)
found = [out.detach(), *torch.autograd.grad(out.sum(), parts)]

whole = [x.requires_grad_() for x in (q, k, v)]
want = flash_attn_func(q, k, v, causal=True)
wanted = [want.detach(), *torch.autograd.grad(want.sum(), whole)]
errors = [
    ((ring_unshard(x) - y).abs().max() / y.abs().max()).item()
    for x, y in zip(found, wanted, strict=True)
]
if rank == 0:
    said = ", ".join(
        f"{name} {x:.1e}" for name, x in zip(("out", "dq", "dk", "dv"), errors, strict=True)
    )
    print(
        f"{world_size} ranks on {device.partition(':')[0]}, each with {out.shape[1]} of 1024 tokens"
    )
    print(f"largest difference from one process, as a share of the largest value: {said}")
assert max(errors) < (0.02 if on_gpus else 1e-5)
dist.destroy_process_group()
