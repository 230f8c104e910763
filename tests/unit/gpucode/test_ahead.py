"""Steps of a second thread: in order, a few at a time, each with its own error."""

from __future__ import annotations

import threading

import pytest

from flash_dist.gpucode.ahead import AHEAD, run_ahead


def test_results_come_in_the_order_of_the_items() -> None:
    assert [(item, result()) for item, result in run_ahead(str, range(9))] == [
        (number, str(number)) for number in range(9)
    ]
    assert list(run_ahead(str, [])) == []


def test_an_error_is_raised_where_its_result_is_asked_for() -> None:
    pairs = list(run_ahead(int, ["1", "x", "3"]))
    assert (pairs[0][1](), pairs[2][1]()) == (1, 3)
    with pytest.raises(ValueError, match="'x'"):
        pairs[1][1]()


def test_no_more_than_a_few_are_begun_before_they_are_asked_for() -> None:
    begun: list[int] = []
    walk = run_ahead(begun.append, range(100))
    next(walk)
    next(walk)
    assert len(begun) <= AHEAD + 2
    walk.close()  # type: ignore[attr-defined]
    assert len(begun) <= AHEAD + 2


def test_the_steps_run_in_one_other_thread_that_ends() -> None:
    names = {result() for _, result in run_ahead(lambda _: threading.get_ident(), range(20))}
    assert len(names) == 1
    assert names.isdisjoint({thread.ident for thread in threading.enumerate()})
