"""Makes shared libraries byte by byte: the tables of the dynamic linker, and no code."""

from __future__ import annotations

import struct
from typing import Final

from flash_dist.toolkit.binaries.symbols import hash_name
from tests.unit.made.fatbin_builder import Part, elf

BASE: Final = 64 + 2 * 56  # the ELF header and two program headers


class _Strings:
    def __init__(self) -> None:
        self.data = b"\0"

    def add(self, name: str) -> int:
        self.data += name.encode() + b"\0"
        return len(self.data) - len(name) - 1


def make_shared(
    *,
    defined: tuple[str, ...] = ("provided",),
    undefined: str = "wanted",
    flags: int = 0,
    version: str = "NEEDED_1",
) -> bytes:
    """Return a library that needs a version of libneeded.so.1 and offers OWN_1.

    Args:
        defined: Its own symbols.
        undefined: The symbol that it needs, in that version.
        flags: Flags of the version; 2 for a weak need.
        version: Name of the version.
    """
    strings = _Strings()
    names = [strings.add(undefined), *map(strings.add, defined)]
    symbols = bytes(24) + b"".join(
        struct.pack("<IBBHQQ", name, 0x12, 0, 1 if index else 0, 0, 0)
        for index, name in enumerate(names)
    )
    needed, wanted, own = map(strings.add, ("libneeded.so.1", version, "OWN_1"))
    path = strings.add("$ORIGIN/libs:/opt/lib")
    tables = {
        6: symbols,
        0x6FFFFEF5: _make_hash(defined),
        0x6FFFFFF0: struct.pack(f"<{len(names) + 1}H", 0, 2, *(3 for _ in defined)),
        0x6FFFFFFE: struct.pack("<HHIII", 1, 1, needed, 16, 0)
        + struct.pack("<IHHII", 7, flags, 2, wanted, 0),
        0x6FFFFFFC: struct.pack("<HHHHIII", 1, 0, 3, 1, 7, 20, 0) + struct.pack("<II", own, 0),
        5: strings.data,
    }
    tags = [(1, needed), (14, own), (29, path), (10, len(strings.data))]
    numbers = struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 64, 0, 0)
    return b"\x7fELF\x02\x01\x01" + bytes(9) + numbers + _lay_out(tags, tables)


def make_linked(
    *,
    needed: tuple[str, ...] = (),
    path: tuple[str, ...] = (),
    exports: tuple[str, ...] = (),
    parts: tuple[Part, ...] = (),
) -> bytes:
    """Return a library with these names, and with sections that only other tools read."""
    strings = _Strings()
    tags = [*((1, strings.add(name)) for name in needed), *((29, strings.add(p)) for p in path)]
    symbols = bytes(24) + b"".join(
        struct.pack("<IBBHQQ", strings.add(name), 0x12, 0, 1, 0, 0) for name in exports
    )
    tables = {6: symbols, 5: strings.data}
    if exports:
        tables[0x6FFFFEF5] = _make_hash(exports, first=1)
    linked = _lay_out([*tags, (10, len(strings.data))], tables)
    return elf([Part(".dynamic", linked), *parts], segments=2)


def _lay_out(tags: list[tuple[int, int]], tables: dict[int, bytes]) -> bytes:
    """Return everything after the ELF header: program headers, dynamic section and tables."""
    tags, body = [*tags], b""
    dynamic_size = 16 * (len(tags) + len(tables) + 1)
    for tag, table in tables.items():
        tags.append((tag, BASE + dynamic_size + len(body)))
        body += table.ljust(-(-len(table) // 8) * 8, b"\0")
    dynamic = b"".join(struct.pack("<qQ", *tag) for tag in tags) + bytes(16)
    size = BASE + dynamic_size + len(body)
    load = struct.pack("<IIQQQQQQ", 1, 4, 0, 0, 0, size, size, 4096)
    found = struct.pack("<IIQQQQQQ", 2, 4, BASE, BASE, 0, dynamic_size, dynamic_size, 8)
    return load + found + dynamic + body


def _make_hash(defined: tuple[str, ...], first: int = 2) -> bytes:
    """Write one bucket with all names from a symbol on; its filter passes all."""
    values = [hash_name(name.encode()) & ~1 for name in defined]
    values[-1] |= 1
    return struct.pack("<IIIIQI", 1, first, 1, 0, 2**64 - 1, first) + struct.pack(
        f"<{len(values)}I", *values
    )
