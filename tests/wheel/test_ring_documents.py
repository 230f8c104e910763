"""Ring attention over packed documents: what is exchanged, and in which order it is summed.

The ranks are threads of this process. test_ring.py has the same with processes.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from flash_dist import flash_attn_func
from flash_dist.context_parallel import plan
from flash_dist.context_parallel.documents import DocumentAttention, plan_call
from flash_dist.context_parallel.merge import add_attention
from flash_dist.context_parallel.plan import group_steps
from flash_dist.context_parallel.shards import positions
from flash_dist.kernels import operators
from flash_dist.kernels.budget import workspace_budget
from flash_dist.kernels.problem import Problem
from flash_dist.masks import Band, IntervalMask
from tests.ring_threads import Links, Threads, differentiate

if TYPE_CHECKING:
    from collections.abc import Iterable

Tensor = torch.Tensor
SCALE = 0.3
HEADS, HEADS_KV, HEAD_DIM, HEAD_DIM_V = 4, 2, 4, 3
MASKS = ("documents", "one document", "own tokens", "any")


@dataclass(frozen=True)
class Shard:
    """A rank's tensors."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor
    first_key: Tensor

    @classmethod
    def of(cls, whole: Shard, rank: int, size: int) -> Shard:
        """Return a rank's part of the whole sequence."""
        mine = positions(whole.q.shape[1], rank, size)
        q, k, v, dout = (x[:, mine] for x in (whole.q, whole.k, whole.v, whole.dout))
        return cls(q, k, v, dout, whole.dlse[..., mine], whole.first_key[..., mine])


