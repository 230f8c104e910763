"""Causal sequences so long that the backward starts with the blocks of the first keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
import torch

from tests.gpu.running import attend, check
from tests.reference import assert_same_bits, random_problem

if TYPE_CHECKING:
    from tests.reference import Problem

Tensor = torch.Tensor

LONG: Final = 32768  # keys, as in csrc/host/launch.cpp
HEAD_DIMS: Final = (32, 64, 96, 128)
HEADS: Final = ((2, 2), (4, 2), (4, 1))
CHUNK: Final = 2048  # queries whose scores exist at a time
TILE: Final = 128  # rows whose error is measured together


@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: f"{heads[0]}-on-{heads[1]}")
def test_gradients_of_some_queries_on_many_keys_match_float64(
    heads: tuple[int, int], half: torch.dtype
) -> None:
    check(
        random_problem(
            seqlen_q=seqlen_q,
            seqlen_k=LONG + 77,
            num_heads=heads[0],
            num_heads_kv=heads[1],
            head_dim=head_dim,
            dtype=half,
            causal=True,
        )
        for head_dim in HEAD_DIMS
        for seqlen_q in (300, 1000)
    )


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_gradients_of_a_long_sequence_are_right_and_the_same_on_every_run(
    head_dim: int, half: torch.dtype
) -> None:
    problem = random_problem(
        seqlen_q=LONG,
        seqlen_k=LONG,
        num_heads=3,
        num_heads_kv=1,
        head_dim=head_dim,
        dtype=half,
        causal=True,
    )
    found = attend(problem)
    for name, want in differentiate(problem).items():
        error = norms(found[name].double() - want) / norms(want)
        assert error.max().item() < 0.02, f"{name} is off by {error.max().item()}"
    for _ in range(3):
        assert_same_bits(found, attend(problem), "another run")


def differentiate(problem: Problem) -> dict[str, Tensor]:
    """Return dq, dk and dv in float64, computed for some queries of a head at a time."""
    q, k, v, dout = (x.double() for x in (problem.q, problem.k, problem.v, problem.dout))
    grads = {name: torch.zeros_like(x) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    group = q.shape[2] // k.shape[2]
    for head in range(q.shape[2]):
        keys, values = k[0, :, head // group], v[0, :, head // group]
        dk, dv = grads["dk"][0, :, head // group], grads["dv"][0, :, head // group]
        for begin in range(0, q.shape[1], CHUNK):
            rows = slice(begin, begin + CHUNK)
            queries, douts = q[0, rows, head], dout[0, rows, head]
            scores = queries @ keys[: rows.stop].T * problem.scale
            hidden = torch.ones_like(scores, dtype=torch.bool).triu(begin + 1)
            weights = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
            dweights = douts @ values[: rows.stop].T
            delta = (weights * dweights).sum(-1, keepdim=True)
            dscores = weights * (dweights - delta) * problem.scale
            grads["dq"][0, rows, head] = dscores @ keys[: rows.stop]
            dk[: rows.stop] += dscores.T @ queries
            dv[: rows.stop] += weights.T @ douts
    return grads


def norms(x: Tensor) -> Tensor:
    """Return the norm of every TILE rows of a head."""
    tiles: Tensor = x[0].unflatten(0, (-1, TILE))
    found: Tensor = torch.linalg.vector_norm(tiles, dim=(1, 3))
    return found
