"""What an image holds: a cubin's target, its kernels and their resources, the names of a PTX text.

A cubin is ELF with machine 190. NVIDIA does not document its attributes; the numbers below were
found by comparing images built for the purpose with what NVIDIA's own tools print.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import asdict, dataclass
from struct import Struct
from typing import TYPE_CHECKING, Any

from ..binaries.budget import Budget
from ..binaries.elf import EM_CUDA, Elf, Section, StringTable, read_elf, section_data
from ..errors import FatbinError
from ..targets.archs import Arch
from .toolkit import TOOLS_NOTE, read_toolkit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..binaries.view import Buffer

STT_FUNC = 2
STO_CUDA_ENTRY = 0x10  # in st_other: a kernel, not a device function

EIATTR_MAX_THREADS = 0x05  # 3 x u32 per kernel, from __launch_bounds__
EIATTR_MIN_STACK_SIZE = 0x12  # {u32 symbol, u32 bytes}
EIATTR_REGCOUNT = 0x2F  # {u32 symbol, u32 registers}
_FORMATS_IN_PLACE = (1, 2, 3)  # nothing, a byte, a half word: all inside the 4-byte header
_FORMAT_SIZED = 4

_SYMBOL = Struct("<IBBHQQ")
_ATTRIBUTE = Struct("<BBH")
_PAIR = Struct("<II")
_TRIPLE = Struct("<III")
PTX_ENTRY = re.compile(
    r"^[ \t]*(?:\.(?:visible|weak|extern)\s+){0,3}\.entry\s+([\w$]+)", re.MULTILINE
)

# Which target a bare cubin is for: a fat binary records that beside the cubin, a cubin inside.
# The number is in the flags of the ELF header, at a place that depends on the ABI version. The
# suffix is in a flag, an attribute or a note, by the toolkit that wrote the file; found by building
# the same source for 22 targets with several toolkits. It is no stable ABI.
ABI_7, ABI_8 = 7, 8  # CUDA up to 12.9, and 12.8 on; 12.8 and 12.9 write both
MAX_SECTION = 64 << 10

_SUFFIX_A = {ABI_7: 0x800, ABI_8: 0x8}
_COMPAT, _NOTE = ".nv.compat", TOOLS_NOTE
_BANK = re.compile(r"\.nv\.constant[0-9]{1,2}(?=\.)")
_BYTE, _SIZED = 2, 4  # formats of an attribute; of the others, none has data either
_ACCELERATED = 9
_NUMBERS = range(10, 256)
_NAMED = re.compile(rb"-(?:arch|-gpu-name)[ =]sm_([0-9]{2,3})([af]?)(?![0-9a-z])")


@dataclass(frozen=True, slots=True)
class KernelInfo:
    """A kernel of one image. PTX tells the name only: the rest is None."""

    name: str
    arch: Arch | None
    registers: int | None = None
    static_smem: int | None = None
    stack: int | None = None
    code_size: int | None = None
    max_threads: int | None = None  # None also where the kernel sets no launch bound
    constant: int | None = None  # bytes, the parameters included
    local: int | None = None  # bytes that are not on the stack
    toolkit: str | None = None  # that made the image: "13.0.88", or "12.6" of an older one
    container: int | None = None  # of the file, whose images come from one source file

    def to_json(self) -> dict[str, Any]:
        """Return the kernel as plain data."""
        return {**asdict(self), "arch": None if self.arch is None else str(self.arch)}


@dataclass(frozen=True)
class Symbol:
    """A kernel's entry in the symbol table."""

    index: int
    name: str
    value: int  # offset in its section
    size: int


class Cubin:
    """A cubin's sections by name and its symbols."""

    def __init__(self, data: bytes, budget: Budget | None = None) -> None:
        self._budget = budget or Budget(len(data))
        elf = read_elf(data, self._budget)
        if elf.machine != EM_CUDA:
            message = f"image is ELF for machine {elf.machine}, a cubin has {EM_CUDA}"
            raise FatbinError(message)
        self.sections = {section.name: section for section in elf.sections}
        self._data = data
        self._symbols, self._strings = _read_symbols(data, elf, self._budget)
        self._names: dict[int, str] = {}

    def kernels(self) -> Iterator[Symbol]:
        """Walk the kernels, each name once: its sections are found by it."""
        seen: set[str] = set()
        for index, raw in enumerate(_SYMBOL.iter_unpack(self._symbols)):
            name, info, other, section, value, size = raw
            if info & 0xF != STT_FUNC or not other & STO_CUDA_ENTRY or section == 0:
                continue
            symbol = Symbol(index, self._strings.read(name), value, size)
            if symbol.name not in seen:
                seen.add(symbol.name)
                self._budget.spend("kernels")
                yield symbol

    def name(self, index: int) -> str:
        """Return the name of a symbol."""
        if (index + 1) * _SYMBOL.size > len(self._symbols):
            message = f"cubin has no symbol {index}"
            raise FatbinError(message)
        if index not in self._names:
            offset = _SYMBOL.unpack_from(self._symbols, index * _SYMBOL.size)[0]
            self._names[index] = self._strings.read(offset)
        return self._names[index]

    def contents(self, section: str) -> bytes:
        """Return the bytes of a section; none if there is no such section."""
        found = self.sections.get(section)
        return b"" if found is None else section_data(self._data, found)

    def attributes(self, section: str) -> Iterator[tuple[int, bytes]]:
        """Walk an `.nv.info` section: (attribute, value), the value empty when it is in place."""
        return _attributes(self.contents(section), section)


