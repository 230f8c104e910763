"""Captures a layer with torch.cuda.make_graphed_callables, as a program.

    python tests/gpu/graphed.py [ours|packed|masked|torch] [alone|alive]

`alive`: an autograd graph of the same parameters, made on the default stream, still exists. Trains
a step with the captured layer, compares its gradients with those of the layer itself, and prints
`same`, or the error. A failed capture lasts until the process ends.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if __name__ == "__main__":  # run by path: the root is not on the path
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from flash_dist import BlockMask, flash_attn_func, flash_attn_varlen_func

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
SEQLEN = 200


def by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute torch's attention in our layout."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    function = torch.nn.functional.scaled_dot_product_attention
    return function(q, k, v, is_causal=True).transpose(1, 2)


def attentions() -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Return the functions by their command-line names."""
    ends = torch.tensor([0, 70, SEQLEN], dtype=torch.int32, device="cuda")
    mask = BlockMask.documents([int(token > SEQLEN // 3) for token in range(SEQLEN)])

    def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x[0] for x in (q, k, v))
        return flash_attn_varlen_func(q, k, v, ends, ends, SEQLEN, SEQLEN, causal=True)[None]

    return {
        "ours": lambda q, k, v: flash_attn_func(q, k, v, causal=True),
        "masked": lambda q, k, v: flash_attn_func(q, k, v, mask=mask),
        "packed": packed,
        "torch": by_torch,
    }


class Layer(torch.nn.Module):
    """Projection and attention."""

    def __init__(self, attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.project = torch.nn.Linear(128, 3 * 128, device="cuda", dtype=torch.float16)
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of attention, [1, seqlen, 128]."""
        q, k, v = self.project(x).unflatten(-1, (3, 2, 64)).unbind(-3)
        return self.attention(q, k, v).flatten(-2)


def train(layer: torch.nn.Module, parameters: list[torch.nn.Parameter], x: Tensor) -> list[Tensor]:
    """Return the gradients of a step."""
    return list(torch.autograd.grad(layer(x).float().square().sum(), parameters))


def main() -> str:
    """Capture a layer, train it, and compare the gradients; return `same` or the error."""
    name, state = sys.argv[1:]
    torch.manual_seed(0)
    layer = Layer(attentions()[name])
    parameters = list(layer.parameters())
    x = torch.randn(1, SEQLEN, 128, device="cuda", dtype=torch.float16, requires_grad=True)
    want = train(layer, parameters, x)
    alive = layer(x) if state == "alive" else None
    sample = torch.randn_like(x, requires_grad=True)
    try:
        torch.cuda.make_graphed_callables(layer, (sample,))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is compared
        return f"{type(error).__name__} {error}".partition("\n")[0]
    del alive
    got = train(layer, parameters, x)
    torch.cuda.synchronize()
    return "same" if all(map(torch.equal, got, want)) else "other gradients"


if __name__ == "__main__":
    sys.stdout.write(main() + "\n")
