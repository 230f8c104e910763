"""Ring attention over processes on the CPU, compared with attention in one process."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from flash_dist import (
    flash_attn_func,
    float32_precision,
    ring_attention,
    ring_positions,
    ring_shard,
    ring_unshard,
)
from flash_dist.context_parallel.exchange import Arriving, Ring
from flash_dist.context_parallel.parts import choose_part, choose_parts
from flash_dist.context_parallel.ring import _RingAttention
from flash_dist.context_parallel.shards import positions
from flash_dist.errors import FlashDistError
from flash_dist.kernels import operators
from flash_dist.kernels.budget import workspace_budget
from flash_dist.kernels.problem import Problem
from flash_dist.kernels.reference import visible
from flash_dist.masks import Band, IntervalMask
from flash_dist.toolkit.errors import GroupError

Tensor = torch.Tensor
SEQLEN = 24
WORLD_SIZES = (1, 2, 3)

CASES: dict[str, dict[str, Any]] = {
    "full": {"causal": False},
    "causal": {"causal": True},
    "grouped": {"causal": True, "heads": 4},
    "five axes": {"causal": True, "heads": 4, "grouped": True},
    "fp32": {"causal": True, "dtype": torch.float32},
    "bf16": {"causal": True, "dtype": torch.bfloat16},
    "v of fewer columns": {"causal": True, "head_dim_v": 8},
    "batch invariant": {"causal": True, "batch_invariant": True},
}
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2}


Run = Callable[[Callable[[], None], int], None]


def draw(
    *,
    heads: int = 2,
    dtype: torch.dtype = torch.float64,
    grouped: bool = False,
    head_dim_v: int = 16,
) -> list[Tensor]:
    """Return q, k, v, dout and dlse of the whole sequence, the same in every process."""
    generator = torch.Generator().manual_seed(0)

    def one(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    q, k = one(2, SEQLEN, heads, 16), one(2, SEQLEN, 2, 16)
    v, dout = one(2, SEQLEN, 2, head_dim_v), one(2, SEQLEN, heads, head_dim_v)
    if grouped:
        q, dout = q.unflatten(2, (2, -1)), dout.unflatten(2, (2, -1))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return [q, k, v, dout, one(2, heads, SEQLEN).to(wide)]


def compare(case: dict[str, Any]) -> None:
    """Compare ring attention with attention of one process, and each run with the next."""
    case = dict(case)
    causal, invariant = case.pop("causal"), case.pop("batch_invariant", False)
    q, k, v, dout, dlse = draw(**case)
    options: dict[str, Any] = {"causal": causal, "batch_invariant": invariant, "return_lse": True}
    whole = [x.requires_grad_() for x in (q, k, v)]
    out, lse = flash_attn_func(whole[0], whole[1], whole[2], **options)
    want = [out, lse, *torch.autograd.grad((out, lse), whole, (dout, dlse))]
    runs = []
    for _ in range(2):
        parts = [ring_shard(x.detach()).requires_grad_() for x in (q, k, v)]
        given = ring_shard(dout), ring_shard(dlse, dim=2)
        one, one_lse = ring_attention(*parts, **options)
        runs.append([one, one_lse, *torch.autograd.grad((one, one_lse), parts, given)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    limit = TOLERANCES[q.dtype]
    for index, (got, expected) in enumerate(zip(runs[0], want, strict=True)):
        there = ring_shard(expected.detach(), dim=2 if index == 1 else 1)
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, there, rtol=limit, atol=limit)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_ring_attention_is_attention_in_one_process(
    run: Run, case: dict[str, Any], world_size: int
) -> None:
    run(partial(compare, case), world_size)


FIRST_KEYS = {  # with the last one two ranks exchange nothing, and a token sees no key
    "one": torch.tensor([0] * 7 + [7] + [8] * 11 + [19] * 5),
    "of each entry": torch.tensor([[0] * 7 + [7] + [8] * 11 + [19] * 5, [0] * 2 + [2] * 22]),
    "apart": torch.tensor(
        [0] * 4 + [4] * 2 + [6] * 2 + [8] * 4 + [12] * 4 + [16] * 2 + [18] * 5 + [24]
    ),
}


def compare_documents(first: Tensor) -> None:
    """Compare documents over several ranks with a mask of one process, with gradients of lse."""
    q, k, v, dout, dlse = draw()
    mask = IntervalMask.of(first, torch.arange(1, SEQLEN + 1).expand_as(first), seqlen_k=SEQLEN)
    whole = [x.requires_grad_() for x in (q, k, v)]
    out, lse = flash_attn_func(whole[0], whole[1], whole[2], mask=mask, return_lse=True)
    want = [out, lse, *torch.autograd.grad((out, lse), whole, (dout, dlse))]
    parts = [ring_shard(x.detach()).requires_grad_() for x in (q, k, v)]
    options: dict[str, Any] = {"causal": True, "first_key": ring_shard(first, dim=-1)}
    found, found_lse = ring_attention(*parts, return_lse=True, **options)
    upstream = ring_shard(dout), ring_shard(dlse, dim=2)
    grads = torch.autograd.grad((found, found_lse), parts, upstream)
    for index, (got, expected) in enumerate(zip((found, found_lse, *grads), want, strict=True)):
        there = ring_shard(expected.detach(), dim=2 if index == 1 else 1)
        torch.testing.assert_close(got, there, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("first_key", FIRST_KEYS.values(), ids=FIRST_KEYS)
def test_documents_do_not_see_each_other(run: Run, world_size: int, first_key: Tensor) -> None:
    run(partial(compare_documents, first_key), world_size)


def attend_in_ieee() -> None:
    seen: list[tuple[str, bool]] = []

    def told(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> object:  # noqa: ANN401 - an operator's
            seen.append((name, arguments[-1].ieee))
            return call(*arguments)

        return run

    q, k, v, *_ = draw(dtype=torch.float32)
    parts = [ring_shard(x).requires_grad_() for x in (q, k, v)]
    with (
        patch.object(operators, "attend", told("fwd", operators.attend)),
        patch.object(operators, "backward", told("bwd", operators.backward)),
    ):
        with float32_precision("ieee"):
            chosen = ring_attention(*parts)
        chosen.sum().backward()
        assert Counter(seen) == {("fwd", True): 2, ("bwd", True): 2}
        ring_attention(*parts, float32_precision="ieee").sum().backward()
        assert Counter(seen) == {("fwd", True): 4, ("bwd", True): 4}
        ring_attention(*parts).sum().backward()
    assert Counter(seen) == {
        ("fwd", True): 4,
        ("bwd", True): 4,
        ("fwd", False): 2,
        ("bwd", False): 2,
    }


def test_what_is_chosen_for_float32_goes_for_the_keys_of_all_ranks(run: Run) -> None:
    run(attend_in_ieee, 2)


def attend_across() -> None:
    """Give each rank another number of queries, and one key: it must not get all the weight."""
    q, k, v, dout, _ = draw()
    k, v = k[:, : dist.get_world_size()], v[:, : dist.get_world_size()]
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad(flash_attn_func(whole[0], whole[1], whole[2]), whole, dout)
    rank = dist.get_rank()
    parts = [q, k[:, rank : rank + 1], v[:, rank : rank + 1]]
    if rank == 0:  # queries may be different per rank
        parts[0], dout = q[:, :5], dout[:, :5]
    else:
        parts[0], dout = q[:, 5:], dout[:, 5:]
    parts = [x.clone().requires_grad_() for x in parts]
    dq, dk, dv = torch.autograd.grad(ring_attention(*parts), parts, dout)
    torch.testing.assert_close(dq, want[0][:, :5] if rank == 0 else want[0][:, 5:])
    torch.testing.assert_close(dk, want[1][:, rank : rank + 1])
    torch.testing.assert_close(dv, want[2][:, rank : rank + 1])


def test_keys_of_other_ranks_count_where_a_rank_has_one_alone(run: Run) -> None:
    run(attend_across, 2)


def walk_through_shards() -> None:
    whole = torch.arange(2.0 * SEQLEN).view(2, SEQLEN).requires_grad_()
    mine = ring_shard(whole)
    assert torch.equal(mine, whole[:, ring_positions(SEQLEN)])
    back = ring_unshard(mine)
    assert torch.equal(back, whole)
    weight = torch.arange(SEQLEN) * (1.0 + dist.get_rank())
    (gradient,) = torch.autograd.grad((back * weight).sum(), mine)
    ranks = sum(range(1, dist.get_world_size() + 1))  # sum of the factors of all ranks' losses
    assert torch.equal(gradient, ring_shard((torch.arange(SEQLEN) * ranks).expand(2, -1)).float())
    with pytest.raises(ValueError, match="multiple of 6, got 25"):
        ring_shard(torch.zeros(1, 25))
    for move in (ring_shard, ring_unshard):
        with pytest.raises(ValueError, match=r"dim must be -2 to 1 for .*, got 2"):
            move(torch.zeros(1, 12), dim=2)


def test_what_is_spread_comes_together_again(run: Run) -> None:
    run(walk_through_shards, 3)


def call_in_a_smaller_group() -> None:
    group = dist.new_group([0, 2])
    q, k, v, *_ = draw()
    if dist.get_rank() == 1:
        with pytest.raises(GroupError, match="rank 1 is not in the process group"):
            ring_attention(q, k, v, group=group)
        return
    parts = [ring_shard(x, group) for x in (q, k, v)]
    out = ring_unshard(ring_attention(*parts, group=group, causal=True), group)
    torch.testing.assert_close(out, flash_attn_func(q, k, v, causal=True))


def test_a_group_of_some_ranks_is_a_ring_of_its_own(run: Run) -> None:
    run(call_in_a_smaller_group, 3)


def call_differently() -> None:
    q = torch.zeros(1, 2 + 2 * dist.get_rank(), 1, 16)
    said = r"on rank 0: q \[1, 2, 1, 16\].*on 1: q \[1, 4, 1, 16\]"
    checking = patch.dict(os.environ, {"FLASH_DIST_CHECK": "1"})
    with checking, pytest.raises(GroupError, match=said):
        ring_attention(q, q, q, causal=True)


def test_ranks_that_call_differently_are_told_so_where_it_is_asked_for(run: Run) -> None:
    run(call_differently, 2)


def call_without_gradients_on_one_rank() -> None:
    q = torch.zeros(1, 2, 1, 16, requires_grad=dist.get_rank() == 0)
    said = "on rank 0: .*, with gradients; on 1: .*, without gradients"
    checking = patch.dict(os.environ, {"FLASH_DIST_CHECK": "1"})
    with checking, pytest.raises(GroupError, match=said):
        ring_attention(q, q, q, causal=True)


def test_a_rank_without_a_backward_is_told_so_where_it_is_asked_for(run: Run) -> None:
    run(call_without_gradients_on_one_rank, 2)


@dataclass(frozen=True)
class Counting(Ring):
    """A ring of this process alone that counts how many of the passed tensors are alive at once."""

    own: tuple[Tensor, ...]
    passed: dict[StorageWeakRef, torch.dtype] = field(default_factory=dict)
    most: dict[torch.dtype, int] = field(default_factory=lambda: defaultdict(int))

    def pass_on(self, *tensors: Tensor) -> Arriving:
        received = tuple(x.clone() for x in tensors)
        owned = {StorageWeakRef(x.untyped_storage()) for x in self.own}
        for x in (*tensors, *received):
            self.passed[StorageWeakRef(x.untyped_storage())] = x.dtype
        held = Counter(
            dtype for ref, dtype in self.passed.items() if not ref.expired() and ref not in owned
        )
        for dtype, count in held.items():
            self.most[dtype] = max(self.most[dtype], count)
        return Arriving(received, tensors, ())


@pytest.mark.parametrize("causal", [False, True])
def test_tensors_of_two_ranks_are_held_at_most(*, causal: bool) -> None:
    q, k, v = (torch.ones(1, 4, 1, 16, dtype=torch.bfloat16, requires_grad=True) for _ in "qkv")
    ring = Counting(None, 2, 6, (k, v))
    parts = choose_parts(ring, 4, causal=causal)
    call = ring, Problem(Band(), 1.0, budget=workspace_budget()), parts
    out, _ = _RingAttention.apply(q, k, v, call)  # type: ignore[no-untyped-call]
    assert ring.most == {torch.bfloat16: 4}
    out.sum().backward()
    assert ring.most == {torch.bfloat16: 4, torch.float32: 4}


def attend_nothing() -> None:
    whole = torch.zeros(2, 0, 2, 16, requires_grad=True)
    for causal in (False, True):
        q = ring_shard(whole)
        out, lse = ring_attention(q, q, q, causal=causal, return_lse=True)
        assert (out.shape, lse.shape) == ((2, 0, 2, 16), (2, 2, 0))
        (gradient,) = torch.autograd.grad(ring_unshard(out).sum(), whole)
        assert gradient.shape == whole.shape
    assert ring_positions(0).tolist() == []
    dist.barrier()  # no data was sent: a rank may exit before the other has noticed


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_tokens_are_served(run: Run, world_size: int) -> None:
    run(attend_nothing, world_size)


def differentiate_many() -> None:
    q = torch.ones(1, 2, 1, 16, requires_grad=True)
    out = ring_attention(q, q, q)
    many = torch.ones(3, *out.shape)
    with pytest.raises(FlashDistError, match=r"(?s)one loss at a time, got is_grads_b.*hint: "):
        torch.autograd.grad(out, q, many, is_grads_batched=True)


def test_gradients_of_many_losses_at_once_are_refused(run: Run) -> None:
    run(differentiate_many, 1)


def call_wrongly() -> None:
    q = torch.zeros(1, 3, 1, 16)
    with pytest.raises(ValueError, match="seqlen_q 3 and seqlen_k 2"):
        ring_attention(q, q[:, :2], q[:, :2], causal=True)
    with pytest.raises(ValueError, match="multiple of 2, got 3"):
        ring_attention(q, q, q, causal=True)
    q = torch.zeros(2, 4, 1, 16)
    with pytest.raises(ValueError, match="first_key must be None without causal"):
        ring_attention(q, q, q, first_key=torch.zeros(4).int())
    with pytest.raises(TypeError, match="first_key must be int32 or int64, got float32"):
        ring_attention(q, q, q, causal=True, first_key=torch.zeros(4))
    with pytest.raises(ValueError, match=r"shape \[4\] or \[2 or 1, 4\], got \[3, 4\]"):
        ring_attention(q, q, q, causal=True, first_key=torch.zeros(3, 4).int())
    with pytest.raises(TypeError, match="causal must be True or False"):
        ring_attention(q, q, q, causal="yes")  # type: ignore[arg-type]
    with pytest.raises(FlashDistError, match=r"ring_attention .*torch\.func"):
        torch.func.vmap(ring_attention)(*[q[None]] * 3)
    compiled = torch.compile(lambda x: ring_attention(x * 2, x, x).sum(), backend="eager")
    q = torch.ones(1, 2, 1, 16, requires_grad=True)
    compiled(q).backward()
    assert q.grad is not None
    first_key = torch.zeros(2, dtype=torch.int32)
    compiled = torch.compile(
        lambda x: ring_attention(x, x, x, causal=True, first_key=first_key), backend="eager"
    )
    assert torch.equal(compiled(q), ring_attention(q, q, q, causal=True))


def test_wrong_arguments_are_refused_before_anything_is_sent(run: Run) -> None:
    run(call_wrongly, 1)


def test_without_a_process_group_the_way_to_one_is_named() -> None:
    q = torch.zeros(1, 2, 1, 16)
    with pytest.raises(GroupError, match="torchrun"):
        ring_attention(q, q, q)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_the_parts_of_all_ranks_are_the_causal_mask(world_size: int) -> None:
    seqlen = 2 * world_size * 3
    seen = torch.zeros(seqlen, seqlen, dtype=torch.int64)
    for rank in range(world_size):
        for source in range(world_size):
            mine, theirs = (positions(seqlen, one, world_size) for one in (rank, source))
            part = choose_part(rank, source, len(mine), causal=True)
            rows, keys = mine[part.rows], theirs[part.keys]
            assert isinstance(part.mask, Band)
            seen[rows[:, None], keys] += visible(len(rows), len(keys), part.mask).long()
    assert torch.equal(seen, torch.ones_like(seen).tril())