def read_ptx_kernels(
    text: bytes, arch: Arch | None, budget: Budget | None = None
) -> tuple[KernelInfo, ...]:
    """Return the entry points of a PTX text in their order."""
    budget = budget or Budget(len(text))
    names: dict[str, None] = {}
    for entry in PTX_ENTRY.finditer(text.decode("utf-8", "backslashreplace")):
        budget.spend("kernels")
        names[entry[1]] = None
    return tuple(KernelInfo(name, arch) for name in names)


def read_cubin_kernels(
    data: bytes, arch: Arch | None, budget: Budget | None = None
) -> tuple[KernelInfo, ...]:
    """Return the kernels of a cubin in the order of its symbols."""
    cubin = Cubin(data, budget)
    registers, stack = _read_resources(cubin)
    toolkit = read_toolkit(cubin) or None
    banks = sorted({match[0] for name in cubin.sections if (match := _BANK.match(name))})
    return tuple(
        KernelInfo(
            symbol.name,
            arch,
            registers=registers.get(symbol.index),
            static_smem=_size(cubin.sections.get(f".nv.shared.{symbol.name}")),
            stack=stack.get(symbol.index, 0),
            code_size=symbol.size,
            max_threads=_max_threads(cubin, symbol.name),
            constant=sum(_size(cubin.sections.get(f"{bank}.{symbol.name}")) for bank in banks),
            toolkit=toolkit,
            local=_size(cubin.sections.get(f".nv.local.{symbol.name}")),
        )
        for symbol in cubin.kernels()
    )


def _read_symbols(data: bytes, elf: Elf, budget: Budget) -> tuple[bytes, StringTable]:
    table = next((section for section in elf.sections if section.name == ".symtab"), None)
    if table is None:
        return b"", StringTable(b"")
    if table.size % _SYMBOL.size or table.link >= len(elf.sections):
        message = f"cubin symbol table is broken ({table.size} bytes, strings in {table.link})"
        raise FatbinError(message)
    budget.spend("symbols", table.size // _SYMBOL.size)
    strings = StringTable(section_data(data, elf.sections[table.link]), budget)
    return section_data(data, table), strings


def _read_resources(cubin: Cubin) -> tuple[dict[int, int], dict[int, int]]:
    """Return registers and stack bytes by symbol index."""
    registers: dict[int, int] = {}
    stack: dict[int, int] = {}
    tables = {EIATTR_REGCOUNT: registers, EIATTR_MIN_STACK_SIZE: stack}
    for attribute, value in cubin.attributes(".nv.info"):
        table = tables.get(attribute)
        if table is not None:
            symbol, number = _unpack(_PAIR, value)
            table[symbol] = number
    return registers, stack


def _max_threads(cubin: Cubin, name: str) -> int | None:
    for attribute, value in cubin.attributes(f".nv.info.{name}"):
        if attribute == EIATTR_MAX_THREADS:
            return math.prod(_unpack(_TRIPLE, value))
    return None


def _size(section: Section | None) -> int:
    return 0 if section is None else section.size


def _attributes(info: bytes, section: str) -> Iterator[tuple[int, bytes]]:
    place = 0
    while place + _ATTRIBUTE.size <= len(info):
        form, attribute, size = _ATTRIBUTE.unpack_from(info, place)
        place += _ATTRIBUTE.size
        if form in _FORMATS_IN_PLACE:
            yield attribute, b""
        elif form == _FORMAT_SIZED and place + size <= len(info):
            yield attribute, info[place : place + size]
            place += (size + 3) & ~3
        else:
            message = f"attribute of format {form} in {section!r} is not understood"
            raise FatbinError(message)


def _unpack(form: Struct, value: bytes) -> tuple[int, ...]:
    try:
        return form.unpack(value)
    except struct.error:
        message = f"attribute of {len(value)} bytes in a cubin should have {form.size}"
        raise FatbinError(message) from None


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
