"""Runs two layers on two GPUs with one mask that was made on the first GPU, as a program.

    python tests/gpu/pipeline.py flash_dist|flex

Prints one line of JSON: the largest error of each tensor over its largest value, or the failure.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import flex_attention as flex

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_HEADS, SEQLEN, HEAD_DIM = 12, 4096, 128
Tensor = torch.Tensor


def make_mask() -> tuple[Tensor, flex.BlockMask]:
    """Return booleans on cuda:0 and the BlockMask whose mask_mod looks them up."""
    generator = torch.Generator("cuda:0").manual_seed(0)
    visible = torch.rand(SEQLEN, SEQLEN, device="cuda:0", generator=generator) < 0.3
    visible &= (
        torch.rand(32, 32, device="cuda:0", generator=generator)
        .repeat_interleave(128, 0)
        .repeat_interleave(128, 1)
        < 0.5
    )
    visible.fill_diagonal_(fill_value=True)

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        del b, h
        return visible[i, j]

    mask = flex.create_block_mask(
        mask_mod, None, None, SEQLEN, SEQLEN, device="cuda:0", BLOCK_SIZE=128
    )
    return visible, mask


def choose(name: str, mask: flex.BlockMask) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return attention on [batch, num_heads, seqlen, head_dim]."""
    if name == "flex":
        compiled = torch.compile(flex.flex_attention, fullgraph=True)
        return lambda q, k, v: compiled(q, k, v, block_mask=mask)
    import flash_dist  # noqa: PLC0415
    from flash_dist.masks import BlockMask  # noqa: PLC0415

    ours = BlockMask.from_flex(mask)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_dist.flex_attention(q, k, v, block_mask=ours)

    return torch.compile(attention, fullgraph=True)


def run_layers(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, weights: list[Tensor]
) -> dict[str, Tensor]:
    """Return the output of two layers and the gradients of input and weights."""
    leaves = [x.detach().requires_grad_(), *(w.detach().requires_grad_() for w in weights)]
    hidden = leaves[0]
    for layer, weight in enumerate(leaves[1:]):
        hidden = hidden.to(weight.device)
        q, k, v = (hidden @ weight).chunk(3, dim=-1)
        heads = (y.unflatten(-1, (NUM_HEADS, HEAD_DIM)).transpose(1, 2) for y in (q, k, v))
        hidden = hidden + attention(*heads).transpose(1, 2).flatten(2)
        assert hidden.device.index == layer % torch.cuda.device_count()
    grads = torch.autograd.grad(hidden.float().square().mean(), leaves)
    return dict(zip(("out", "dx", "dw0", "dw1"), (hidden.detach(), *grads), strict=True))


def main() -> None:
    """Compare with torch's attention under a dense mask."""
    visible, mask = make_mask()
    width = NUM_HEADS * HEAD_DIM
    generator = torch.Generator("cuda:0").manual_seed(1)
    x = torch.randn(1, SEQLEN, width, device="cuda:0", generator=generator).bfloat16()
    weights = [
        (torch.randn(width, 3 * width, device="cuda:0", generator=generator) * width**-0.5)
        .bfloat16()
        .to(f"cuda:{layer % torch.cuda.device_count()}")
        for layer in range(2)
    ]
    masks = {d: visible.to(d) for d in {w.device for w in weights}}

    def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=masks[q.device])

    expected = run_layers(dense, x, weights)
    try:
        actual = run_layers(choose(sys.argv[1], mask), x, weights)
        torch.cuda.synchronize()
        again = run_layers(choose(sys.argv[1], mask), x, weights)
    except Exception as error:  # noqa: BLE001 - the outcome is what is asked for
        text = next(iter(str(error).strip().splitlines()), "")
        print(json.dumps({"error": f"{type(error).__name__}: {text}"[:300]}))  # noqa: T201
        return
    errors = {
        name: float((actual[name].float() - want.float()).abs().max() / want.float().abs().max())
        for name, want in expected.items()
    }
    same = all(torch.equal(again[name], x) for name, x in actual.items())
    print(json.dumps({"errors": errors, "same_bits_again": same}))  # noqa: T201


if __name__ == "__main__":
    main()
