"""Problems of attention to a cache of latent keys, and their solution by float64 loops."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

import flash_dist
from flash_dist.kernels.budget import DEFAULT_BUDGET_MB

Tensor = torch.Tensor


class Tensors(NamedTuple):
    """Inputs of a call."""

    q: Tensor
    k_cache: Tensor
    seqlens: Tensor
    table: Tensor | None


@dataclass(frozen=True)
class Problem:
    """One call of `flash_mla_with_kvcache`."""

    seqlens: tuple[int, ...] = (5, 64, 33)
    capacity: int = 96
    seqlen_q: int = 1
    heads: int = 4
    heads_kv: int = 1
    head_dim: int = 40
    head_dim_v: int = 32
    causal: bool = False
    page: int = 0  # 0: not in pages
    scale: float = 0.25
    seed: int = 0

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return len(self.seqlens)

    def make(self, dtype: torch.dtype, device: str = "cpu") -> Tensors:
        """Fill the tensors with random numbers."""
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype).to(device)

        table = None
        shape = (self.batch, self.capacity)
        if self.page:
            pages = -(-self.capacity // self.page)
            shape = (self.batch * pages + 3, self.page)
            order = torch.randperm(shape[0], generator=generator)[: self.batch * pages]
            table = order.reshape(self.batch, pages).to(torch.int32).to(device)
        return Tensors(
            normal(self.batch, self.seqlen_q, self.heads, self.head_dim),
            normal(*shape, self.heads_kv, self.head_dim),
            torch.tensor(self.seqlens, dtype=torch.int32).to(device),
            table,
        )

    def arguments(self, tensors: Tensors) -> dict[str, Any]:
        """Return the arguments of the function."""
        return {
            "q": tensors.q,
            "k_cache": tensors.k_cache,
            "block_table": tensors.table,
            "cache_seqlens": tensors.seqlens,
            "head_dim_v": self.head_dim_v,
            "softmax_scale": self.scale,
            "causal": self.causal,
        }

    def call(self, tensors: Tensors, **changes: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        """Return out and lse."""
        return flash_dist.flash_mla_with_kvcache(**{**self.arguments(tensors), **changes})

    def operator_call(self, tensors: Tensors) -> tuple[Any, tuple[Any, ...]]:
        """Return the operator and its arguments."""
        band = -1, 0 if self.causal else -1
        numbers = 0, self.scale, *band, DEFAULT_BUDGET_MB << 20, 0.0, None, None, self.head_dim_v
        where = tensors.seqlens, None, None, tensors.table, None, 0
        operator = torch.ops.flash_dist.decode.default
        return operator, (tensors.q, tensors.k_cache, None, *where, *numbers)

    def solve(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """Return out and lse in float64 on the CPU, one row after the other."""
        q, cache = (x.double().cpu() for x in tensors[:2])
        out = torch.zeros(self.batch, self.seqlen_q, self.heads, self.head_dim_v).double()
        lse = torch.full((self.batch, self.heads, self.seqlen_q), -math.inf).double()
        for b, length in enumerate(self.seqlens):
            keys = self._keys(tensors, cache, b)
            for h in range(self.heads):
                own = keys[:, h * self.heads_kv // self.heads]
                for i in range(self.seqlen_q):
                    seen = own[: max(length - self.seqlen_q + i + 1, 0) if self.causal else length]
                    if len(seen):
                        scores = seen @ q[b, i, h] * self.scale
                        lse[b, h, i] = scores.logsumexp(0)
                        weights = (scores - lse[b, h, i]).exp()
                        out[b, i, h] = weights @ seen[:, : self.head_dim_v]
        return out, lse

    def _keys(self, tensors: Tensors, cache: Tensor, b: int) -> Tensor:
        """Return [seqlen, heads_kv, head_dim] of a sequence."""
        if tensors.table is None:
            return cache[b, : self.seqlens[b]]
        pages = cache[tensors.table[b].long().cpu()]
        return pages.flatten(0, 1)[: self.seqlens[b]]


SMALL: Final = {
    "one query": Problem(),
    "several queries": Problem(seqlen_q=3),
    "causal": Problem(seqlen_q=3, causal=True),
    "more queries than keys": Problem(seqlens=(2, 0, 9), seqlen_q=6, causal=True),
    "empty": Problem(seqlens=(0, 0, 0)),
    "pages": Problem(page=16),
    "large pages": Problem(page=48, seqlen_q=2, causal=True),
    "several kv heads": Problem(heads=6, heads_kv=3),
    "all columns are values": Problem(head_dim_v=40),
    "as DeepSeek-V3 has it": Problem(
        heads=16, head_dim=576, head_dim_v=512, page=64, capacity=128, scale=192**-0.5
    ),
}
