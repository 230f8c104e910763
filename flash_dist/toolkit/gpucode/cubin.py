"""Reads the kernels of an image: with their resources from a cubin, only their names from PTX.

A cubin is ELF with machine 190. NVIDIA does not document its attributes; the numbers below come
from comparing test images with the output of NVIDIA's own tools.

ptxas records the version of the CUDA toolkit in notes and kernel attributes. From CUDA 12.8 on,
`.note.nv.tkinfo` has the release as text, and `.note.nv.cuinfo` has it as a number, 130 for 13.0.
Cubins with the older ABI have no notes. The kernel attributes have the same number in all cubins
seen, back to CUDA 11. This was found by building with several toolkits; it is not a stable ABI.
"""

from __future__ import annotations

import math
import re
import struct
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from ..binaries.budget import Budget
from ..binaries.elf import EM_CUDA, Elf, Section, StringTable, read_elf, section_data
from ..errors import FatbinError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..targets.archs import Arch

STT_FUNC = 2
STO_CUDA_ENTRY = 0x10  # in st_other: a kernel, not a device function

EIATTR_MAX_THREADS = 0x05  # 3 x u32 per kernel, from __launch_bounds__
EIATTR_MIN_STACK_SIZE = 0x12  # {u32 symbol, u32 bytes}
EIATTR_REGCOUNT = 0x2F  # {u32 symbol, u32 registers}
_FORMATS_IN_PLACE = (1, 2, 3)  # no value, a byte or a half word: all inside the 4-byte header
_FORMAT_SIZED = 4

_SYMBOL = Struct("<IBBHQQ")
ATTRIBUTE = Struct("<BBH")  # format, number, size or value
_WORD = Struct("<I")
_PAIR = Struct("<II")
_TRIPLE = Struct("<III")
PTX_ENTRY = b".entry"
_ENTRY_LINE = re.compile(
    rb"\s*(?:\.(?:visible|weak|extern)\s+){0,3}\.entry\s+(?P<name>[\w$\x80-\xff]+)"
)

# NOTE: the cost of work on PTX is the number of bytes that could be searched in the same time.
# Adversarial texts exceed the budget. Real PTX costs less than its size.
END_COST: Final = 8  # a brace or semicolon
MATCH_COST: Final = 50  # a match of a pattern
STEP_COST: Final = 150  # a step of a loop in Python

_BANK = re.compile(r"\.nv\.constant[0-9]{1,2}(?=\.)")

TOOLS_NOTE, NUMBER_NOTE = ".note.nv.tkinfo", ".note.nv.cuinfo"
MAX_NOTE: Final = 64 << 10
EIATTR_CUDA_API_VERSION: Final = 0x37  # u32, 130 for CUDA 13.0
_RELEASE: Final = re.compile(
    rb"release [0-9]{1,3}\.[0-9]{1,3}, V([0-9]{1,3}(?:\.[0-9]{1,5}){1,2})\0"
)
_CUINFO: Final = Struct("<III12sHHHH")  # sizes, type, "NVIDIA Corp", version, arch, CUDA, zero
_OWNER: Final = b"NVIDIA Corp\0"
_KNOWN: Final = range(60, 1000)  # CUDA toolkits 6.0 to 99.9
_KERNELS: Final = 8  # maximum number of kernels to read in search of the toolkit


@dataclass(frozen=True, slots=True)
class KernelInfo:
    """A kernel of one image. Sizes are in bytes. The resources of PTX are unknown: None."""

    name: str
    arch: Arch | None
    registers: int | None = None
    static_smem: int | None = None
    stack: int | None = None
    code_size: int | None = None
    max_threads: int | None = None  # also None if the kernel sets no launch bound
    constant: int | None = None  # bytes, including the parameters
    local: int | None = None  # bytes, without the stack
    # Version of the CUDA toolkit that compiled the kernel: "13.0.88", or "12.6" if the cubin does
    # not record the full version.
    toolkit: str | None = None
    container: int | None = None  # number of its container within the file

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
    """The sections of a cubin, by name, and its symbols."""

    def __init__(self, data: bytes, budget: Budget | None = None) -> None:
        self._budget = budget or Budget(len(data))
        elf = read_elf(data, self._budget)
        if elf.machine != EM_CUDA:
            message = f"a cubin must be ELF for machine {EM_CUDA}, got {elf.machine}"
            raise FatbinError(message)
        self.sections = {section.name: section for section in elf.sections}
        self._data = data
        self._symbols, self._strings = _read_symbols(data, elf, self._budget)
        self._names: dict[int, str] = {}

    def kernels(self) -> Iterator[Symbol]:
        """Yield the kernels, each name once, because the sections of a kernel are found by name."""
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
        """Return the bytes of a section; empty if there is no such section."""
        found = self.sections.get(section)
        return b"" if found is None else section_data(self._data, found)

    def attributes(self, section: str) -> Iterator[tuple[int, bytes]]:
        """Yield (attribute, value) of an `.nv.info` section; an inline value is yielded as b""."""
        return _attributes(self.contents(section), section)


