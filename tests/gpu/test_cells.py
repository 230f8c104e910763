"""Long sequences split into query x key chunks: unchanged bits, and memory within the budget."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.gpu.running import attend, peak_of, workspace
from tests.gpu.test_memory import backward_of, gradients, statistics
from tests.reference import Problem, assert_same_bits, random_problem

pytestmark = pytest.mark.gpu

ROOMY = 30_000  # MiB of budget: enough for dS of every case


@dataclass(frozen=True)
class Case:
    """A backward, and limits at which an H200 stores its dS in chunks, for most head_dims."""

    options: dict[str, Any]
    seqlen_q: int
    seqlen_k: int
    num_heads: int
    num_heads_kv: int
    megabytes: tuple[int, ...]
    batch: int = 1

    def make(self, head_dim: int, dtype: torch.dtype) -> Problem:
        """Draw the inputs."""
        problem = random_problem(
            batch=self.batch,
            seqlen_q=self.seqlen_q,
            seqlen_k=self.seqlen_k,
            num_heads=self.num_heads,
            num_heads_kv=self.num_heads_kv,
            head_dim=head_dim,
            dtype=dtype,
        )
        return replace(problem, options=self.options)


FULL: dict[str, Any] = {}
CAUSAL: dict[str, Any] = {"causal": True}
CASES = {
    "full": Case(FULL, 16383, 16000, 4, 4, (250, 400)),
    "causal": Case(CAUSAL, 16384, 16384, 4, 4, (150, 250)),
    "shared keys": Case(CAUSAL, 8000, 8300, 16, 2, (560,)),
    "shared keys, full": Case(FULL, 8200, 8300, 18, 6, (200,)),
    "few queries": Case(CAUSAL, 4200, 40000, 4, 4, (150, 250)),
    "few keys": Case(CAUSAL, 40000, 9000, 4, 4, (152,)),
    "window": Case({"window_size": (5000, 700)}, 9000, 12000, 8, 8, (200,), batch=2),
    "left side alone": Case({"window_size": (6000, -1)}, 10001, 9000, 8, 8, (250,)),
}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_cells_have_the_bits_of_one_piece(case: Case, head_dim: int, half: torch.dtype) -> None:
    problem = case.make(head_dim, half)
    with workspace(ROOMY):
        whole = attend(problem)
    for megabytes in case.megabytes:
        with workspace(megabytes):
            assert_same_bits(whole, attend(problem), f"whole and within {megabytes} MiB")


@pytest.mark.parametrize("name", ["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_cells_keep_within_the_budget(name: str, head_dim: int, half: torch.dtype) -> None:
    case = CASES[name]
    problem = case.make(head_dim, half)
    fixed = gradients(problem) + statistics(problem)
    for megabytes in case.megabytes:
        with workspace(megabytes):
            peak = peak_of(backward_of(problem))
        assert fixed < peak <= fixed + (megabytes << 20) + 5 * 256


def test_cells_of_strided_tensors_have_the_same_bits(half: torch.dtype) -> None:
    problem = CASES["causal"].make(128, half)
    q, k, v = torch.stack((problem.q, problem.k, problem.v), dim=2).unbind(2)
    dout = problem.dout.transpose(1, 2).contiguous().transpose(1, 2)
    strided = replace(problem, q=q, k=k, v=v, dout=dout)
    with workspace(CASES["causal"].megabytes[0]):
        assert_same_bits(attend(problem), attend(strided), "dense and strided")


@pytest.mark.parametrize("head_dim", [128, 256])
def test_cells_of_any_size_have_the_same_bits(head_dim: int, half: torch.dtype) -> None:
    """With one kv head dQ does not fit in the budget, so that no kernel computes all gradients."""
    problem = random_problem(
        seqlen_q=16384, num_heads=16, num_heads_kv=1, head_dim=head_dim, dtype=half
    )
    with workspace(100):
        small = attend(problem)
    with workspace(125):
        assert_same_bits(small, attend(problem), "within 100 and within 125 MiB")


def test_distances_of_alibi_are_those_of_the_whole_sequence(half: torch.dtype) -> None:
    """Compare dk and dv with those of a workspace so small that queries would be split."""
    problem = CASES["causal"].make(128, half)
    slopes = torch.tensor([0.5, 0.1, 0.02, 0.004], device=problem.q.device)
    with workspace(ROOMY):
        whole = attend(problem, alibi_slopes=slopes)
    with workspace(CASES["causal"].megabytes[0]):
        less = attend(problem, alibi_slopes=slopes)
    assert_same_bits(
        {name: whole[name] for name in ("dk", "dv")},
        {name: less[name] for name in ("dk", "dv")},
        "roomy and tight",
    )


def test_cells_of_a_longer_sequence_are_near_what_is_computed_again(half: torch.dtype) -> None:
    """Compare with an independent kernel of dQ, without splits, at 64k tokens."""
    problem = replace(
        random_problem(seqlen_q=65536, num_heads=1, head_dim=256, dtype=half), options=CAUSAL
    )
    with workspace(0):
        again = attend(problem)
    cells = attend(problem)
    assert_same_bits(
        {name: again[name] for name in ("out", "lse", "dk", "dv")},
        {name: cells[name] for name in ("out", "lse", "dk", "dv")},
        "computed again and in cells",
    )
    off = (cells["dq"].float() - again["dq"].float()).abs().max()
    assert off <= 2**-6 * again["dq"].float().abs().max()
