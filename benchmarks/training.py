"""Training steps of a Llama of 1.1 billion random weights on packed documents, by transformers.

    python benchmarks/training.py [--attention fdist sdpa flex_attention eager] [--steps 20]

bfloat16, AdamW, 8 rows of 4096 tokens in documents of 64 to 2048, whose `position_ids` begin anew.
Prints one line of JSON for each attention, as soon as it is there: milliseconds of a step (forward,
backward, optimizer), median of those behind the third, those of the first, in which flex_attention
is compiled, the peak of torch's allocator, and the loss of every step. With --deterministic,
`torch.use_deterministic_algorithms(True)`: two runs then have the same losses, bit for bit. With
`--device cpu` a tiny model takes the same steps, to try the program: torch's flex_attention has no
backward there.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import transformers

from flash_dist.integrations.transformers import register

if TYPE_CHECKING:
    from collections.abc import Iterator

NO_GPU = "error: nothing was measured: torch sees no GPU here\n\nhint: "
Tensor = torch.Tensor

PHRASE: Final = 32  # a document repeats its first tokens, so that there is something to learn
WARM_UP: Final = 3  # steps
MODEL: Final = {
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "use_cache": False,
}
TINY: Final = MODEL | {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


@dataclass(frozen=True)
class Run:
    """What every attention is given."""

    device: str
    model: dict[str, Any]
    batch: int
    documents: tuple[int, int]  # the tokens of the shortest and of the longest


RUNS: Final = {
    "cuda": Run("cuda", MODEL, batch=8, documents=(64, 2048)),
    "cpu": Run("cpu", TINY, batch=2, documents=(16, 256)),
}


def make_model(attention: str, run: Run) -> Any:  # noqa: ANN401
    """Return the model, with the same weights whatever its attention."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**run.model)
    with torch.device(run.device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=torch.bfloat16
        )
    return model.train()


def draw_batches(run: Run, count: int) -> Iterator[dict[str, Tensor]]:
    """Yield tokens, position_ids, and labels that no document's end tells of: [batch, seqlen]."""
    generator = torch.Generator().manual_seed(1)
    seqlen, vocabulary = run.model["max_position_embeddings"], run.model["vocab_size"]
    shortest, longest = run.documents
    for _ in range(count):
        ids, positions = torch.empty(2, run.batch, seqlen, dtype=torch.int64).unbind()
        for row in range(run.batch):
            first = 0
            while first < seqlen:
                drawn = int(torch.randint(shortest, longest + 1, (), generator=generator))
                length = min(drawn, seqlen - first)
                phrase = torch.randint(vocabulary, (PHRASE,), generator=generator)
                numbers = torch.arange(length)
                ids[row, first : first + length] = phrase[numbers % PHRASE]
                positions[row, first : first + length] = numbers
                first += length
        labels = ids.masked_fill(positions == 0, -100)
        batch = {"input_ids": ids, "position_ids": positions, "labels": labels}
        yield {name: x.to(run.device) for name, x in batch.items()}


def train(attention: str, run: Run, steps: int) -> dict[str, Any]:
    """Return what was measured over some steps."""
    model = make_model(attention, run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    batches = list(draw_batches(run, steps))
    losses, times = [], []
    for batch in batches:
        start = time.perf_counter()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # which waits for all of the step
        times.append(1e3 * (time.perf_counter() - start))
        del loss
    return {
        "attention": attention,
        "milliseconds": round(statistics.median(times[WARM_UP:]), 1),
        "first_milliseconds": round(times[0], 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "losses": losses,
    }


def forget() -> None:
    """Free what the attention before held, and measure the next one's peak by itself."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def set_up(*, deterministic: bool) -> None:
    """Set what holds for all attentions.

    NOTE: past its limit on recompilations dynamo would run flex_attention eagerly without a word.
    """
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # noqa: SLF001 - public by documentation
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(mode=True)
        torch.utils.deterministic.fill_uninitialized_memory = False


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    name = register()
    parser.add_argument("--attention", nargs="+", default=[name])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--device", default="cuda", choices=RUNS)
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        parser.error(f"--steps must be more than {WARM_UP}, got {options.steps}")
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"{NO_GPU}`--device cpu` trains a smaller model")
    set_up(deterministic=options.deterministic)
    machine = {
        "gpu": torch.cuda.get_device_name() if options.device == "cuda" else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    for attention in options.attention:
        found = train(attention, RUNS[options.device], options.steps)
        print(json.dumps(machine | found), flush=True)
        if options.device == "cuda":
            forget()
    return 0


if __name__ == "__main__":
    sys.exit(main())
