"""Values that no valid file has, and every place in a file for such a value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

HOSTILE: list[object] = ["evil", "", "../x", None, [], {}, [[]], -1, 10**30, 0.5, "9" * 5000]


def places(data: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in parsed JSON."""
    if path:
        yield path
    inside: Iterable[tuple[Any, Any]] = (
        enumerate(data) if isinstance(data, list) else getattr(data, "items", tuple)()
    )
    for key, value in inside:
        yield from places(value, (*path, key))


def put(data: Any, path: tuple[Any, ...], value: object) -> None:  # noqa: ANN401
    """Change the value at a path."""
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = value
