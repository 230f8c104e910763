"""Compares the glibc that a wheel's libraries need with the one that its name promises."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from ..binaries.symbols import SharedObject

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ..binaries.wheel import Wheel

_GLIBC: Final = re.compile(r"GLIBC_2\.([0-9]{1,9})[0-9]*(\.[0-9]+)?")  # more digits: newer than any
_TAG: Final = re.compile(r"manylinux_2_([0-9]+)_\w+")


def read_floor(file_name: str) -> int | None:
    """Return 34 for a `manylinux_2_34` wheel; None without such a tag."""
    found = [int(match[1]) for match in _TAG.finditer(file_name)]
    return min(found, default=None)


def find_glibc(wheel: Wheel, libraries: Iterable[str]) -> Iterator[int]:
    """Yield x of each version GLIBC_2.x that the libraries of a wheel need."""
    for name in libraries:
        with wheel.unpacked(name) as file:
            library = SharedObject(file.read())
        for version in library.versions_needed:
            match = _GLIBC.fullmatch(version.name)
            if match:
                yield int(match[1])
