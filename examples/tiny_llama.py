"""Train a tiny Llama on packed documents, twice: all weights end with the same bits.

    python tiny_llama.py [STEPS]

Documents of different lengths are concatenated without padding. cu_seqlens has the start of each,
so that tokens attend to their own document only. Rotary embeddings count positions from the start
of the document.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from flash_dist import flash_attn_varlen_func

VOCABULARY, WIDTH, LAYERS, HEADS, HEADS_KV, HEAD_DIM = 97, 128, 2, 8, 2, 16


class Attention(nn.Module):
    """Grouped query attention with rotary embeddings, over packed documents."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * HEADS_KV * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)

    def forward(self, x: Tensor, angles: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        """x: [tokens, WIDTH]; angles: [tokens, HEAD_DIM / 2]."""
        q = rotate(self.q(x).unflatten(-1, (HEADS, HEAD_DIM)), angles)
        k, v = self.kv(x).unflatten(-1, (2, HEADS_KV, HEAD_DIM)).unbind(1)
        k = rotate(k, angles)
        out = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest, longest, causal=True)
        projected: Tensor = self.out(out.flatten(-2))
        return projected


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate pairs of columns by the angles of their tokens."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Layer(nn.Module):
    """Attention and a gated network, each after a norm and beside the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, *packing: Tensor | int) -> Tensor:
        """x: [tokens, WIDTH]."""
        x = x + self.attention(self.before(x), *packing)
        gate, value = self.up(self.between(x)).chunk(2, -1)
        update: Tensor = self.down(F.silu(gate) * value)
        return x + update


class Llama(nn.Module):
    """A Llama that returns the logits of the next token, for packed documents."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, ids: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        """ids: [tokens]; cu_seqlens: [documents + 1], int32."""
        starts = cu_seqlens[:-1].repeat_interleave(cu_seqlens.diff(), output_size=len(ids))
        positions = torch.arange(len(ids), device=ids.device) - starts
        steps = torch.arange(HEAD_DIM // 2, device=ids.device) / (HEAD_DIM // 2)
        angles = positions[:, None] * 10_000.0**-steps
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, angles, cu_seqlens, longest)
        logits: Tensor = self.norm(x) @ self.embedding.weight.T
        return logits


def train(device: str, steps: int) -> tuple[list[float], list[Tensor]]:
    """Return the losses and the weights of one run."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = Llama().to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        lengths = torch.randint(8, 120, (6,))
        cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).to(device, torch.int32)
        first = torch.randint(VOCABULARY, (6,)).repeat_interleave(lengths)
        counted = torch.cat([torch.arange(length) for length in lengths.tolist()])
        ids = ((first + counted * 7) % VOCABULARY).to(device)  # the data to learn
        logits = model(ids[:-1], cu_seqlens.clamp(max=len(ids) - 1), int(lengths.max()))
        loss = F.cross_entropy(logits.float(), ids[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, list(model.parameters())


def main() -> int:
    """Train twice and compare."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    (losses, weights), (_, again) = train(device, steps), train(device, steps)
    same = all(torch.equal(a, b) for a, b in zip(weights, again, strict=True))
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {steps} steps on {device}")
    print(f"{len(weights)} weights of two runs, bit by bit: {'equal' if same else 'different'}")
    return int(not same or not losses[-1] < losses[0])


if __name__ == "__main__":
    sys.exit(main())
