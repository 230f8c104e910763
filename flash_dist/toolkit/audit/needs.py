"""Reads which glibc a wheel's libraries need, and whether they need Python.

The tags in the wheel's name must state both.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from ..binaries.symbols import SharedObject

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ..binaries.wheel import Wheel

_GLIBC: Final = re.compile(r"GLIBC_2\.([0-9]{1,9})[0-9]*(\.[0-9]+)?")  # reads at most 9 digits
_TAG: Final = re.compile(r"manylinux_2_([0-9]+)_\w+")
_PYTHON: Final = re.compile(r"_?Py[A-Z_]\w*")  # functions and types of CPython


def read_floor(file_name: str) -> int | None:
    """Return the lowest glibc minor version in the tags (34 for `manylinux_2_34`), or None."""
    found = [int(match[1]) for match in _TAG.finditer(file_name)]
    return min(found, default=None)


def find_glibc(wheel: Wheel, libraries: Iterable[str]) -> Iterator[int]:
    """Yield the minor version of each GLIBC_2.x that the libraries of a wheel need."""
    for _, library in _read(wheel, libraries):
        for version in library.versions_needed:
            match = _GLIBC.fullmatch(version.name)
            if match:
                yield int(match[1])


def find_python(wheel: Wheel, libraries: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each library that uses or defines symbols of Python's C API, with one such symbol."""
    for name, library in _read(wheel, libraries):
        symbols = (*(one.name for one in library.undefined), *library.defined())
        found = next(filter(_PYTHON.fullmatch, symbols), None)
        if found is not None:
            yield name, found


def _read(wheel: Wheel, libraries: Iterable[str]) -> Iterator[tuple[str, SharedObject]]:
    for name in libraries:
        with wheel.unpacked(name) as file:
            yield name, SharedObject(file.read())
