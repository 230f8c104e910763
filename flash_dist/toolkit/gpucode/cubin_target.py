"""Reads the target of a cubin from the cubin itself: the header of its entry may differ.

The number is in the flags of the ELF header, at a place that depends on the ABI version. The suffix
is in a flag, an attribute or a note, depending on the toolkit. This was found by building one
source for 22 targets with several toolkits; it is not a stable ABI. Kernels of CUDA Tile are
compiled for their chip alone (`sm_120a`), but their header says `sm_120`.
"""

from __future__ import annotations

import re
from struct import Struct
from typing import TYPE_CHECKING, Final

from ..binaries.elf import section_data
from ..targets.archs import Arch
from .toolkit import TOOLS_NOTE

if TYPE_CHECKING:
    from ..binaries.elf import Elf
    from ..binaries.view import Buffer

ABI_7, ABI_8 = 7, 8  # CUDA up to 12.9, and from 12.8 on; 12.8 and 12.9 write both
MAX_SECTION: Final = 64 << 10

_SUFFIX_A: Final = {ABI_7: 0x800, ABI_8: 0x8}
_COMPAT, _NOTE = ".nv.compat", TOOLS_NOTE
_ATTRIBUTE: Final = Struct("<BBH")
_BYTE, _SIZED = 2, 4  # formats of an attribute; the others have no data either
_ACCELERATED: Final = 9
_NUMBERS: Final = range(10, 256)
_NAMED: Final = re.compile(rb"-(?:arch|-gpu-name)[ =]sm_([0-9]{2,3})([af]?)(?![0-9a-z])")


def read_number(elf: Elf) -> int:
    """Return the decimal target, 90 for `sm_90a`; 0 for an unknown ABI version."""
    if elf.abi_version == ABI_7:
        return elf.flags & 0xFF
    return elf.flags >> 8 & 0xFF if elf.abi_version == ABI_8 else 0


def read_target(data: Buffer, elf: Elf, claimed: str = "") -> Arch | None:
    """Return the target of a cubin; None if unknown.

    Args:
        data: The cubin.
        elf: Its header and sections.
        claimed: The suffix to use if the cubin itself has none.
    """
    number = read_number(elf)
    if number not in _NUMBERS:
        return None
    return Arch(number // 10, number % 10, _read_suffix(data, elf, number, claimed))


def _read_suffix(data: Buffer, elf: Elf, number: int, claimed: str) -> str:
    if elf.flags & _SUFFIX_A[elf.abi_version]:
        return "a"
    if elf.abi_version == ABI_7:
        return claimed.replace("a", "")
    contents = {
        section.name: section_data(data, section)
        for section in elf.sections
        if section.name in {_COMPAT, _NOTE} and section.size <= MAX_SECTION
    }
    accelerated = read_accelerated(contents.get(_COMPAT, b""))
    if accelerated:
        return "a"
    # NOTE: `sm_100f` and `sm_100` differ only in the note.
    found = _NAMED.finditer(contents.get(_NOTE, b""))
    named = {match[2].decode() for match in found if int(match[1]) == number}
    if len(named) == 1:
        return named.pop()
    return claimed if accelerated is None else claimed.replace("a", "")


def read_accelerated(info: bytes) -> bool | None:
    """Recognise code for one chip alone by the attributes of `.nv.compat`; None if unknown."""
    place = 0
    while place + _ATTRIBUTE.size <= len(info):
        form, attribute, value = _ATTRIBUTE.unpack_from(info, place)
        if (form, attribute) == (_BYTE, _ACCELERATED):
            return bool(value == 1)
        place += _ATTRIBUTE.size + ((value + 3) & ~3 if form == _SIZED else 0)
    return None
