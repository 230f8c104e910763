"""Makes PE libraries and COFF objects byte by byte, for tests without Windows."""

from __future__ import annotations

import struct

X86_64, ARM64, I386 = 0x8664, 0xAA64, 0x14C
PE32, PE32_PLUS = 0x10B, 0x20B
FILE_ALIGNMENT = 512
PAGE = 4096
BASE = 0x180000000  # load address of a library
CODE, DATA, DISCARDED = 0x60000020, 0xC0000040, 0x42000040


def pe(
    *sections: tuple[str, bytes],
    machine: int = X86_64,
    kind: int = PE32_PLUS,
    virtual_sizes: dict[str, int] | None = None,
    flags: dict[str, int] | None = None,
) -> bytes:
    """Lay out DOS header, PE header, section table and data, padded like linkers' output."""
    dos = b"MZ".ljust(60, b"\0") + struct.pack("<I", 128) + bytes(64)
    option = struct.pack("<H22xQ", kind, BASE).ljust(240, b"\0")
    start = 128 + 4 + 20 + len(option) + 40 * len(sections)
    head, body = b"", bytes(-start % FILE_ALIGNMENT)
    for (name, data), address in zip(sections, addresses(*sections), strict=True):
        padded = data + bytes(-len(data) % FILE_ALIGNMENT)
        virtual = (virtual_sizes or {}).get(name, len(data))
        # NOTE: the linker cuts names to 8 bytes.
        short, place = name.encode()[:8], (len(padded), start + len(body))
        kept = (flags or {}).get(name, CODE if name == ".text" else DATA)
        head += _section(short, virtual, place, address=address - BASE, flags=kept)
        body += padded
    file = struct.pack("<HHIIIHH", machine, len(sections), 0, 0, 0, len(option), 0x2022)
    return dos + b"PE\0\0" + file + option + head + body


def addresses(*sections: tuple[str, bytes]) -> list[int]:
    """Return the address of each section in the loaded library: on separate pages."""
    found = [BASE + PAGE]
    for _, data in sections:
        found.append(found[-1] + max(1, -(-len(data) // PAGE)) * PAGE)
    return found[:-1]


def coff(*sections: tuple[str, bytes], machine: int = X86_64) -> bytes:
    """Lay out an object file: long names are in the string table after the symbols."""
    start = 20 + 40 * len(sections)
    head, body, names = b"", b"", b""
    for name, data in sections:
        raw = name.encode()
        if len(raw) > 8:
            raw, names = f"/{4 + len(names)}".encode(), names + raw + b"\0"
        head += _section(raw, 0, (len(data), start + len(body)))
        body += data
    file = struct.pack("<HHIIIHH", machine, len(sections), 0, start + len(body), 1, 0, 0)
    strings = struct.pack("<I", 4 + len(names)) + names
    return file + head + body + bytes(18) + strings


def _section(
    name: bytes, virtual: int, place: tuple[int, int], *, address: int = 0, flags: int = DATA
) -> bytes:
    """Return the header of a section; `place` is the size and offset of its bytes in the file."""
    return struct.pack("<8sIIIIIIHHI", name, virtual, address, *place, 0, 0, 0, 0, flags)
