"""Measures the bodies of kernels: their length, and whether they only report an error.

A kernel guarded by `__CUDA_ARCH__` exists for every target. Where its code was compiled out, the
body is empty, or only prints, asserts or traps. NVIDIA documents neither opcodes nor attributes;
the numbers below were found with NVIDIA's own disassembler on code for sm_75 to sm_121.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING

from ..binaries.budget import Budget
from ..errors import FatbinError
from .cubin import (
    END_COST,
    MATCH_COST,
    PTX_ENTRY,
    STEP_COST,
    Cubin,
    Symbol,
    find_ptx_entry,
    ptx_name,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..targets.archs import Arch

MAX_SCANNED_BYTES = 1024  # stubs are shorter, including padding; longer bodies are not examined
WORD_SIZE = 16
MAX_SCANNED_STATEMENTS = MAX_SCANNED_BYTES // WORD_SIZE
FIRST_WITH_WORDS = 70  # older SASS is encoded differently

EIATTR_EXTERNS = 0x0F  # symbols of the functions that a kernel calls
PRINT, ASSERT = "vprintf", "__assertfail"

_SYMBOL_INDEX = Struct("<I")
_FORMLESS = 0x1FF  # clears the upper three bits of an opcode, which encode operand kinds
_NOP, _BRA, _TRAP = 0x918, 0x947, 0x95C
_CALLS = frozenset((0x143, 0x144))
# LD LDG ST STG ATOM ATOM.CAS RED REDG ATOMG ATOMG.CAS LDGSTS UTMALDG UTMASTG
_MEMORY = frozenset(
    (0x180, 0x181, 0x185, 0x186, 0x18A, 0x18B, 0x18E, 0x1A6, 0x1A8, 0x1A9, 0x1AE, 0x1B4, 0x1B5)
)

_AFTER_NO_WORD, _NO_WORD = rb"(?<![\w\x80-\xff])", rb"(?![\w\x80-\xff])"
# NOTE: re finds a single byte ten times as fast as a set of bytes, so this byte is put before every
# possible string, comment or `.loc` line.
_MARK = b"\1"
_STRING, _COMMENT, _LINE, _BLOCK = b'"', b"//", b".loc", b"/*"
_PTX_NOISE = re.compile(rb'\x01(?:"[^"\n]*"|//[^\n]*|\.loc%b[^\n]*)' % _NO_WORD)
_PTX_NOISE_OR_BLOCK = re.compile(rb'"[^"\n]*"|//[^\n]*|\x01\.loc%b[^\n]*|/\*' % _NO_WORD)

_ALL_BYTES = bytes(range(256))
_PTX_BRACE = re.compile(rb"[{}]")
_PTX_BODY_START = re.compile(rb"[{;]")
_NO_BRACES = _ALL_BYTES.translate(None, b"{}")
_BRACES_AT_ONCE = 4096  # bytes of a body that are searched in one step

_WHITESPACE = b" \t\n\r\f\v"
_ONE_BRACE = bytes.maketrans(b"}" + _MARK, b"{ ")
_NO_ENDS = _ALL_BYTES.translate(None, b"{;" + _MARK)

_PTX_TRAP = re.compile(_AFTER_NO_WORD + rb"trap\s*;")
_PTX_CALL = re.compile(_AFTER_NO_WORD + rb"call" + _NO_WORD)
_PTX_MEMORY = re.compile(_AFTER_NO_WORD + rb"(?:ldu?|st|atom|red|cp)\.(?!param|local|const|shared)")
_MEMORY_OPCODES = (b"ld", b"st.", b"atom.", b"red.", b"cp.")


@dataclass(frozen=True)
class Body:
    """The body of a kernel for one target. Only short bodies have `prints` to `uses_memory` set."""

    name: str
    instructions: int  # PTX: statements; old or long SASS: bytes / 16
    prints: bool = False
    asserts: bool = False
    traps: bool = False
    calls: bool = False  # the kernel calls a function, so its length says little
    uses_memory: bool = False  # accesses memory, as every real kernel does
    counted: bool = True  # False: old SASS, of which only the bytes are known


def read_cubin_bodies(data: bytes, arch: Arch, budget: Budget | None = None) -> tuple[Body, ...]:
    """Return the bodies of a cubin's kernels, in the order of its symbol table."""
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
    used = {_opcode(word) for word in set(words)}  # NOTE: a set, as most words repeat
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
    """Return the opcode, the lower 12 of the 16 bits in a word's first two bytes."""
    low, high = word
    return low | (high & 0xF) << 8


def _effective_length(words: list[tuple[int, int]]) -> int:
    """Count the instructions before the padding: a branch to itself, then NOPs."""
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
    """Return the bodies of a PTX text's entry points, in order."""
    budget = budget or Budget(len(text))
    bodies: dict[str, Body] = {}
    for name, body in _walk_ptx(text, budget):
        if name not in bodies:
            bodies[name] = _describe_ptx(name, body, budget)
    return tuple(bodies.values())


