"""Which target a bare cubin is for: a fat binary records that beside the cubin, a cubin inside.

The number is in the flags of the ELF header, at a place that depends on the ABI version. The
suffix is in a flag, an attribute or a note, by the toolkit that wrote the file; found by building
the same source for 22 targets with several toolkits. It is no stable ABI.
"""

from __future__ import annotations

import re
from struct import Struct
from typing import TYPE_CHECKING

from ..binaries.elf import section_data
from ..targets.archs import Arch

if TYPE_CHECKING:
    from ..binaries.elf import Buffer, Elf

ABI_7, ABI_8 = 7, 8  # CUDA up to 12.9, and 12.8 on; 12.8 and 12.9 write both
MAX_SECTION = 64 << 10

_SUFFIX_A = {ABI_7: 0x800, ABI_8: 0x8}
_COMPAT, _NOTE = ".nv.compat", ".note.nv.tkinfo"
_ATTRIBUTE = Struct("<BBH")
_BYTE, _SIZED = 2, 4  # formats of an attribute; of the others, none has data either
_ACCELERATED = 9
_NUMBERS = range(10, 256)
_NAMED = re.compile(rb"-(?:arch|-gpu-name)[ =]sm_([0-9]{2,3})([af]?)(?![0-9a-z])")


def read_number(elf: Elf) -> int:
    """Return the decimal target, 90 for `sm_90a`; 0 where the ABI version is not understood."""
    if elf.abi_version == ABI_7:
        return elf.flags & 0xFF
    return elf.flags >> 8 & 0xFF if elf.abi_version == ABI_8 else 0


def read_target(data: Buffer, elf: Elf) -> Arch | None:
    """Return what a cubin was compiled for; None if that is not understood."""
    number = read_number(elf)
    if number not in _NUMBERS:
        return None
    return Arch(number // 10, number % 10, _read_suffix(data, elf, number))


def _read_suffix(data: Buffer, elf: Elf, number: int) -> str:
    if elf.flags & _SUFFIX_A[elf.abi_version]:
        return "a"
    if elf.abi_version == ABI_7:
        return ""
    contents = {
        section.name: section_data(data, section)
        for section in elf.sections
        if section.name in {_COMPAT, _NOTE} and section.size <= MAX_SECTION
    }
    if _is_accelerated(contents.get(_COMPAT, b"")):
        return "a"
    # NOTE: `sm_100f` and `sm_100` differ in the note alone.
    found = _NAMED.finditer(contents.get(_NOTE, b""))
    named = {match[2].decode() for match in found if int(match[1]) == number}
    return named.pop() if len(named) == 1 else ""


def _is_accelerated(info: bytes) -> bool:
    place = 0
    while place + _ATTRIBUTE.size <= len(info):
        form, attribute, value = _ATTRIBUTE.unpack_from(info, place)
        if (form, attribute) == (_BYTE, _ACCELERATED):
            return bool(value == 1)
        place += _ATTRIBUTE.size + ((value + 3) & ~3 if form == _SIZED else 0)
    return False
