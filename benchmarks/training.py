"""Training steps of a Llama of 1.1 billion random weights on packed documents, by transformers.

    python benchmarks/training.py [--attention fdist|sdpa|flex_attention|eager] [--steps 20]

bfloat16, AdamW, 8 rows of 4096 tokens in documents of 64 to 2048, whose `position_ids` begin anew.
Prints one line of JSON: milliseconds of a step (forward, backward, optimizer), median of those
behind the third, the peak of torch's allocator, and the loss of every step. With --deterministic,
`torch.use_deterministic_algorithms(True)`: two runs then have the same losses, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import torch
import transformers

from flash_dist.integrations.transformers import register

if TYPE_CHECKING:
    from collections.abc import Iterator

Tensor = torch.Tensor

BATCH, SEQLEN, VOCABULARY = 8, 4096, 32768
SHORTEST, LONGEST = 64, 2048  # tokens of a document
PHRASE: Final = 32  # a document repeats its first ones, so that there is something to learn
WARM_UP: Final = 3  # steps
MODEL: Final = {
    "vocab_size": VOCABULARY,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": SEQLEN,
    "use_cache": False,
}


def make_model(attention: str) -> Any:  # noqa: ANN401
    """Return the model on the GPU, with the same weights whatever its attention."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**MODEL)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=torch.bfloat16
        )
    return model.train()


def draw_batches(count: int) -> Iterator[dict[str, Tensor]]:
    """Yield tokens and position_ids [BATCH, SEQLEN], and labels that no document's end tells of."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        ids, positions = torch.empty(2, BATCH, SEQLEN, dtype=torch.int64).unbind()
        for row in range(BATCH):
            first = 0
            while first < SEQLEN:
                drawn = int(torch.randint(SHORTEST, LONGEST + 1, (), generator=generator))
                length = min(drawn, SEQLEN - first)
                phrase = torch.randint(VOCABULARY, (PHRASE,), generator=generator)
                numbers = torch.arange(length)
                ids[row, first : first + length] = phrase[numbers % PHRASE]
                positions[row, first : first + length] = numbers
                first += length
        labels = ids.masked_fill(positions == 0, -100)
        batch = {"input_ids": ids, "position_ids": positions, "labels": labels}
        yield {name: x.cuda() for name, x in batch.items()}


def train(attention: str, steps: int) -> dict[str, Any]:
    """Return what was measured over some steps."""
    model = make_model(attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    batches = list(draw_batches(steps))
    losses, times = [], []
    for batch in batches:
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        times.append(1e3 * (time.perf_counter() - start))
        del loss
    return {
        "attention": attention,
        "milliseconds": round(statistics.median(times[WARM_UP:]), 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "losses": losses,
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    name = register()
    parser.add_argument("--attention", default=name)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--deterministic", action="store_true")
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        parser.error(f"--steps must be more than {WARM_UP}, got {options.steps}")
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(mode=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    found = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **train(options.attention, options.steps),
    }
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
