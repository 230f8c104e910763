"""Runs the next of many slow steps in a second thread while the last result is used."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

AHEAD: Final = 3  # results that may wait


@contextmanager
def run_ahead(
    function: Callable[[_Item], _Result], items: Iterable[_Item]
) -> Iterator[Iterator[tuple[_Item, Callable[[], _Result]]]]:
    """Yield the items, each with a function that returns its result or raises its error.

    One thread runs the steps in order. It helps where the step releases Python's lock. A single
    step runs when its result is requested: archives hold thousands of objects of one image.

    NOTE: the thread ends with the block. If an error's traceback leaves it to the garbage
    collector, a thread that another pool is starting may end it, and both wait for ever.
    """
    items = tuple(items)
    if len(items) == 1:
        yield iter([(items[0], partial(function, items[0]))])
        return
    waiting: deque[tuple[_Item, Future[_Result]]] = deque()
    with ThreadPoolExecutor(max_workers=1) as pool:
        try:
            yield _walk(lambda item: pool.submit(function, item), items, waiting)
        finally:  # the rest is not needed
            for _, future in waiting:
                future.cancel()


def _walk(
    submit: Callable[[_Item], Future[_Result]],
    items: Iterable[_Item],
    waiting: deque[tuple[_Item, Future[_Result]]],
) -> Iterator[tuple[_Item, Callable[[], _Result]]]:
    for item in items:
        waiting.append((item, submit(item)))
        if len(waiting) > AHEAD:
            first, future = waiting.popleft()
            yield first, future.result
    while waiting:
        first, future = waiting.popleft()
        yield first, future.result
