"""Random calls of flash_attn_with_kvcache: a sequence has the same bits in every equivalent call.

    python -m tests.fuzz.decode [--seconds 300] [--cases 1000] [--seed 0] [--jobs 4] [--bits FILE]

Needs an installed flash_dist; `--device cpu` tests the program itself. A case is one call of
`flash_attn_with_kvcache`: random lengths, heads, head_dim, pages, entries, left padding, appended
keys, rotary angles, causal mask and window, softcap, ALiBi and sinks, 1 to 64 queries. Its
sequences are computed together, each alone, in another batch, in other pages or none, in chunks of
queries, and, on a GPU, by a graph that was captured with an empty cache. Each of these runs with
the default workspace, which lets several blocks share a sequence, and without workspace, so that no
blocks share one. out, lse and the appended keys and values must have the same bits. The same seed
gives the same cases; exit status 1 if a bit differs; `--only NUMBER` runs one case alone, `--bits`
is that of tests.fuzz.attention.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from flash_dist.kernels.budget import DEFAULT_BUDGET_MB
from tests.fuzz.shares import (
    DTYPES,
    Checked,
    add_options,
    choose_dtypes,
    digest_of,
    run_program,
    same_bits,
)
from tests.gpu.running import poison_memory, workspace
from tests.kvcache import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.kvcache import Tensors

Tensor = torch.Tensor
CASES: Final = 1000
LONGEST: Final = 6000  # keys
MOST_QUERIES: Final = 64
MOST_ELEMENTS: Final = 1 << 24  # elements of the cache of keys
BUDGETS: Final = (DEFAULT_BUDGET_MB, 0)  # MiB
REPLAYS: Final = 2
_USUAL_DIMS: Final = (32, 64, 64, 96, 128, 128, 192, 256)
_PAGES: Final = (16, 48, 64, 256)


@dataclass(frozen=True)
class Case:
    """One random call, derived from its number alone."""

    number: int
    dtype: str
    problem: Problem

    def __str__(self) -> str:
        given = {one.name: getattr(self.problem, one.name) for one in fields(Problem)}
        said = {one.name: one.default for one in fields(Problem)}
        words = [f"{name}={value}" for name, value in given.items() if value != said[name]]
        return f"case {self.number}: {self.dtype} {' '.join(words)}"


class Results(NamedTuple):
    """Results of a call, with the cache in the order of its sequences."""

    out: Tensor
    lse: Tensor
    keys: Tensor
    values: Tensor


class Way(NamedTuple):
    """A call that must reproduce some results of the whole call."""

    name: str
    tensors: Tensors
    sequences: list[int]  # sequences of the call, by index
    queries: int  # number of queries, from the first on


def draw_case(number: int, *, seed: int, dtypes: Sequence[str], longest: int) -> Case:
    """Return a case with at most `longest` keys per sequence, not counting new keys."""
    chance = random.Random(f"decode {seed} {number}")  # noqa: S311 - no secret
    heads_kv = chance.choice((1, 1, 2, 2, 3, 4, 8))
    usual = chance.random() < 0.7
    head_dim = chance.choice(_USUAL_DIMS) if usual else 8 * chance.randint(1, 32)
    smaller = chance.random() < 0.15
    batch = chance.choice((1, 2, 3, 5, 8, chance.randint(1, 40)))
    longest = min(longest, MOST_ELEMENTS // (batch * heads_kv * head_dim))
    seqlens = tuple(_draw_number(chance, longest) for _ in range(batch))
    seqlen_q = 1 if chance.random() < 0.4 else 1 + _draw_number(chance, MOST_QUERIES - 1)
    seqlen_new = chance.choice((0, 0, 0, seqlen_q, seqlen_q, chance.randint(1, MOST_QUERIES)))
    rotary = seqlen_new and head_dim >= 16 and chance.random() < 0.5
    windowed = chance.random() < 0.35
    left, right = (_draw_number(chance, longest) for _ in range(2))
    problem = Problem(
        seqlens=seqlens,
        capacity=max(*seqlens, 1) + seqlen_new + chance.randint(0, 300),
        seqlen_q=seqlen_q,
        heads=heads_kv * chance.choice((1, 1, 2, 4, 4, 7, 8, 16)),
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=8 * chance.randint(1, head_dim // 8) if smaller else 0,
        causal=chance.random() < 0.6,
        window=(left, chance.choice((-1, 0, right))) if windowed else (-1, -1),
        seqlen_new=seqlen_new,
        rotary_dim=16 * chance.randint(1, head_dim // 16) if rotary else 0,
        interleaved=chance.random() < 0.5,
        softcap=chance.choice((0.0, 0.0, 5.0)),
        alibi=chance.random() < 0.3,
        sinks=chance.random() < 0.3,
        seed=number,
        **_draw_places(chance, seqlens),
    )
    return Case(number, chance.choice(dtypes), problem)


def _draw_places(chance: random.Random, seqlens: Sequence[int]) -> dict[str, Any]:
    """Draw either pages, or entries and left padding: pages support neither."""
    if chance.random() < 0.5:
        return {"page": chance.choice((*_PAGES, 16 * chance.randint(1, 20)))}
    places: dict[str, Any] = {}
    if chance.random() < 0.4:
        places["entries"] = len(seqlens) + chance.randint(0, 3)
        places["batch_idx"] = tuple(chance.sample(range(places["entries"]), len(seqlens)))
    if chance.random() < 0.4:
        places["leftpad"] = tuple(chance.randint(0, length) for length in seqlens)
    return places


def _draw_number(chance: random.Random, most: int) -> int:
    """Draw from 0 to `most`, with small numbers as often as large ones."""
    return int(math.exp(chance.uniform(0.0, math.log(most + 1.5)))) - 1


def check_case(case: Case, *, device: str) -> Checked:
    """Compare all equivalent calls for the sequences of a case."""
    problem = case.problem
    tensors = problem.make(DTYPES[case.dtype], device)
    whole, found = attend(problem, tensors), []
    for megabytes in BUDGETS:
        with workspace(megabytes):
            for way in ways_of(case, tensors):
                found += _compare(way, whole, attend(problem, way.tensors), megabytes)
            if device == "cuda":
                way = Way("by a graph", tensors, list(range(problem.batch)), problem.seqlen_q)
                for replayed in replay(problem, tensors):
                    found += _compare(way, whole, replayed, megabytes)
    return Checked(found, digest_of(whole))


def ways_of(case: Case, tensors: Tensors) -> Iterator[Way]:
    """Yield the calls that must reproduce all or some results of the whole call."""
    problem, chance = case.problem, random.Random(case.number)  # noqa: S311 - no secret
    everyone, queries = list(range(problem.batch)), problem.seqlen_q
    yield Way("again", tensors, everyone, queries)
    if tensors.table is not None:
        yield Way("without pages", leave_pages(tensors), everyone, queries)
    elif tensors.leftpad is None:
        page = chance.choice(_PAGES)
        yield Way(f"in pages of {page}", cut_up(tensors, page, case.number), everyone, queries)
    for one in everyone:
        yield Way(f"sequence {one} alone", choose(tensors, [one]), [one], queries)
    others = chance.sample(everyone, chance.randint(1, problem.batch))
    yield Way(f"sequences {others}", choose(tensors, others), others, queries)
    first = chance.randint(1, queries)
    # On the CPU a product of fewer rows has other bits.
    if tensors.q.is_cuda and _can_be_cut(problem, queries - first):
        yield Way(f"the first {first} queries", cut_off(tensors, first), everyone, first)


def _can_be_cut(problem: Problem, left_out: int) -> bool:
    """Tell if the other results stay the same without the last queries and their keys."""
    pads = problem.leftpad or (0,) * problem.batch
    shortest = min(length - pad for length, pad in zip(problem.seqlens, pads, strict=True))
    return problem.causal and not problem.seqlen_new and left_out <= shortest


def choose(tensors: Tensors, sequences: list[int]) -> Tensors:
    """Return a call of some of the sequences."""
    numbers: dict[str, Any] = {
        name: None if x is None else x[sequences]
        for name, x in tensors._asdict().items()
        if name in {"q", "k", "v", "seqlens", "batch_idx", "leftpad", "table", "slopes"}
    }
    if tensors.table is None and tensors.batch_idx is None:
        numbers |= {name: getattr(tensors, name)[sequences] for name in ("k_cache", "v_cache")}
    return tensors._replace(**numbers)


def cut_off(tensors: Tensors, queries: int) -> Tensors:
    """Return a call of the first queries. The last of these queries is at the last key."""
    left_out = tensors.q.shape[1] - queries
    return tensors._replace(q=tensors.q[:, :queries], seqlens=tensors.seqlens - left_out)


def in_order(tensors: Tensors, cache: Tensor) -> Tensor:
    """Return a cache as [batch, capacity, heads, head_dim], for any entries or pages."""
    if tensors.table is not None:
        return cache[tensors.table.long()].flatten(1, 2)
    return cache if tensors.batch_idx is None else cache[tensors.batch_idx.long()]


def leave_pages(tensors: Tensors) -> Tensors:
    """Return the call on a cache without pages."""
    caches = {name: in_order(tensors, getattr(tensors, name)) for name in ("k_cache", "v_cache")}
    return tensors._replace(table=None, batch_idx=None, **caches)


def cut_up(tensors: Tensors, page: int, seed: int) -> Tensors:
    """Return the call on a paged cache with pages in random order."""
    plain = leave_pages(tensors)
    batch, capacity, *_ = plain.k_cache.shape
    pages = -(-capacity // page)
    order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(seed))
    order = order.to(plain.q.device)

    def cut(x: Tensor) -> Tensor:
        whole = x.new_zeros(batch, pages * page, *x.shape[2:])
        whole[:, :capacity] = x
        cut = torch.empty_like(whole).view(batch * pages, page, *x.shape[2:])
        cut[order] = whole.view_as(cut)
        return cut

    table = order.view(batch, pages).to(torch.int32)
    return plain._replace(table=table, k_cache=cut(plain.k_cache), v_cache=cut(plain.v_cache))


def attend(problem: Problem, tensors: Tensors) -> Results:
    """Return the results of a call on a copy of the cache; free memory is full of NaN."""
    k_cache, v_cache = tensors.k_cache.clone(), tensors.v_cache.clone()
    poison_memory(tensors.q.device)
    own = tensors._replace(k_cache=k_cache, v_cache=v_cache)
    return _results(problem, own, *problem.call(own))


def _results(problem: Problem, tensors: Tensors, out: Tensor, lse: Tensor) -> Results:
    caches = (in_order(tensors, x) for x in (tensors.k_cache, tensors.v_cache))
    keys, values = (x[:, : problem.capacity] for x in caches)
    return Results(out, lse, keys, values)


def replay(problem: Problem, tensors: Tensors) -> Iterator[Results]:
    """Capture the call on an empty cache; then fill it, set the lengths, and replay."""
    empty = tensors._replace(
        k_cache=torch.zeros_like(tensors.k_cache),
        v_cache=torch.zeros_like(tensors.v_cache),
        seqlens=torch.zeros_like(tensors.seqlens),
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = problem.call(empty)
    for _ in range(REPLAYS):
        for mine, given in zip(empty, tensors, strict=True):
            if mine is not given and mine is not None and given is not None:
                mine.copy_(given)
        graph.replay()
        yield _results(problem, empty, out, lse)


def _compare(way: Way, whole: Results, part: Results, megabytes: int) -> list[str]:
    """Say which results of a call differ from those of the whole call."""
    wanted = Results(
        whole.out[way.sequences, : way.queries],
        whole.lse[way.sequences, :, : way.queries],
        whole.keys[way.sequences],
        whole.values[way.sequences],
    )
    differing = [
        name
        for name, got, want in zip(Results._fields, part, wanted, strict=True)
        if not same_bits(got, want)
    ]
    return [f"{way.name}, {megabytes} MiB: other bits of {', '.join(differing)}"] * bool(differing)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description="random batches of queries to caches, in all ways")
    add_options(parser, cases=CASES)
    parser.add_argument("--longest", type=int, default=LONGEST, help=f"keys (default {LONGEST})")
    args = parser.parse_args(arguments)
    dtypes = [name for name in choose_dtypes(args, "decode") if name != "fp32"]
    draw = partial(draw_case, seed=args.seed, dtypes=dtypes, longest=args.longest)
    return run_program(args, draw, partial(check_case, device=args.device))


if __name__ == "__main__":
    sys.exit(main())
