"""Problems of attention to a cache, and their solution by float64 loops."""

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
    v_cache: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor
    seqlens: Tensor
    batch_idx: Tensor | None
    leftpad: Tensor | None
    table: Tensor | None
    slopes: Tensor | None  # [batch, heads]
    sinks: Tensor | None


class Solution(NamedTuple):
    """The expected results, float64 on the CPU."""

    out: Tensor
    lse: Tensor
    k_cache: Tensor
    v_cache: Tensor


@dataclass(frozen=True)
class Problem:
    """One call of `flash_attn_with_kvcache`."""

    seqlens: tuple[int, ...] = (5, 64, 33)  # keys before new ones are appended
    capacity: int = 96
    seqlen_q: int = 1
    heads: int = 2
    heads_kv: int = 2
    head_dim: int = 32
    head_dim_v: int = 0  # 0: head_dim
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    page: int = 0  # 0: not in pages
    entries: int = 0  # entries of a cache without pages; 0: one per sequence
    batch_idx: tuple[int, ...] = ()
    leftpad: tuple[int, ...] = ()
    seqlen_new: int = 0
    rotary_dim: int = 0
    interleaved: bool = True
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    seed: int = 0

    @property
    def slope(self) -> float:
        """The steepest slope of ALiBi, chosen so that the first keys count as well."""
        return 4 / self.capacity

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return len(self.seqlens)

    def make(self, dtype: torch.dtype, device: str = "cpu") -> Tensors:
        """Fill the tensors with random numbers."""
        generator = torch.Generator().manual_seed(self.seed)
        head_dim_v = self.head_dim_v or self.head_dim

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype).to(device)

        def numbers(values: tuple[int, ...]) -> Tensor | None:
            return torch.tensor(values, dtype=torch.int32).to(device) if values else None

        table = None
        shape = (self.entries or self.batch, self.capacity)
        if self.page:
            pages = -(-self.capacity // self.page)
            shape = (self.batch * pages + 3, self.page)
            order = torch.randperm(shape[0], generator=generator)[: self.batch * pages]
            table = order.reshape(self.batch, pages).to(torch.int32).to(device)
        angles = torch.rand(self.capacity + 8, self.rotary_dim // 2, generator=generator)
        angles = angles * 2 * math.pi
        new = (self.batch, self.seqlen_new, self.heads_kv)
        return Tensors(
            normal(self.batch, self.seqlen_q, self.heads, self.head_dim),
            normal(*shape, self.heads_kv, self.head_dim),
            normal(*shape, self.heads_kv, head_dim_v),
            normal(*new, self.head_dim),
            normal(*new, head_dim_v),
            angles.cos().to(dtype).to(device),
            angles.sin().to(dtype).to(device),
            torch.tensor(self.seqlens, dtype=torch.int32).to(device),
            numbers(self.batch_idx),
            numbers(self.leftpad),
            table,
            torch.rand(self.batch, self.heads, generator=generator).to(device) * self.slope
            if self.alibi
            else None,
            torch.randn(self.heads, generator=generator).to(device) if self.sinks else None,
        )

    def arguments(self, tensors: Tensors) -> dict[str, Any]:
        """Return the arguments of the function."""
        given: dict[str, Any] = {
            "q": tensors.q,
            "k_cache": tensors.k_cache,
            "v_cache": tensors.v_cache,
            "cache_seqlens": tensors.seqlens,
            "cache_batch_idx": tensors.batch_idx,
            "cache_leftpad": tensors.leftpad,
            "block_table": tensors.table,
            "causal": self.causal,
            "window_size": self.window,
            "return_softmax_lse": True,
        }
        if self.softcap:
            given |= {"softcap": self.softcap}
        if tensors.slopes is not None:
            given |= {"alibi_slopes": tensors.slopes}
        if tensors.sinks is not None:
            given |= {"learnable_sink": tensors.sinks}
        if self.seqlen_new:
            given |= {"k": tensors.k, "v": tensors.v}
        if self.rotary_dim:
            given |= {"rotary_cos": tensors.cos, "rotary_sin": tensors.sin}
            given |= {"rotary_interleaved": self.interleaved}
        return given

    def call(self, tensors: Tensors) -> tuple[Tensor, Tensor]:
        """Return out and lse."""
        out, lse = flash_dist.flash_attn_with_kvcache(**self.arguments(tensors))
        return out, lse

    def operator_calls(self, tensors: Tensors) -> list[tuple[Any, tuple[Any, ...]]]:
        """Return the operators that such a call dispatches, with their arguments."""
        from flash_dist.kernels import cache  # noqa: F401, PLC0415 - has them registered

        caches = tensors.k_cache, tensors.v_cache
        left, right = self.window[0], 0 if self.causal else self.window[1]
        calls: list[tuple[Any, tuple[Any, ...]]] = []
        if self.seqlen_new:
            angles = (tensors.cos, tensors.sin) if self.rotary_dim else (None, None)
            where = tensors.seqlens, tensors.batch_idx, tensors.table
            new = tensors.k, tensors.v
            how = self.interleaved, self.causal
            calls.append(
                (torch.ops.flash_dist.append, (tensors.q, *caches, *new, *where, *angles, *how))
            )
        known = tensors.seqlens, tensors.batch_idx, tensors.leftpad, tensors.table, None, 0
        numbers = self.seqlen_new, self.head_dim**-0.5, left, right, DEFAULT_BUDGET_MB << 20
        scores = self.softcap, tensors.slopes, tensors.sinks
        calls.append((torch.ops.flash_dist.decode, (tensors.q, *caches, *known, *numbers, *scores)))
        return calls

    def solve(self, tensors: Tensors) -> Solution:
        """Compute the results by loops, without changing the tensors."""
        q, k_cache, v_cache, new_k, new_v, cos, sin = (x.double().cpu() for x in tensors[:7])
        k_cache, v_cache = k_cache.clone(), v_cache.clone()
        ordered = self.causal or self.window != (-1, -1)
        out = torch.zeros(*q.shape[:-1], v_cache.shape[-1], dtype=torch.float64)
        lse = torch.full((self.batch, self.heads, self.seqlen_q), -math.inf, dtype=torch.float64)
        for b in range(self.batch):
            length = self.seqlens[b]
            for i in range(self.seqlen_new):
                key = self._turn(new_k[b, i], cos, sin, length + i)
                k_cache[self._place(tensors, b, length + i)] = key
                v_cache[self._place(tensors, b, length + i)] = new_v[b, i]
            begin = self.leftpad[b] if self.leftpad else 0
            end = length + self.seqlen_new
            places = [self._place(tensors, b, j) for j in range(begin, end)]
            keys, values = ([cache[place] for place in places] for cache in (k_cache, v_cache))
            for i in range(self.seqlen_q):
                query = self._turn(q[b, i], cos, sin, length + i * ordered)
                diagonal = i + len(places) - self.seqlen_q
                seen = [j for j in range(len(places)) if self._sees(diagonal, j)]
                for h in range(self.heads if seen else 0):
                    kv = h // (self.heads // self.heads_kv)
                    scores = torch.stack([query[h] @ keys[j][kv] for j in seen])
                    slope = None if tensors.slopes is None else tensors.slopes[b, h]
                    scores = self._bend(scores, slope, (diagonal - torch.tensor(seen)).abs())
                    lse[b, h, i] = scores.logsumexp(0)
                    if tensors.sinks is not None:
                        sink = tensors.sinks[h].double().cpu()
                        lse[b, h, i] = torch.logaddexp(lse[b, h, i], sink)
                    weights = (scores - lse[b, h, i]).exp()
                    out[b, i, h] = weights @ torch.stack([values[j][kv] for j in seen])
                if tensors.sinks is not None and not seen:
                    lse[b, :, i] = tensors.sinks.double().cpu()
        return Solution(out, lse, k_cache, v_cache)

    def _bend(self, scores: Tensor, slope: Tensor | None, distances: Tensor) -> Tensor:
        scores = scores * self.head_dim**-0.5
        if self.softcap:
            scores = self.softcap * (scores / self.softcap).tanh()
        return scores if slope is None else scores - slope.double().cpu() * distances

    def _sees(self, diagonal: int, key: int) -> bool:
        left, right = self.window[0], 0 if self.causal else self.window[1]
        return (left < 0 or key >= diagonal - left) and (right < 0 or key <= diagonal + right)

    def _place(self, tensors: Tensors, b: int, key: int) -> tuple[int, int]:
        if tensors.table is not None:
            return int(tensors.table[b, key // self.page]), key % self.page
        return (self.batch_idx[b] if self.batch_idx else b), key

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor, position: int) -> Tensor:
        """Rotate [heads, head_dim] as complex numbers."""
        columns = self.rotary_dim
        if not columns:
            return x
        turned = x[:, :columns]
        if self.interleaved:
            pairs = torch.complex(turned[:, 0::2], turned[:, 1::2])
        else:
            pairs = torch.complex(turned[:, : columns // 2], turned[:, columns // 2 :])
        pairs = pairs * torch.complex(cos[position], sin[position])
        parts = (pairs.real, pairs.imag)
        joined = torch.stack(parts, -1).flatten(-2) if self.interleaved else torch.cat(parts, -1)
        return torch.cat((joined, x[:, columns:]), -1)


SMALL: Final = {
    "one query": Problem(),
    "grouped": Problem(heads=8, heads_kv=2, seqlen_q=3, causal=True),
    "one kv head": Problem(heads=4, heads_kv=1, seqlen_q=2),
    "window": Problem(seqlen_q=5, window=(20, 3)),
    "causal window": Problem(seqlen_q=5, window=(7, -1), causal=True),
    "more queries than keys": Problem(seqlens=(2, 0, 9), seqlen_q=6, causal=True),
    "empty": Problem(seqlens=(0, 0, 0)),
    "pages": Problem(page=16),
    "large pages": Problem(page=48, seqlen_q=2, causal=True),
    "entries": Problem(entries=5, batch_idx=(4, 0, 2)),
    "left padding": Problem(leftpad=(0, 7, 21)),
    "new keys": Problem(seqlen_new=1),
    "new keys in pages": Problem(seqlen_q=2, seqlen_new=3, page=16),
    "new keys of entries": Problem(seqlen_new=2, entries=4, batch_idx=(3, 1, 0), leftpad=(1, 0, 2)),
    "rotary": Problem(seqlen_q=4, seqlen_new=4, causal=True, rotary_dim=16),
    "rotary halves": Problem(
        seqlen_q=3, seqlen_new=3, causal=True, rotary_dim=32, interleaved=False
    ),
    "rotary without order": Problem(seqlen_q=2, seqlen_new=2, rotary_dim=32, page=32),
    "smaller values": Problem(head_dim_v=16, seqlen_q=2),
    "soft cap": Problem(softcap=1.5, seqlen_q=2),
    "slopes": Problem(alibi=True, seqlen_q=3, heads=4, causal=True),
    "sinks": Problem(sinks=True, seqlens=(5, 0, 33), heads=4, window=(9, -1)),
    "all of scores": Problem(softcap=3.0, alibi=True, sinks=True, seqlen_q=5, heads=8, page=16),
}
