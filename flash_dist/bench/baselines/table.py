"""Make a baseline by its name."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from .eager import make_eager
from .flex import make_flex
from .names import DETERMINISTIC, OWN, PACKAGES, PLAIN, in_deterministic_mode
from .ours import make_ours
from .packages import make_package
from .sdpa import make_sdpa

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .ours import Attend
    from .problem import Problem

    Run = Callable[[], object]


def make_attend(name: str, problem: Problem) -> Attend:
    """Return a function that computes out from a problem's inputs, with a baseline.

    Raises:
        CannotRun: The baseline does not support the problem. Any other error means that the
            baseline has failed.
    """
    with determinism_of(name):
        if name in OWN:
            return make_ours(problem)
        if name == PLAIN:
            plain = make_ours(problem.without_scores())
            return lambda q, k, v, *_: plain(q, k, v)
        if name == "eager":
            return make_eager(problem)
        if name == "flex":
            return make_flex(problem)
        if name.removesuffix(DETERMINISTIC) in PACKAGES:
            return make_package(name, problem)
        return make_sdpa(name, problem)


@contextmanager
def determinism_of(name: str) -> Iterator[None]:
    """Use torch's deterministic mode within this context if the baseline's name says so.

    In that mode torch also fills newly allocated memory, such as outputs and peers' workspaces.
    """
    if not in_deterministic_mode(name):
        yield
        return
    torch.use_deterministic_algorithms(True)  # noqa: FBT003
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)  # noqa: FBT003


def bind(name: str, run: Run) -> Run:
    """Return `run`, in torch's deterministic mode if the baseline's name says so."""
    if not in_deterministic_mode(name):
        return run

    def bound() -> object:
        with determinism_of(name):
            return run()

    return bound
