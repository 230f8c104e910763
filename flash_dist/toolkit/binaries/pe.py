"""Reads the parts of PE and COFF that locate GPU code: the sections of a DLL or object file.

Source: Microsoft, "PE Format". 64-bit only, for x86-64 and ARM64; all bounds are checked.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING

from ..errors import FatbinError
from .elf import EXECUTABLE, LOADED, SHT_NOBITS, SHT_PROGBITS, Section, StringTable, check_overlap
from .view import Buffer, unpack

if TYPE_CHECKING:
    from .budget import Budget

PE_MAGIC = b"MZ"
MAX_STRINGS = 64 << 20

_MACHINES = {0x8664: "x86-64", 0xAA64: "ARM64"}
_PE32, _PE32_PLUS = 0x10B, 0x20B
_SIGNATURE = b"PE\0\0"
_SIGNATURE_AT = Struct("<60xI")  # in the DOS header: the offset of the signature
_FILE = Struct("<HHIIIHH")
_KIND = Struct("<H")
_BASE = Struct("<24xQ")  # in a PE32+ header: the load address
_SECTION = Struct("<8sIIIIIIHHI")
_STRINGS_SIZE = Struct("<I")
_SYMBOL_SIZE = 18
_EXECUTABLE = 0x20000000  # flag of a section
_HINT = "pass a library for 64-bit Windows, x86-64 or ARM64"


def read_pe(data: Buffer, budget: Budget | None = None) -> tuple[Section, ...]:
    """Read the section table of a DLL or program.

    Raises:
        FatbinError: The file is damaged, of another kind or for 32-bit Windows.
    """
    start = _unpack(_SIGNATURE_AT, data, 0)[0]
    if data[start : start + len(_SIGNATURE)] != _SIGNATURE:
        message = f"the DOS header points to offset {start}, which holds no PE header"
        raise FatbinError(message)
    header = start + len(_SIGNATURE)
    machine = _unpack(_FILE, data, header)[0]
    kind = _unpack(_KIND, data, header + _FILE.size)[0]
    if machine not in _MACHINES or kind != _PE32_PLUS:
        bits = {_PE32: "PE32", _PE32_PLUS: "PE32+"}.get(kind, f"kind {kind:#x}")
        message = f"it must be PE32+ for x86-64 or ARM64, got {bits} for machine {machine:#x}"
        raise FatbinError(message, hint=_HINT)
    return _read_sections(data, header, budget, linked=True)


def is_object(data: Buffer) -> bool:
    """Tell if the data is a COFF object file: a known machine, and no optional header.

    COFF has no magic number.
    """
    if len(data) < _FILE.size:
        return False
    machine, _, _, _, _, option_size, _ = unpack(_FILE, data)
    return machine in _MACHINES and option_size == 0


def read_object(data: Buffer, budget: Budget | None = None) -> tuple[Section, ...]:
    """Read the section table of a COFF object file.

    Raises:
        FatbinError: The file is damaged.
    """
    return _read_sections(data, 0, budget, linked=False)


def _read_sections(
    data: Buffer, header: int, budget: Budget | None, *, linked: bool
) -> tuple[Section, ...]:
    _, count, _, symbols, symbol_count, option_size, _ = _unpack(_FILE, data, header)
    table = header + _FILE.size + option_size
    if table + count * _SECTION.size > len(data):
        message = f"PE section table is outside the file ({count} sections, {len(data)} bytes)"
        raise FatbinError(message)
    base = _unpack(_BASE, data, header + _FILE.size)[0] if linked else 0
    strings = _read_strings(data, symbols + symbol_count * _SYMBOL_SIZE if symbols else 0, budget)
    sections = []
    for place in range(table, table + count * _SECTION.size, _SECTION.size):
        raw, virtual_size, address, raw_size, offset, *_, flags = unpack(_SECTION, data, place)
        # NOTE: a linked section is padded in the file; a section of an object has no virtual size.
        size = min(virtual_size, raw_size) if linked else raw_size
        name, kind = _read_name(raw, strings), SHT_PROGBITS if offset else SHT_NOBITS
        flags = LOADED | (EXECUTABLE if flags & _EXECUTABLE else 0)  # Windows loads all sections
        address = base + address if linked else 0
        sections.append(Section(name, kind, flags, offset, size, address=address))
    check_overlap("PE", sections, len(data))
    return tuple(sections)


def _read_name(raw: bytes, strings: StringTable | None) -> str:
    """Return a section's name; `/123` means that it is at offset 123 of the string table."""
    name = raw.rstrip(b"\0")
    if strings is not None and name[:1] == b"/" and name[1:].isdigit():
        return strings.read(int(name[1:]))
    return name.decode("utf-8", "backslashreplace")


def _read_strings(data: Buffer, start: int, budget: Budget | None) -> StringTable | None:
    """Return the string table, its size field included; None if it is absent or damaged."""
    if not 0 < start <= len(data) - _STRINGS_SIZE.size:
        return None
    size = unpack(_STRINGS_SIZE, data, start)[0]
    if size > min(MAX_STRINGS, len(data) - start):
        return None
    return StringTable(data[start : start + size], budget)


def _unpack(form: Struct, data: Buffer, place: int) -> tuple[int, ...]:
    if place + form.size > len(data):
        message = f"PE file is truncated: {len(data)} bytes, a header ends at {place + form.size}"
        raise FatbinError(message)
    return unpack(form, data, place)
