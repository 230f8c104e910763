"""How much memory a backward call takes: the formula of docs/memory.md, and offsets past 2^31."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from flash_dist import flash_attn_func
from tests.gpu.packed import attend_packed, pack
from tests.gpu.running import attend, peak_of, workspace
from tests.masks import masked_problem
from tests.reference import Problem, assert_close, assert_same_bits, random_problem

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.gpu

TILE = 64
COMPILED = (32, 64, 96, 128, 160, 192, 224, 256)


def ceil_to(size: int, step: int) -> int:
    return -(-size // step) * step


def backward_of(problem: Problem) -> Callable[[], object]:
    """Return a call of the backward alone."""
    q, k, v = (x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v))
    out = flash_attn_func(q, k, v, **problem.options)
    return lambda: torch.autograd.grad(out, (q, k, v), problem.dout, retain_graph=True)


def count_slots(problem: Problem) -> int:
    """Return the tiles of dS that one query head stores."""
    batch, seqlen_q, heads, _ = problem.q.shape
    seqlen_k = problem.k.shape[1]
    mask = problem.options.get("mask")
    if mask is not None:
        return int(mask.plan(batch, heads, seqlen_q, seqlen_k).arrays.key_slots[-1])
    queries, keys = (-(-seqlen // TILE) for seqlen in (seqlen_q, seqlen_k))
    if "window_size" in problem.options:  # as many for each key tile
        left, right = problem.options["window_size"]
        return int(keys * min(queries, (left + right + 2 * TILE - 2) // TILE + 1))
    if not problem.options:
        return queries * keys
    assert problem.visible is not None
    padding = (0, -seqlen_k % TILE, 0, -seqlen_q % TILE)
    visible = torch.nn.functional.pad(problem.visible, padding)
    tiles = visible.unflatten(-1, (-1, TILE)).any(-1).unflatten(-2, (-1, TILE)).any(-2)
    return int(tiles.sum())


def statistics(problem: Problem) -> int:
    """Return the bytes of lse and delta."""
    batch, seqlen_q, heads, _ = problem.q.shape
    return ceil_to(8 * batch * heads * ceil_to(seqlen_q, 128), 256)


def gradients(problem: Problem) -> int:
    """Return the bytes of dq, dk, dv."""
    return problem.q.nbytes + problem.k.nbytes + problem.v.nbytes


@pytest.mark.parametrize(
    "name", ["full", "causal", "window", "sixteen-blocks", "dense-per-batch-and-head", "tiles"]
)
def test_memory_is_what_the_formula_says(
    name: str, head_dims: tuple[int, int], half: torch.dtype
) -> None:
    problem = masked_problem(
        name,
        batch=4,
        seqlen_q=1000,
        seqlen_k=1100,
        num_heads=8,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        dtype=half,
    )
    ds = 8192 * 4 * 8 * count_slots(problem)
    fixed = gradients(problem) + statistics(problem)
    assert peak_of(backward_of(problem)) == fixed + ds


def test_memory_of_a_group_split_is_what_the_formula_says(
    head_dims: tuple[int, int], half: torch.dtype
) -> None:
    problem = masked_problem(
        "full",
        seqlen_q=512,
        num_heads=16,
        num_heads_kv=1,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        dtype=half,
    )
    fixed = gradients(problem) + statistics(problem)
    ds = 8192 * 16 * count_slots(problem)
    partial = peak_of(backward_of(problem)) - fixed - ds
    compiled = [next(size for size in COMPILED if size >= dim) for dim in head_dims]
    allowed = {4 * split * 512 * sum(compiled) for split in (2, 4, 8, 16)}
    assert partial in allowed | {0}


def test_memory_without_a_workspace_is_that_of_the_statistics(
    head_dims: tuple[int, int], dtype: torch.dtype
) -> None:
    problem = random_problem(
        batch=2, seqlen_q=777, num_heads=8, num_heads_kv=2, head_dim=head_dims[0], dtype=dtype
    )
    with workspace(0):
        assert peak_of(backward_of(problem)) == gradients(problem) + statistics(problem)


@pytest.mark.parametrize("name", ["causal", "sixteen-blocks", "dense-per-head"])
@pytest.mark.parametrize("megabytes", [5, 20, 60])
def test_the_budget_is_kept(megabytes: int, name: str, dtype: torch.dtype) -> None:
    problem = masked_problem(
        name,
        batch=4,
        seqlen_q=1500,
        num_heads=8,
        num_heads_kv=2,
        head_dim=128,
        dtype=dtype,
    )
    with workspace(megabytes):
        peak = peak_of(backward_of(problem))
    fixed = gradients(problem) + statistics(problem)
    assert fixed <= peak <= fixed + (megabytes << 20) + 4 * 256


def test_memory_of_documents_follows_the_longest(half: torch.dtype) -> None:
    lengths = (300, 0, 1000, 65, 700)
    packed = pack(lengths, num_heads=8, num_heads_kv=8, head_dim=64, dtype=half)
    total = sum(lengths)
    rows = ceil_to(total + 128 * len(lengths), 128)
    with workspace(0):
        peak = peak_of(lambda: attend_packed(packed, poison=False))
    boundaries = 2 * 4 * (len(lengths) + 1)
    tensors = 4 * packed.problem.q.nbytes + 4 * 8 * total  # out, dq, dk, dv, lse
    assert peak == tensors + boundaries + ceil_to(8 * 8 * rows, 256)


def has_room(gigabytes: int) -> None:
    """Skip on a GPU with less memory."""
    total = torch.cuda.get_device_properties(0).total_memory
    if total < gigabytes << 30:
        pytest.skip(f"needs {gigabytes} GB of GPU memory")


@pytest.mark.parametrize("name", ["full", "sixteen-blocks"])
def test_offsets_past_2_to_the_31_elements_are_right(name: str, half: torch.dtype) -> None:
    has_room(30)
    problem = masked_problem(name, batch=3, seqlen_q=512, num_heads=2, dtype=half)

    def spread(x: torch.Tensor) -> torch.Tensor:
        batch, _, heads, dim = x.shape
        room = torch.empty((batch - 1) * (2**30 + 64) + x[0].numel(), dtype=half, device="cuda")
        return room.as_strided(x.shape, (2**30 + 64, heads * dim, dim, 1)).copy_(x)

    near = attend(problem)
    for what in ("q", "k", "v", "dout"):
        changed: dict[str, Any] = {what: spread(getattr(problem, what))}
        far = replace(problem, **changed)
        assert_same_bits(near, attend(far, poison=False), f"{what} near and far")


def test_results_past_2_to_the_31_elements_are_right(any_half: torch.dtype) -> None:
    has_room(60)
    batch, seqlen, heads, dim = 16400, 64, 32, 64
    assert batch * seqlen * heads * dim > 2**31
    shapes = ((heads,), (1,), (1,), (heads,))
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (
        torch.empty(batch, seqlen, *shape, dim, device="cuda", dtype=any_half).normal_(
            generator=generator
        )
        for shape in shapes
    )
    result = attend(Problem(q, k, v, dout, options={"causal": True}), poison=False)
    for entry in (0, batch - 1):
        part = slice(entry, entry + 1)
        visible = torch.ones(1, 1, seqlen, seqlen, dtype=torch.bool, device="cuda").tril()
        problem = Problem(q[part], k[part], v[part], dout[part], visible)
        assert_close({name: x[part] for name, x in result.items()}, problem)