def read_ptx_kernels(
    text: bytes, arch: Arch | None, budget: Budget | None = None
) -> tuple[KernelInfo, ...]:
    """Return the entry points of a PTX text, in order."""
    budget = budget or Budget(len(text))
    budget.spend("searched", text.count(PTX_ENTRY) * STEP_COST)
    names: dict[str, None] = {}
    place = 0
    while (entry := find_ptx_entry(text, place)) is not None:
        budget.spend("kernels")
        names[ptx_name(entry)] = None
        place = entry.end()
    return tuple(KernelInfo(name, arch) for name in names)


def find_ptx_entry(source: bytes, place: int = 0) -> re.Match[bytes] | None:
    """Find the next entry point. The match begins with its line and ends with its name.

    NOTE: `bytes.find` is ten times as fast as a pattern that is tried at the start of each line.
    """
    while (found := source.find(PTX_ENTRY, place)) >= 0:
        line = source.rfind(b"\n", place, found) + 1
        if line or not place:
            entry = _ENTRY_LINE.match(source, line)
            if entry is not None:
                return entry
        place = found + len(PTX_ENTRY)
    return None


def ptx_name(entry: re.Match[bytes]) -> str:
    """Return the name of an entry point."""
    return entry["name"].decode("utf-8", "backslashreplace")


def read_cubin_kernels(
    data: bytes, arch: Arch | None, budget: Budget | None = None
) -> tuple[KernelInfo, ...]:
    """Return the kernels of a cubin in the order of its symbol table."""
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
    """Return the registers and the stack bytes of kernels, both by symbol index."""
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


def read_toolkit(cubin: Cubin) -> str:
    """Return the version of the CUDA toolkit, `13.0.88` or `12.6`; empty if the cubin lacks it."""
    match = _RELEASE.search(_read_note(cubin, TOOLS_NOTE))
    if match is not None:
        return match[1].decode()
    number = 0
    note = _read_note(cubin, NUMBER_NOTE)
    if len(note) >= _CUINFO.size:
        _, _, _, owner, _, _, told, _ = _CUINFO.unpack_from(note)
        number = told if owner == _OWNER and told in _KNOWN else 0
    number = number or _read_kernels_toolkit(cubin)
    return f"{number // 10}.{number % 10}" if number else ""


def _read_note(cubin: Cubin, name: str) -> bytes:
    if _size(cubin.sections.get(name)) <= MAX_NOTE:
        with suppress(FatbinError):
            return cubin.contents(name)
    return b""


def _read_kernels_toolkit(cubin: Cubin) -> int:
    """Return the toolkit, 130 for 13.0, from the attributes of the first kernels; 0 if unknown."""
    names = (name for name in cubin.sections if name.startswith(".nv.info."))
    for name in islice(names, _KERNELS):
        with suppress(FatbinError):  # the error is reported when the kernel is read
            for attribute, value in cubin.attributes(name):
                if attribute == EIATTR_CUDA_API_VERSION and len(value) == _WORD.size:
                    number: int = _WORD.unpack(value)[0]
                    if number in _KNOWN:
                        return number
    return 0


def _size(section: Section | None) -> int:
    return 0 if section is None else section.size


def _attributes(info: bytes, section: str) -> Iterator[tuple[int, bytes]]:
    place = 0
    while place + ATTRIBUTE.size <= len(info):
        form, attribute, size = ATTRIBUTE.unpack_from(info, place)
        place += ATTRIBUTE.size
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
        message = f"attribute in a cubin must have {form.size} bytes, got {len(value)}"
        raise FatbinError(message) from None
