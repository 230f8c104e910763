"""Everyone who is measured, by name."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.deterministic

from .eager import make_eager
from .flex import make_flex
from .names import DETERMINISTIC, OURS
from .ours import make_ours
from .sdpa import make_sdpa

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .ours import Attend
    from .problem import Problem

    Run = Callable[[], object]


def make_attend(name: str, problem: Problem) -> Attend:
    """Return a contender's attention on [batch, seqlen, heads, head_dim], warm or compiled.

    Raises:
        CannotRun: It does not serve the problem. Anything else is a failure of its own.
    """
    if name == OURS:
        return make_ours(problem)
    if name == "eager":
        return make_eager(problem)
    if name == "flex":
        return make_flex(problem)
    with determinism_of(name):
        return make_sdpa(name, problem)


@contextmanager
def determinism_of(name: str) -> Iterator[None]:
    """Run a peer as its name says. Torch's fill of new memory is off: no peer pays for it."""
    if not name.endswith(DETERMINISTIC):
        yield
        return
    settings: Any = torch.utils.deterministic  # a module with properties
    filled = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)  # noqa: FBT003
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)  # noqa: FBT003
        settings.fill_uninitialized_memory = filled


def bind(name: str, run: Run) -> Run:
    """Return a run in the mode of its contender."""
    if not name.endswith(DETERMINISTIC):
        return run

    def bound() -> object:
        with determinism_of(name):
            return run()

    return bound
