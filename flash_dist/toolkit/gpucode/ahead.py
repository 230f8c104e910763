"""Runs the next of many slow steps in a second thread while the last result is used."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

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
    with ThreadPoolExecutor(max_workers=1) as pool:
        try:
            yield _walk(pool, function, items)
        finally:
            pool.shutdown(cancel_futures=True)  # the rest is not needed


def _walk(
    pool: ThreadPoolExecutor, function: Callable[[_Item], _Result], items: Iterable[_Item]
) -> Iterator[tuple[_Item, Callable[[], _Result]]]:
    waiting: deque[tuple[_Item, Callable[[], _Result]]] = deque()
    for item in items:
        waiting.append((item, pool.submit(function, item).result))
        if len(waiting) > AHEAD:
            yield waiting.popleft()
    yield from waiting