def ptx_texts(text: bytes) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each entry point with a body, without comments, strings and `.loc`."""
    for name, body in _walk_ptx(text, Budget(len(text))):
        yield name, body.decode("utf-8", "backslashreplace")


def _walk_ptx(text: bytes, budget: Budget) -> Iterator[tuple[str, bytes]]:
    if PTX_ENTRY not in text:
        return
    source = _without_noise(text, budget)
    budget.spend("searched", source.count(PTX_ENTRY) * STEP_COST)
    place = 0
    while (entry := find_ptx_entry(source, place)) is not None:
        budget.spend("kernels")
        start = _PTX_BODY_START.search(source, entry.end())
        if start is None:
            return
        place = start.end()
        if start[0] == b"{":
            end = _closing_brace(source, place, ptx_name(entry), budget)
            yield ptx_name(entry), source[place:end]
            place = end


def _without_noise(text: bytes, budget: Budget) -> bytes:
    """Replace each string, comment and `.loc` line with a space."""
    kinds = [start for start in (_STRING, _COMMENT, _LINE, _BLOCK) if start in text]
    if not kinds:
        return text
    starts = sum(map(text.count, kinds))
    marked = text.replace(_MARK, b" ")
    if _BLOCK in kinds:
        budget.spend("searched", starts * STEP_COST)
        left = _without_blocks(marked.replace(_LINE, _MARK + _LINE))
    else:
        budget.spend("searched", starts * MATCH_COST)
        for start in kinds:
            marked = marked.replace(start, _MARK + start)
        left = _PTX_NOISE.sub(b" ", marked)
    return left.replace(_MARK, b"")


def _without_blocks(marked: bytes) -> bytes:
    """Do the same as `_without_noise` for a text with `/*` comments, which no compiler writes.

    NOTE: `bytes.find` finds the ends of these comments faster than any pattern.
    """
    kept: list[bytes] = []
    place = 0
    while (noise := _PTX_NOISE_OR_BLOCK.search(marked, place)) is not None:
        kept.append(marked[place : noise.start()])
        place = noise.end()
        if noise[0] == _BLOCK:
            end = marked.find(b"*/", place)
            place = len(marked) if end < 0 else end + len(b"*/")
    return b" ".join((*kept, marked[place:]))


def _closing_brace(source: bytes, start: int, name: str, budget: Budget) -> int:
    """Return the offset of the brace that ends a body; call sequences and vectors nest braces."""
    depth = 1
    for place in range(start, len(source), _BRACES_AT_ONCE):
        braces = source[place : place + _BRACES_AT_ONCE].translate(None, _NO_BRACES)
        budget.spend("searched", len(braces) * END_COST)
        unpaired = braces.replace(b"{}", b"").replace(b"{}", b"")
        if unpaired.count(b"}") < depth:  # the body cannot end here
            depth += 2 * unpaired.count(b"{") - len(unpaired)
            continue
        budget.spend("searched", len(braces) * STEP_COST)
        for brace in _PTX_BRACE.finditer(source, place, place + _BRACES_AT_ONCE):
            depth += 1 if brace[0] == b"{" else -1
            if depth == 0:
                return brace.start()
    message = f"PTX of `{name}` ends within its body"
    raise FatbinError(message)


def _describe_ptx(name: str, body: bytes, budget: Budget) -> Body:
    semicolons = body.count(b";")
    budget.spend("searched", semicolons * END_COST)
    statements = semicolons - _count_directives(body)
    if statements > MAX_SCANNED_STATEMENTS:
        return Body(name, statements)
    return Body(
        name,
        statements,
        prints=PRINT.encode() in body,
        asserts=ASSERT.encode() in body,
        traps=_has(body, b"trap", _PTX_TRAP, budget),
        calls=_has(body, b"call", _PTX_CALL, budget),
        uses_memory=any(_has(body, opcode, _PTX_MEMORY, budget) for opcode in _MEMORY_OPCODES),
    )


def _count_directives(body: bytes) -> int:
    """Count statements that begin with a dot and have no brace before their semicolon."""
    marked = b";" + body.translate(_ONE_BRACE, _WHITESPACE)
    for end in (b";", b"{"):
        marked = marked.replace(end + b".", end + _MARK)
    return marked.translate(None, _NO_ENDS).count(_MARK + b";")


def _has(body: bytes, word: bytes, pattern: re.Pattern[bytes], budget: Budget) -> bool:
    """Tell if a pattern, whose matches all begin with `word`, matches anywhere in a body."""
    places = body.count(word)
    budget.spend("searched", places * STEP_COST)
    end = 0
    for _ in range(places):
        place = body.find(word, end)
        if pattern.match(body, place) is not None:
            return True
        end = place + len(word)
    return False
