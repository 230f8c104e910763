"""Equal bits in every run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
import torch

from flash_dist.masks import BlockMask
from tests.gpu.packed import attend_packed, pack
from tests.gpu.running import attend, poison_memory, workspace
from tests.masks import masked_problem
from tests.reference import Problem, assert_same_bits, random_problem

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.gpu

RUNS = 100
BITS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Case:
    """A shape, its mask and the workspace (MiB) that selects the tested path."""

    mask: str
    batch: int
    seqlen: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    megabytes: int = 1024
    head_dim_v: int | None = None

    def make(self, dtype: torch.dtype) -> Problem:
        """Return the problem."""
        return masked_problem(
            self.mask,
            batch=self.batch,
            seqlen_q=self.seqlen,
            num_heads=self.num_heads,
            num_heads_kv=self.num_heads_kv,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            dtype=dtype,
        )


CASES = {
    "small": Case("causal", 2, 200, 4, 2, 64),
    "fills-the-gpu": Case("full", 4, 2048, 16, 16, 64),
    "fills-the-gpu-causal": Case("causal", 4, 2048, 16, 16, 128),
    "group-split": Case("causal", 1, 1024, 16, 1, 128),
    "group-split-d64": Case("causal", 1, 1024, 16, 1, 64),
    "chunks": Case("causal", 8, 1024, 16, 16, 64, 128),
    "stripes": Case("full", 1, 4096, 4, 4, 128, 150),
    "stripes-causal": Case("causal", 1, 8192, 4, 4, 64, 200),
    "recompute": Case("causal", 2, 1024, 8, 8, 128, 0),
    "policy": Case("sixteen-blocks", 2, 1024, 8, 1, 256),
    "policy-recompute": Case("sixteen-blocks", 2, 1024, 8, 1, 256, 0),
    "policy-stripes": Case("sixteen-blocks", 1, 4096, 8, 1, 256, 120),
    "window": Case("window", 2, 2000, 8, 4, 96),
    "dense-per-head": Case("dense-per-head", 2, 1000, 8, 4, 160),
    "dense-stripes": Case("dense-per-batch-and-head", 2, 2000, 8, 4, 64, 20),
    "tiles": Case("tiles", 2, 1000, 8, 4, 192, head_dim_v=128),
    "fills-the-gpu-d192-128": Case("full", 4, 2048, 16, 16, 192, head_dim_v=128),
    "fills-the-gpu-causal-d192-128": Case("causal", 4, 2048, 16, 4, 192, head_dim_v=128),
    "padding": Case("padding-and-causal", 4, 777, 8, 4, 224),
    "tail": Case("documents", 2, 1000, 8, 2, 72, head_dim_v=40),
}


def count_differing(
    call: Callable[[], dict[str, torch.Tensor]], *, runs: int = RUNS
) -> dict[str, int]:
    """Count, by tensor, the elements whose bits differ from the first run, over all later runs."""
    first = call()
    differing = {name: torch.zeros((), dtype=torch.int64, device="cuda") for name in first}
    for _ in range(runs - 1):
        for name, again in call().items():
            bits = BITS[again.element_size()]
            differing[name] += (again.view(bits) != first[name].view(bits)).sum()
    return {name: int(count) for name, count in differing.items() if int(count)}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_runs_are_bit_equal(case: Case, half: torch.dtype) -> None:
    problem = case.make(half)
    with workspace(case.megabytes):
        assert not count_differing(lambda: attend(problem))


@pytest.mark.parametrize("name", ["small", "policy", "dense-stripes", "tail", "recompute"])
def test_runs_of_float32_are_bit_equal(name: str, single: torch.dtype) -> None:
    problem = CASES[name].make(single)
    with workspace(CASES[name].megabytes):
        assert not count_differing(lambda: attend(problem))


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["free", "batch-invariant"])
def test_runs_over_documents_are_bit_equal(*, batch_invariant: bool, half: torch.dtype) -> None:
    packed = pack(
        (700, 0, 65, 1500, 3, 900),
        num_heads=8,
        num_heads_kv=2,
        head_dim=128,
        dtype=half,
        causal=True,
    )
    assert not count_differing(lambda: attend_packed(packed, batch_invariant=batch_invariant))


@pytest.mark.parametrize("name", ["small", "policy", "stripes", "dense-per-head"])
def test_memory_and_work_before_do_not_matter(name: str, half: torch.dtype) -> None:
    problem = CASES[name].make(half)
    other = random_problem(
        batch=3, seqlen_q=517, num_heads=8, num_heads_kv=4, head_dim=96, dtype=half
    )
    matrix = torch.randn(2048, 2048, device="cuda", dtype=half)

    def after_other_work() -> dict[str, torch.Tensor]:
        attend(other)
        q = problem.q.transpose(1, 2)
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
        (matrix @ matrix).sort(-1)
        poison_memory(matrix.device)
        return attend(problem, poison=False)

    with workspace(CASES[name].megabytes):
        alone = attend(problem, poison=False)
        assert_same_bits(alone, after_other_work(), "alone and after other work")
        assert not count_differing(after_other_work, runs=30)


@pytest.mark.parametrize("name", ["policy", "chunks", "dense-per-head"])
def test_streams_at_once_give_the_same_bits(name: str, half: torch.dtype) -> None:
    problem = CASES[name].make(half)
    with workspace(CASES[name].megabytes):
        alone = attend(problem)
        streams = tuple(torch.cuda.Stream() for _ in range(3))
        results = []
        for _ in range(10):
            for stream in streams:
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    results.append(attend(problem, poison=False))
        torch.cuda.synchronize()
    for result in results:
        assert_same_bits(alone, result, "alone and beside another stream")


def test_threads_that_meet_a_mask_first_give_the_same_bits(half: torch.dtype) -> None:
    base = CASES["dense-per-head"].make(half)
    for seed in range(4):
        visible = base.visible
        assert visible is not None
        fresh = visible.roll(seed, -1)
        problem = replace(base, options={"mask": BlockMask.from_dense(fresh)}, visible=fresh)

        def work(_: int, problem: Problem = problem) -> dict[str, torch.Tensor]:
            with torch.cuda.stream(torch.cuda.Stream()):
                result = attend(problem, poison=False)
                torch.cuda.current_stream().synchronize()
            return result

        torch.cuda.synchronize()
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(work, range(16)))
        expected = attend(problem)
        for result in results:
            assert_same_bits(expected, result, "one thread and eight")


@pytest.mark.parametrize("name", ["full", "causal", "sixteen-blocks", "dense-per-batch"])
def test_stripes_and_chunks_change_no_bit(name: str, half: torch.dtype) -> None:
    problem = masked_problem(name, batch=4, seqlen_q=1024, num_heads=16, head_dim=128, dtype=half)
    results = {}
    for megabytes in (1024, 70, 40):
        with workspace(megabytes):
            results[megabytes] = attend(problem)
    for megabytes in (70, 40):
        assert_same_bits(results[1024], results[megabytes], f"1024 MB and {megabytes} MB")


def test_rows_of_a_causal_mask_do_not_depend_on_later_tokens(
    head_dims: tuple[int, int], dtype: torch.dtype
) -> None:
    sizes = {"head_dim": head_dims[0], "head_dim_v": head_dims[1], "dtype": dtype}
    problem = masked_problem("causal", seqlen_q=500, num_heads=4, num_heads_kv=2, **sizes)
    seen = 250  # a key in the middle of a warp's rows

    def change(x: torch.Tensor) -> torch.Tensor:
        changed = x.clone()
        changed[:, seen:] *= -3
        return changed

    other = replace(problem, q=change(problem.q), k=change(problem.k), v=change(problem.v))
    results = [attend(problem), attend(other)]
    kept = [
        {"out": result["out"][:, :seen], "lse": result["lse"][..., :seen]} for result in results
    ]
    assert_same_bits(kept[0], kept[1], "two futures")
