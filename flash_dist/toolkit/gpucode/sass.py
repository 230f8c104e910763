"""What the bodies of kernels are made of: how long they are, and whether they only complain.

A kernel guarded by `__CUDA_ARCH__` exists for every target, but where it was compiled out its body
is empty or just prints, asserts or traps. NVIDIA documents neither opcodes nor attributes; those
below were found with NVIDIA's own disassembler on code for sm_75 to sm_121.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING

from ..binaries.budget import Budget
from ..errors import FatbinError
from .cubin import PTX_ENTRY, Cubin, Symbol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..targets.archs import Arch

MAX_SCANNED_BYTES = 1024  # with its padding, a stub is shorter; longer bodies are not looked at
WORD_SIZE = 16
FIRST_WITH_WORDS = 70  # older SASS is packed differently

EIATTR_EXTERNS = 0x0F  # symbols of the functions that a kernel calls
PRINT, ASSERT = "vprintf", "__assertfail"

_SYMBOL_INDEX = Struct("<I")
_FORMLESS = 0x1FF  # the upper three bits of an opcode tell what kind the operands are
_NOP, _BRA, _TRAP = 0x918, 0x947, 0x95C
_CALLS = frozenset((0x143, 0x144))
# LD LDG ST STG ATOM ATOM.CAS RED REDG ATOMG ATOMG.CAS LDGSTS UTMALDG UTMASTG
_MEMORY = frozenset(
    (0x180, 0x181, 0x185, 0x186, 0x18A, 0x18B, 0x18E, 0x1A6, 0x1A8, 0x1A9, 0x1AE, 0x1B4, 0x1B5)
)

# NOTE: each begins with a letter of its own, so that re passes over all others at once.
_PTX_NOISE = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?(?:\*/|\Z)|\.loc\b[^\n]*', re.DOTALL)
_PTX_BRACE = re.compile(r"[{}]")
_PTX_BODY_START = re.compile(r"[{;]")
_PTX_DIRECTIVE = re.compile(r"(?:^|[{};])\s*\.[^;{}]*(?=;)")
_PTX_CALL = re.compile(r"\bcall\b")
_PTX_TRAP = re.compile(r"\btrap\s*;")
_PTX_MEMORY = re.compile(r"\b(?:ld|ldu|st|atom|red|cp)\.(?!param|local|const|shared)")


@dataclass(frozen=True)
class Body:
    """The body of one kernel for one target. The flags are of short bodies only."""

    name: str
    instructions: int  # of PTX statements; of old SASS, and where it is long, bytes / 16
    prints: bool = False
    asserts: bool = False
    traps: bool = False
    calls: bool = False  # another function, so that its length tells little
    uses_memory: bool = False  # global memory, without which nothing comes in or out
    counted: bool = True  # False: old SASS, of which nothing but the length is known


def read_cubin_bodies(data: bytes, arch: Arch, budget: Budget | None = None) -> tuple[Body, ...]:
    """Return the bodies of a cubin's kernels in the order of its symbols."""
    cubin = Cubin(data, budget)
    if arch.number < FIRST_WITH_WORDS:
        return tuple(
            Body(symbol.name, symbol.size // WORD_SIZE, counted=False) for symbol in cubin.kernels()
        )
    return tuple(_read_body(cubin, symbol) for symbol in cubin.kernels())


def _read_body(cubin: Cubin, symbol: Symbol) -> Body:
    if symbol.size > MAX_SCANNED_BYTES:
        return Body(symbol.name, symbol.size // WORD_SIZE)
    code = cubin.contents(f".text.{symbol.name}")[symbol.value :][: symbol.size]
    if len(code) < symbol.size or symbol.size % WORD_SIZE:
        message = f"code of `{symbol.name}` is invalid: {len(code)} of {symbol.size} bytes"
        raise FatbinError(message)
    words = list(zip(code[::WORD_SIZE], code[1::WORD_SIZE], strict=True))
    used = {_opcode(word) for word in set(words)}  # NOTE: few differ; millions of words are read
    formless = {opcode & _FORMLESS for opcode in used}
    externs = _externs(cubin, symbol.name)
    return Body(
        symbol.name,
        _effective_length(words),
        prints=PRINT in externs,
        asserts=ASSERT in externs,
        traps=_TRAP in used,
        calls=not _CALLS.isdisjoint(formless),
        uses_memory=not _MEMORY.isdisjoint(formless),
    )


def _opcode(word: tuple[int, int]) -> int:
    """Return the lower 12 bits of a word from its first two bytes; the next four are predicate."""
    low, high = word
    return low | (high & 0xF) << 8


def _effective_length(words: list[tuple[int, int]]) -> int:
    """Count up to the padding: NOPs, and the branch to itself before them."""
    length = len(words)
    while length and _opcode(words[length - 1]) == _NOP:
        length -= 1
    return length - 1 if length and _opcode(words[length - 1]) == _BRA else length


def _externs(cubin: Cubin, name: str) -> set[str]:
    found: set[str] = set()
    for attribute, value in cubin.attributes(f".nv.info.{name}"):
        if attribute == EIATTR_EXTERNS and len(value) % _SYMBOL_INDEX.size == 0:
            found.update(cubin.name(index) for (index,) in _SYMBOL_INDEX.iter_unpack(value))
    return found


def read_ptx_bodies(text: bytes, budget: Budget | None = None) -> tuple[Body, ...]:
    """Return the bodies of a PTX text's entry points in their order."""
    budget = budget or Budget(len(text))
    bodies: dict[str, Body] = {}
    for name, body in ptx_texts(text):
        budget.spend("kernels")
        bodies.setdefault(name, _describe_ptx(name, body))
    return tuple(bodies.values())


def ptx_texts(text: bytes) -> Iterator[tuple[str, str]]:
    """Walk the entry points that have a body: name, and text without comments and strings."""
    source = _PTX_NOISE.sub(" ", text.decode("utf-8", "backslashreplace"))
    place = 0
    while (entry := PTX_ENTRY.search(source, place)) is not None:
        start = _PTX_BODY_START.search(source, entry.end())
        if start is None:
            return
        place = start.end()
        if start[0] == "{":
            end = _closing_brace(source, start.start(), entry[1])
            yield entry[1], source[place:end]
            place = end


def _closing_brace(source: str, start: int, name: str) -> int:
    """Find the brace that ends a body; call sequences and vectors have their own inside."""
    depth = 0
    for brace in _PTX_BRACE.finditer(source, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
    message = f"PTX of `{name}` ends within its body"
    raise FatbinError(message)


def _describe_ptx(name: str, body: str) -> Body:
    statements = body.count(";") - len(_PTX_DIRECTIVE.findall(body))
    return Body(
        name,
        statements,
        prints=PRINT in body,
        asserts=ASSERT in body,
        traps=_PTX_TRAP.search(body) is not None,
        calls=_PTX_CALL.search(body) is not None,
        uses_memory=_PTX_MEMORY.search(body) is not None,
    )
