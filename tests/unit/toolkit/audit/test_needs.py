"""Symbols of Python that a wheel's libraries need."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.audit.needs import find_python
from flash_dist.toolkit.binaries.wheel import open_wheel
from tests.unit.made.library_builder import Lab, needs_gcc

if TYPE_CHECKING:
    from pathlib import Path

SOURCES = {
    "function": ("void* PyDict_New(void); void* f(void) { return PyDict_New(); }", "PyDict_New"),
    "type": ("extern int PyLong_Type; int* f(void) { return &PyLong_Type; }", "PyLong_Type"),
    "private": ("void _Py_Dealloc(void*); void f(void) { _Py_Dealloc(0); }", "_Py_Dealloc"),
    "entry point": ("void* PyInit__C(void) { return 0; }", "PyInit__C"),
    "another word": ("void Pythagoras(void); void f(void) { Pythagoras(); }", ""),
}


@needs_gcc
@pytest.mark.parametrize(("source", "symbol"), SOURCES.values(), ids=SOURCES.keys())
def test_a_symbol_of_python_is_found(tmp_path: Path, source: str, symbol: str) -> None:
    library, wheel = Lab(tmp_path).build("_C.so", source), tmp_path / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(library, "x/_C.so")
    with open_wheel(wheel) as opened:
        found = list(find_python(opened, ["x/_C.so"]))
    assert found == ([("x/_C.so", symbol)] if symbol else [])
