"""Trains a tiny Llama by FSDP2 over GPUs of this machine, as a program.

    python tests/gpu/data_parallel.py GPUS

Prints one line of JSON: the loss of every step and a digest of all weights after the last step.
Each rank has packed documents of its own. docs/determinism.md lists the settings for equal bits.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from typing import Any, Final

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.multiprocessing.spawn import spawn

from flash_dist.integrations.transformers import register

STEPS: Final = 8
SEQLEN: Final = 1024
DOCUMENTS: Final = (700, 65, 259)
MODEL: Final = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQLEN,
    "use_cache": False,
}
FIXED: Final = {  # NCCL settings: with the links between the GPUs, they fix the order of sums
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_MIN_NCHANNELS": "8",
    "NCCL_MAX_NCHANNELS": "8",
}


def make_model(device: torch.device) -> Any:  # noqa: ANN401 - transformers has no types
    """Return the model; its float32 weights are sharded over all ranks."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**MODEL)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=register(), dtype=torch.float32
        )
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy).train()


def draw_batch(rank: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return tokens of packed documents, the same in every step."""
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(MODEL["vocab_size"], (2, SEQLEN), generator=generator).to(device)
    positions = torch.cat([torch.arange(length) for length in DOCUMENTS]).to(device)
    return {"input_ids": ids, "labels": ids, "position_ids": positions.expand(2, -1).contiguous()}


def train(rank: int, device: torch.device) -> tuple[list[float], str]:
    """Return the losses of rank 0 and a digest of the weights."""
    model = make_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = draw_batch(rank, device)
    losses = []
    for _ in range(STEPS):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.full_tensor().detach().cpu().numpy().tobytes())
    return losses, digest.hexdigest()


def run_rank(rank: int, world_size: int, store: str) -> None:
    """Do the work of one rank, on its own GPU; rank 0 prints the results."""
    on_gpus = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(rank)
    torch.use_deterministic_algorithms(mode=True)
    backend = "nccl" if on_gpus else "gloo"
    dist.init_process_group(backend, f"file://{store}", world_size=world_size, rank=rank)
    losses, weights = train(rank, device)
    if rank == 0:
        print(json.dumps({"losses": losses, "weights": weights}), flush=True)  # noqa: T201
    dist.destroy_process_group()


def main() -> int:
    """Run the command and return its exit status."""
    count = int(sys.argv[1])
    os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", **FIXED, **os.environ}
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_rank, (count, f"{folder}/store"), count)
    return 0


if __name__ == "__main__":
    sys.exit(main())
