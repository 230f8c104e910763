"""Copies of all tensors of a problem."""

from __future__ import annotations

import pytest
import torch

from flash_dist.bench.baselines.copying import make_copy
from flash_dist.bench.baselines.failures import CannotRun
from flash_dist.bench.baselines.problem import Problem
from flash_dist.bench.baselines.shapes import FULL, Shape

PROBLEM = Problem.draw(Shape(1, 4, 6, 2, 1, 8, 4, FULL, "fp32"), torch.device("cpu"))


@pytest.mark.parametrize(("pass_", "times"), [("forward", 1), ("backward", 2)])
def test_every_tensor_of_a_pass_is_copied_once(
    pass_: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[list[torch.Tensor]] = []
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *lists: copied.extend(lists))
    make_copy(PROBLEM, pass_)()
    targets, sources = copied
    own = [PROBLEM.q, PROBLEM.k, PROBLEM.v, PROBLEM.dout] * times
    assert all(torch.equal(a, b) for a, b in zip(sources, own, strict=True))
    pointers = [x.data_ptr() for x in (*targets, *sources)]
    assert len(set(pointers)) == len(pointers) == 8 * times


def test_a_copy_has_no_other_pass() -> None:
    with pytest.raises(CannotRun, match=r"forward or backward.* `both`"):
        make_copy(PROBLEM, "both")
