"""Steps of a second thread: in order, a few at a time, each with its own error."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.errors import LimitError
from flash_dist.toolkit.gpucode.fatbin import AHEAD, open_fatbin, run_ahead
from flash_dist.toolkit.gpucode.inspection import Choice, inspect_library
from tests.unit.made.budgets import allow
from tests.unit.made.fatbin_builder import PTX, container, entry, ptx

if TYPE_CHECKING:
    from pathlib import Path


def test_results_come_in_the_order_of_the_items() -> None:
    with run_ahead(str, range(9)) as walk:
        found = [(item, result()) for item, result in walk]
    assert found == [(number, str(number)) for number in range(9)]
    with run_ahead(str, list[int]()) as walk:
        assert list(walk) == []


def test_an_error_is_raised_where_its_result_is_asked_for() -> None:
    with run_ahead(int, ["1", "x", "3"]) as walk:
        pairs = list(walk)
        assert (pairs[0][1](), pairs[2][1]()) == (1, 3)
        with pytest.raises(ValueError, match="'x'"):
            pairs[1][1]()


def test_no_more_than_a_few_are_begun_before_they_are_asked_for() -> None:
    begun: list[int] = []
    with run_ahead(begun.append, range(100)) as walk:
        next(walk)
        next(walk)
        assert len(begun) <= AHEAD + 2
    assert len(begun) <= AHEAD + 2


def test_the_steps_run_in_one_other_thread_that_ends() -> None:
    with run_ahead(lambda _: threading.get_ident(), range(20)) as walk:
        names = {result() for _, result in walk}
    assert len(names) == 1
    assert names.isdisjoint({thread.ident for thread in threading.enumerate()})


def test_a_single_step_needs_no_thread() -> None:
    """An archive has thousands of objects, and starting a thread takes longer than most images."""
    with run_ahead(lambda _: threading.get_ident(), ["alone"]) as walk:
        assert [(item, result()) for item, result in walk] == [("alone", threading.get_ident())]


@pytest.mark.parametrize("level", ["kernels", "sizes", "coverage", "checked"])
def test_the_thread_has_ended_when_an_error_comes_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    """An error keeps its frames; left to the garbage collector, the thread can hang a command."""
    image = entry(PTX, 80, ptx("alpha"), codec="zstd")
    path = tmp_path / "images.fatbin"
    path.write_bytes(container(*[image] * 20))
    allow(monkeypatch, "kernels", 3)
    before = threading.active_count()
    chosen = Choice(checked=True) if level == "checked" else Choice(level)  # type: ignore[arg-type]
    with open_fatbin(path) as fatbin, pytest.raises(LimitError) as caught:
        inspect_library("images", "", fatbin, chosen)
    assert threading.active_count() == before
    assert caught.value.__traceback__ is not None
