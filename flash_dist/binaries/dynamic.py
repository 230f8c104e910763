"""What a shared library asks of the dynamic linker: needed libraries, search path, exports.

Source: System V ABI, "Dynamic Linking".
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING

from ..errors import FatbinError
from .elf import Elf, Section, StringTable, read_elf, section_data

if TYPE_CHECKING:
    from collections.abc import Iterator

_ENTRY = Struct("<qQ")
_SYMBOL = Struct("<IBBHQQ")
_DT_NEEDED, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 1, 14, 15, 29
_STB_LOCAL, _SHN_UNDEF = 0, 0


@dataclass(frozen=True)
class DynamicInfo:
    """The dynamic section in plain values."""

    needed: tuple[str, ...]
    soname: str | None
    search_path: tuple[str, ...]  # the folders of RPATH and RUNPATH
    exports: tuple[str, ...]


def read_dynamic(data: bytes) -> DynamicInfo:
    """Read the dynamic section and symbols of a library.

    Raises:
        FatbinError: The file is no ELF library or is damaged.
    """
    elf = read_elf(data)
    entries = list(_dynamic_entries(data, elf))
    return DynamicInfo(
        needed=tuple(name for tag, name in entries if tag == _DT_NEEDED),
        soname=next((name for tag, name in entries if tag == _DT_SONAME), None),
        search_path=tuple(
            folder
            for tag, names in entries
            if tag in {_DT_RPATH, _DT_RUNPATH}
            for folder in names.split(":")
        ),
        exports=tuple(_exports(data, elf)),
    )


def _dynamic_entries(data: bytes, elf: Elf) -> Iterator[tuple[int, str]]:
    section = _section(elf, ".dynamic")
    strings = StringTable(section_data(data, _linked(elf, section)))
    table = section_data(data, section)
    for tag, value in _ENTRY.iter_unpack(table[: len(table) // _ENTRY.size * _ENTRY.size]):
        if tag in {_DT_NEEDED, _DT_SONAME, _DT_RPATH, _DT_RUNPATH}:
            yield tag, strings.read(value)


def _exports(data: bytes, elf: Elf) -> Iterator[str]:
    section = _section(elf, ".dynsym")
    strings = StringTable(section_data(data, _linked(elf, section)))
    table = section_data(data, section)
    for name, info, _, index, _, _ in _SYMBOL.iter_unpack(
        table[: len(table) // _SYMBOL.size * _SYMBOL.size]
    ):
        if info >> 4 != _STB_LOCAL and index != _SHN_UNDEF:
            yield strings.read(name)


def _section(elf: Elf, name: str) -> Section:
    found = next((section for section in elf.sections if section.name == name), None)
    if found is None:
        message = f"the library has no {name} section"
        raise FatbinError(message)
    return found


def _linked(elf: Elf, section: Section) -> Section:
    if section.link >= len(elf.sections):
        message = f"section {section.name} links to section {section.link}, which does not exist"
        raise FatbinError(message)
    return elf.sections[section.link]
