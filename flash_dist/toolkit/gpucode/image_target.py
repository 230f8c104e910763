"""Reads the target of an image from the image itself: the entry's header may name another one.

A cubin's target number is in the flags of the ELF header, at bits that depend on the ABI version.
The suffix is in a flag, an attribute or a note, depending on the toolkit. This was found by
building one source for 22 targets with several toolkits; it is not a stable ABI. Kernels of CUDA
Tile are compiled for one chip only (`sm_120a`), but the header of their entry says `sm_120`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ..binaries.elf import EM_CUDA, Elf, read_elf, section_data
from ..errors import FatbinError
from ..targets.archs import Arch
from ..targets.devices import format_version
from .cubin import ATTRIBUTE, MAX_NOTE, TOOLS_NOTE

if TYPE_CHECKING:
    from ..binaries.budget import Budget
    from ..binaries.view import Buffer
    from .images import FatbinEntry

ABI_7, ABI_8 = 7, 8  # CUDA up to 12.9, and from 12.8 on; 12.8 and 12.9 write both

_SUFFIX_A: Final = {ABI_7: 0x800, ABI_8: 0x8}
_COMPAT: Final = ".nv.compat"
_BYTE, _SIZED = 2, 4  # formats of an attribute; only _SIZED has data after it
_ACCELERATED: Final = 9
_NUMBERS: Final = range(10, 256)
_NAMED: Final = re.compile(rb"-(?:arch|-gpu-name)[ =]sm_([0-9]{2,3})([af]?)(?![0-9a-z])")

_HEAD_BYTES: Final = 64 << 10  # `.version` and `.target` of PTX must be in the first bytes
_VERSION: Final = re.compile(rb"^\s*\.version\s+([0-9]{1,4})\.([0-9]{1,4})(?![0-9])", re.MULTILINE)
_TARGET: Final = re.compile(rb"^\s*\.target\s+sm_([0-9]{1,4})([af]?)\b", re.MULTILINE)


def check_image(entry: FatbinEntry, data: bytes, budget: Budget) -> Arch | None:
    """Compare the head of unpacked SASS or PTX with the header of its entry.

    Returns:
        The target that the image itself names, or the header's if the image's ABI is unknown.

    Raises:
        FatbinError: The image contradicts its header.
    """
    if entry.kind == "ptx":
        return _check_ptx(entry, data[:_HEAD_BYTES])
    elf = read_elf(data, budget)
    number = read_number(elf)  # 0: unknown ABI
    if elf.machine != EM_CUDA or number == 0:
        return entry.arch
    if number != entry.raw_number:
        message = f"its cubin is for target number {number}, its header declares {entry.raw_number}"
        raise FatbinError(message)
    return read_target(data, elf, entry.arch.suffix if entry.arch else "") or entry.arch


def _check_ptx(entry: FatbinEntry, head: bytes) -> Arch | None:
    version, target = _VERSION.search(head), _TARGET.search(head)
    if version is None or target is None:
        message = "its PTX lacks .version or .target"
        raise FatbinError(message)
    isa = int(version[1]), int(version[2])
    if entry.ptx_isa is not None and isa != entry.ptx_isa:
        said = format_version(entry.ptx_isa)
        message = f"its PTX has ISA {format_version(isa)}, its header declares {said}"
        raise FatbinError(message)
    number, suffix = int(target[1]), target[2].decode()
    if number != entry.raw_number:
        message = f"its PTX is for target number {number}, its header declares {entry.raw_number}"
        raise FatbinError(message)
    return entry.arch and replace(entry.arch, suffix=suffix)


def read_number(elf: Elf) -> int:
    """Return a cubin's target number, 90 for `sm_90a`; 0 for an unknown ABI version."""
    if elf.abi_version == ABI_7:
        return elf.flags & 0xFF
    return elf.flags >> 8 & 0xFF if elf.abi_version == ABI_8 else 0


def read_target(data: Buffer, elf: Elf, claimed: str = "") -> Arch | None:
    """Return the target of a cubin; None if unknown.

    Args:
        data: The cubin.
        elf: The header and the sections of the cubin.
        claimed: The suffix in the entry's header, used if the cubin does not record one.
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
        if section.name in {_COMPAT, TOOLS_NOTE} and section.size <= MAX_NOTE
    }
    accelerated = read_accelerated(contents.get(_COMPAT, b""))
    if accelerated:
        return "a"
    # NOTE: `sm_100f` and `sm_100` differ only in the note.
    found = _NAMED.finditer(contents.get(TOOLS_NOTE, b""))
    named = {match[2].decode() for match in found if int(match[1]) == number}
    if len(named) == 1:
        return named.pop()
    return claimed if accelerated is None else claimed.replace("a", "")


def read_accelerated(info: bytes) -> bool | None:
    """Tell from the attributes of `.nv.compat` if code is for one chip only; None if unknown."""
    place = 0
    while place + ATTRIBUTE.size <= len(info):
        form, attribute, value = ATTRIBUTE.unpack_from(info, place)
        if (form, attribute) == (_BYTE, _ACCELERATED):
            return bool(value == 1)
        place += ATTRIBUTE.size + ((value + 3) & ~3 if form == _SIZED else 0)
    return None
