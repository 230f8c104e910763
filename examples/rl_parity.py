"""Generate with a small Llama, then compute the log-probabilities of its tokens as a trainer does.

    python rl_parity.py

A policy gradient weighs tokens by the probability of the trainer over that of the generator, which
would be 1 if both computed the same. The generator has a cache and one query, the trainer all
queries at once. `match_kvcache` gives attention the same bits. Matrix products and norms, too,
choose an order by the number of rows: here they get one row at a time. A server and a trainer would
use batch-invariant kernels for these.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

import flash_dist
import flash_dist.integrations.transformers as fdist
from flash_dist.errors import FlashDistError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn

SEQUENCES, PROMPT, TOKENS = 4, 9, 40
CACHES = ("dynamic", "static")


def make_model(device: str) -> Any:  # noqa: ANN401 - of transformers
    """Return a Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - may be missing

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    config = LlamaConfig(vocab_size=97, initializer_range=0.2, **sizes, **heads)
    config._attn_implementation = "fdist"  # noqa: SLF001 - as from_pretrained's attn_implementation
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return LlamaForCausalLM(config).to(device, dtype)


def by_rows(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function that calls `forward` for each row and joins the results."""

    def run(x: Tensor) -> Tensor:
        rows = [forward(row) for row in x.reshape(-1, 1, x.shape[-1]).unbind()]
        return torch.cat(rows).view(*x.shape[:-1], -1)

    return run


def make_invariant(model: nn.Module) -> None:
    """Make matrix products and norms compute one row at a time."""
    for module in model.modules():
        if type(module).__name__ in {"Linear", "LlamaRMSNorm"}:
            module.forward = by_rows(module.forward)


@contextmanager
def record_attention(model: Any) -> Iterator[list[list[Tensor]]]:  # noqa: ANN401
    """Yield a list for each layer that collects the output of attention in each forward."""
    layers = [layer.self_attn.o_proj for layer in model.model.layers]
    seen: list[list[Tensor]] = [[] for _ in layers]
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, own=own: own.append(args[0].detach()))
        for layer, own in zip(layers, seen, strict=True)
    ]
    yield seen
    for hook in hooks:
        hook.remove()


def log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probabilities of the tokens, [SEQUENCES, TOKENS], in float32."""
    rows = by_rows(lambda row: row.log_softmax(-1))(logits.float())
    return rows.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def compare(model: Any, cache: str) -> list[int]:  # noqa: ANN401
    """Count the values that differ: attention's in each layer, then log-probabilities."""
    prompts = torch.randint(97, (SEQUENCES, PROMPT), generator=torch.Generator().manual_seed(1))
    with record_attention(model) as generated:
        torch.manual_seed(2)
        result = model.generate(
            prompts.to(model.device),
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            do_sample=True,
            cache_implementation=None if cache == "dynamic" else cache,
            disable_compile=True,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
    new = result.sequences[:, PROMPT:]
    before = log_probabilities(torch.stack(result.logits, 1), new)
    with record_attention(model) as trained:
        logits = model(result.sequences[:, :-1], use_cache=False).logits
    now = log_probabilities(logits[:, PROMPT - 1 :], new)
    ratio = (now - before).exp()
    ratio.sum().backward()  # the gradient of a policy whose tokens all have the advantage 1
    layers = zip(generated, trained, strict=True)
    counts = [int((torch.cat(parts, 1) != whole).sum()) for parts, (whole,) in layers]
    return [*counts, int((before != now).sum())]


def main() -> int:
    """Count differences with and without match_kvcache."""
    try:
        fdist.register()
    except FlashDistError as error:  # without transformers
        print(error, file=sys.stderr)
        return 2
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(device)
    make_invariant(model)
    differing = 0
    for matches in (False, True):
        for cache in CACHES:
            with flash_dist.match_kvcache(matches):
                *layers, tokens = compare(model, cache)
            print(f"match_kvcache {matches}, {cache} cache, {device}: differing values")
            print(f"  of attention, layer by layer: {layers}")
            print(f"  of {SEQUENCES * TOKENS} log-probabilities: {tokens}")
            differing += matches * (sum(layers) + tokens)
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