def draw(half: int, size: int, mask: str, *, batch: int = 1, dtype: torch.dtype) -> Shard:
    """Return the tensors of a whole sequence; a batch above 1 has a first_key of each entry."""
    generator = torch.Generator().manual_seed(half * size)
    seqlen = 2 * half * size

    def one(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    first = torch.stack([draw_first_key(seqlen, mask, generator) for _ in range(batch)])
    wide = torch.promote_types(dtype, torch.float32)
    return Shard(
        one(batch, seqlen, HEADS, HEAD_DIM),
        one(batch, seqlen, HEADS_KV, HEAD_DIM),
        one(batch, seqlen, HEADS_KV, HEAD_DIM_V),
        one(batch, seqlen, HEADS, HEAD_DIM_V),
        one(batch, HEADS, seqlen).to(wide),
        first if batch > 1 else first[0],
    )


def draw_first_key(seqlen: int, mask: str, generator: torch.Generator) -> Tensor:
    """Return the first key of each token; with "any" and "own tokens" some see no key."""
    numbers = torch.arange(seqlen)
    if mask == "one document":
        return torch.zeros_like(numbers)
    if mask == "any":
        return torch.randint(-2, seqlen + 3, (seqlen,), generator=generator)
    if mask == "own tokens":
        return numbers + torch.randint(0, 2, (seqlen,), generator=generator)
    begins = torch.randint(0, seqlen, (5,), generator=generator)
    return torch.where(torch.isin(numbers, begins), numbers, 0).cummax(0).values


def run_rank(rank: int, links: Links, shard: Shard) -> list[Tensor]:
    """Return out, lse, dq, dk and dv of a rank."""
    ring = Threads(None, rank, len(links.board), links)
    call = plan_call(ring, Problem(Band(), SCALE, budget=workspace_budget()), shard.first_key)
    tensors, upstream = (shard.q, shard.k, shard.v), (shard.dout, shard.dlse)
    return differentiate(DocumentAttention, tensors, call, upstream)


def attend(whole: Shard, size: int) -> tuple[list[list[Tensor]], list[int]]:
    """Return the results of each rank, and how many elements it sent."""
    links = Links(size)
    with ThreadPoolExecutor(size) as threads:
        ranks = [
            threads.submit(run_rank, rank, links, Shard.of(whole, rank, size))
            for rank in range(size)
        ]
        return [rank.result() for rank in ranks], links.sent


def attend_in_ring(whole: Shard, size: int) -> list[list[Tensor]]:
    """Return the results of a ring in which all keys visit all ranks, summed in its order."""
    shards = [Shard.of(whole, rank, size) for rank in range(size)]
    problem = Problem(Band(), SCALE, budget=workspace_budget())
    sources = [[(rank - step) % size for step in range(size)] for rank in range(size)]
    pairs = {(rank, source): None for rank in range(size) for source in sources[rank]}
    problems = {pair: problem._replace(mask=mask_of(shards, *pair)) for pair in pairs}
    results, gradients = [], {}
    for rank, one in enumerate(shards):
        for source in sources[rank]:
            got = operators.attend(
                one.q, shards[source].k, shards[source].v, problems[rank, source]
            )
            if source == rank:
                out, lse = got[0].to(got[1].dtype), got[1]
            else:
                add_attention(out, lse, *got)
        results.append((out.to(one.q.dtype), lse))
    for rank, source in pairs:
        one, keys = shards[rank], shards[source]
        saved = one.q, keys.k, keys.v, *results[rank]
        gradients[rank, source] = operators.backward(
            one.dout, saved, one.dlse, problems[rank, source]
        )[:3]
    found = []
    for rank, (out, lse) in enumerate(results):
        dq, dk, dv = (x.to(lse.dtype) for x in gradients[rank, rank])
        for step in range(1, size):
            dq = dq + gradients[rank, (rank - step) % size][0]
            later = gradients[(rank + step) % size, rank]
            dk, dv = dk + later[1], dv + later[2]
        found.append([out, lse, *(x.to(out.dtype) for x in (dq, dk, dv))])
    return found


def mask_of(shards: list[Shard], rank: int, source: int) -> IntervalMask:
    """Return which keys of another rank all queries of a rank see."""
    first, size = shards[rank].first_key, len(shards)
    mine, theirs = (positions(size * first.shape[-1], one, size) for one in (rank, source))
    begin, end = (torch.searchsorted(theirs, x) for x in (first.contiguous(), mine + 1))
    return IntervalMask.of(begin, end.expand_as(begin), seqlen_k=len(theirs))


def score_in_order(q: Tensor, k: Tensor) -> Tensor:
    """Return [batch, seqlen_q, seqlen_k, heads]; no sum depends on the number of tokens."""
    return sum_in_order(q[:, :, None, :, c] * k[:, None, :, :, c] for c in range(q.shape[-1]))


def sum_in_order(terms: Iterable[Tensor]) -> Tensor:
    """Return the sum in the order of the terms."""
    total, *others = terms
    for x in others:
        total = total + x
    return total


def weigh(q: Tensor, k: Tensor, mask: IntervalMask) -> tuple[Tensor, Tensor, Tensor]:
    """Return q and k with all heads in float64, and scores with -inf where no key is visible."""
    q, k = q.double(), k.double().repeat_interleave(q.shape[2] // k.shape[2], 2)
    visible = mask.visible()[:, 0, :, :, None]
    return q, k, (SCALE * score_in_order(q, k)).masked_fill(~visible, -torch.inf)


def attend_in_order(q: Tensor, k: Tensor, v: Tensor, problem: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    """Attention whose sums over keys are sequential: keys that are not visible change no bit."""
    _, _, scores = weigh(q, k, problem.mask)
    largest = scores.amax(2, keepdim=True).clamp(min=-1e9)
    weights = (scores - largest).exp()
    values = v.double().repeat_interleave(q.shape[2] // v.shape[2], 2)
    keys = range(k.shape[1])
    total = sum_in_order(weights[:, :, j] for j in keys)
    out = sum_in_order(weights[:, :, j, :, None] * values[:, None, j] for j in keys)
    out = torch.where(total[..., None] > 0, out / total[..., None], 0.0)
    lse = (total.log() + largest[:, :, 0]).transpose(1, 2)
    return out.to(q.dtype), lse.to(torch.promote_types(q.dtype, torch.float32))


def differentiate_in_order(
    dout: Tensor,
    saved: tuple[Tensor, ...],
    dlse: Tensor,
    problem: Any,  # noqa: ANN401
) -> tuple[Tensor | None, ...]:
    """Gradients of `attend_in_order`, likewise."""
    q, k, v, out, lse = saved
    group = q.shape[2] // k.shape[2]
    queries, keys, scores = weigh(q, k, problem.mask)
    dout, values = dout.double(), v.double().repeat_interleave(group, 2)
    lse = lse.double().transpose(1, 2)[:, :, None]
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)).exp()
    delta = sum_in_order((dout * out.double()).unbind(-1)) - dlse.double().transpose(1, 2)
    ds = SCALE * weights * (score_in_order(dout, values) - delta[:, :, None])
    dq = sum_in_order(ds[:, :, j, :, None] * keys[:, None, j] for j in range(k.shape[1]))
    rows = range(q.shape[1])
    dk = sum_in_order(ds[:, i, :, :, None] * queries[:, i, None] for i in rows)
    dv = sum_in_order(weights[:, i, :, :, None] * dout[:, i, None] for i in rows)
    dk, dv = (sum_in_order(x.unflatten(2, (-1, group)).unbind(3)) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("mask", MASKS)
def test_bits_are_those_of_a_ring_with_all_keys(
    size: int, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "attend", attend_in_order)
    monkeypatch.setattr(operators, "backward", differentiate_in_order)
    monkeypatch.setattr(plan, "KEYS", 2)
    monkeypatch.setattr(plan, "ROWS", 2)
    batch = 1 + size % 2
    whole = draw(5, size, mask, batch=batch, dtype=torch.bfloat16)
    found, _ = attend(whole, size)
    for rank, (got, want) in enumerate(zip(found, attend_in_ring(whole, size), strict=True)):
        for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
            assert torch.equal(a, b), (rank, name)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("mask", MASKS)
def test_documents_over_threads_are_float64_attention(size: int, mask: str) -> None:
    half = {2: 200, 3: 131}.get(size, 7)
    whole = draw(half, size, mask, batch=2 - size % 2, dtype=torch.float64)
    found, _ = attend(whole, size)
    numbers = torch.arange(1, whole.q.shape[1] + 1)
    intervals = IntervalMask.of(
        whole.first_key, numbers.expand_as(whole.first_key), seqlen_k=len(numbers)
    )
    leaves = [x.clone().requires_grad_() for x in (whole.q, whole.k, whole.v)]
    out, lse = flash_attn_func(*leaves, mask=intervals, softmax_scale=SCALE, return_lse=True)
    upstream = whole.dout, whole.dlse
    wanted = [out, lse, *torch.autograd.grad((out, lse), leaves, upstream)]
    for rank, got in enumerate(found):
        mine = positions(len(numbers), rank, size)
        for a, b in zip(got, wanted, strict=True):
            there = b.detach()[..., mine] if b is lse else b.detach()[:, mine]
            torch.testing.assert_close(a, there, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("mask", MASKS)
def test_only_visible_keys_are_exchanged(
    size: int, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "KEYS", 1)
    whole = draw(6, size, mask, dtype=torch.float32)
    _, sent = attend(whole, size)
    numbers = torch.arange(len(whole.first_key))
    visible = (whole.first_key[:, None] <= numbers) & (numbers <= numbers[:, None])
    tokens = [positions(len(numbers), rank, size) for rank in range(size)]
    elements = HEADS_KV * (HEAD_DIM + HEAD_DIM_V)
    for rank, mine in enumerate(tokens):
        others = [other for one, other in enumerate(tokens) if one != rank]
        lent = sum(int(visible[other][:, mine].any(0).sum()) for other in others)
        used = sum(int(visible[mine][:, other].any(0).sum()) for other in others)
        assert sent[rank] == elements * (2 * lent + used), rank
    if mask == "own tokens":
        assert sum(sent) == 0


def test_a_rank_holds_the_keys_of_two_ranks_at_most() -> None:
    all_keys = [[0, 0], [8, 8], [8, 4], [4, 8]]
    assert group_steps(all_keys, 8) == [[0], [1], [2], [3]]
    assert group_steps([[0, 0], [2, 1], [0, 0], [6, 7], [1, 0]], 8) == [[0], [1, 3], [4]]
    assert group_steps([[0, 0], [0, 0]], 8) == [[0]]
