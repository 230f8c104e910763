"""Makes ELF files, cubins and fat binaries byte by byte, for tests without a compiler."""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if sys.version_info >= (3, 14):
    from compression import zstd as zstd  # noqa: PLC0414  (tests import it from here)
else:
    from backports import zstd as zstd  # noqa: PLC0414

if TYPE_CHECKING:
    from collections.abc import Callable

PTX, SASS, LTO, TILE, STREAM = 1, 2, 8, 128, 256
FLAG_64BIT, FLAG_LZ4, FLAG_ZSTD, FLAG_BINARY = 0x1, 0x2000, 0x8000, 0x1000000
FLAG_SUFFIX = {"": 0, "a": 0x100000, "f": 0x200000}
PROGBITS, SYMTAB, STRTAB, NOBITS = 1, 2, 3, 8
X86_64, CUDA = 62, 190
FOR_ONE_CHIP = struct.pack("<BBHBBH", 2, 9, 1, 2, 12, 0)  # attributes of `.nv.compat`


def pad(data: bytes, size: int = 8) -> bytes:
    return data + bytes(-len(data) % size)


# --- ELF ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Data for one section of an ELF file."""

    name: str
    data: bytes
    kind: int = PROGBITS
    link: int = 0
    flags: int = 0
    address: int = 0


def elf(
    parts: list[Part],
    machine: int = X86_64,
    *,
    ident: bytes = b"\x7fELF\x02\x01\x01",
    flags: int = 0,
    segments: int = 0,
) -> bytes:
    """Lay out header, data, section table. Part number n becomes section n + 1.

    The first part may begin with program headers, which follow the header: pass their number.
    """
    names = b"\0" + b"".join(part.name.encode() + b"\0" for part in parts) + b".shstrtab\0"
    everything = [*parts, Part(".shstrtab", names, STRTAB)]
    body, headers = b"", [bytes(64)]
    name = 1
    for part in everything:
        stored = b"" if part.kind == NOBITS else part.data
        place = 64 + len(body)
        headers.append(
            struct.pack(
                "<IIQQQQIIQQ",
                *(name, part.kind, part.flags, part.address, place, len(part.data)),
                *(part.link, 0, 8, 0),
            )
        )
        name += len(part.name) + 1
        body += pad(stored)
    header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        *(ident, 3, machine, 1, 0, 64 if segments else 0, 64 + len(body), flags),
        *(64, 56 if segments else 0, segments, 64, len(headers), len(headers) - 1),
    )
    return header + body + b"".join(headers)


def library(
    linked: bytes | None = None,
    relocatable: bytes | None = None,
    *,
    wrappers: int | None = None,
    extra: tuple[Part, ...] = (),
) -> bytes:
    """Make a host library with these containers."""
    parts = [Part(".text", b"\xc3" * 16), *extra]
    if relocatable is not None:
        parts.append(Part("__nv_relfatbin", relocatable))
    if linked is not None:
        parts.append(Part(".nv_fatbin", linked))
    if wrappers is not None:
        parts.append(Part(".nvFatBinSegment", bytes(24 * wrappers)))
    return elf(parts)


# --- cubin ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """Data for one kernel of a cubin."""

    name: str
    registers: int = 32
    stack: int = 0
    smem: int = 0
    max_threads: tuple[int, int, int] | None = None
    code: bytes = field(default=bytes(128))
    entry: bool = True  # False: a device function, not a kernel
    externs: tuple[str, ...] = ()  # functions it calls
    cuda: int = 0  # toolkit attribute, e.g. 130
    constant: int = 0
    local: int = 0


def attribute(number: int, value: bytes, form: int = 4) -> bytes:
    """Encode one `.nv.info` attribute."""
    return struct.pack("<BBH", form, number, len(value)) + pad(value, 4)


def cubin(
    *kernels: Kernel, info: bytes = b"", symbols: bytes = b"", more: tuple[Part, ...] = ()
) -> bytes:
    """Make a cubin; `info` and `symbols` are appended to `.nv.info` and `.symtab`."""
    externs = list(dict.fromkeys(name for kernel in kernels for name in kernel.externs))
    names = [*(kernel.name for kernel in kernels), *externs]
    numbers = {name: number for number, name in enumerate(externs, start=1 + len(kernels))}
    strings = b"\0" + b"".join(name.encode() + b"\0" for name in names)
    table, resources = bytes(24), attribute(0x37, bytes(4))
    place = 1
    parts: list[Part] = []
    for index, kernel in enumerate(kernels, start=1):
        other = 0x10 if kernel.entry else 0
        table += struct.pack("<IBBHQQ", place, 0x12, other, 4 + len(parts), 0, len(kernel.code))
        place += len(kernel.name) + 1
        resources += attribute(0x2F, struct.pack("<II", index, kernel.registers))
        resources += attribute(0x12, struct.pack("<II", index, kernel.stack))
        parts += _kernel_parts(kernel, numbers)
    for name in externs:
        table += struct.pack("<IBBHQQ", place, 0x12, 0, 0, 0, 0)
        place += len(name) + 1
    head = [
        Part(".strtab", strings, STRTAB),
        Part(".symtab", table + symbols, SYMTAB, link=1),
        Part(".nv.info", resources + info, 0x70000000),
    ]
    return elf([*head, *parts, *more], CUDA)


def _kernel_parts(kernel: Kernel, numbers: dict[str, int]) -> list[Part]:
    parts = [Part(f".text.{kernel.name}", kernel.code)]
    own = attribute(0x1B, b"\xff\0", form=3)[:4]  # stored in place: MAXREG_COUNT
    if kernel.cuda:
        own += attribute(0x37, struct.pack("<I", kernel.cuda))
    if kernel.max_threads is not None:
        own += attribute(0x05, struct.pack("<III", *kernel.max_threads))
    if kernel.externs:
        called = (numbers[name] for name in kernel.externs)
        own += attribute(0x0F, struct.pack(f"<{len(kernel.externs)}I", *called))
    parts.append(Part(f".nv.info.{kernel.name}", own, 0x70000000))
    if kernel.constant:
        parts.append(Part(f".nv.constant0.{kernel.name}", bytes(kernel.constant)))
    if kernel.local:
        parts.append(Part(f".nv.local.{kernel.name}", bytes(kernel.local), NOBITS))
    if kernel.smem:
        parts.append(Part(f".nv.shared.{kernel.name}", bytes(kernel.smem), NOBITS))
    return parts


def ptx(*names: str, target: str = "sm_80", version: str = "9.0") -> bytes:
    """Write PTX like nvcc's, as far as names matter."""
    head = f".version {version}\n.target {target}\n.address_size 64\n\n"
    entries = "".join(
        f"\t// .globl\t{name}\n.visible .entry {name}(\n\t.param .u64 {name}_param_0\n)\n"
        "{\n\tret;\n\n}\n"
        for name in names
    )
    return (head + entries).encode() + b"\0"


# --- fat binary -----------------------------------------------------------------------------------


def lz4_literals(data: bytes) -> bytes:
    """Encode as one LZ4 sequence of literals."""
    if len(data) < 15:
        return bytes([len(data) << 4]) + data
    rest = len(data) - 15
    return b"\xf0" + b"\xff" * (rest // 255) + bytes([rest % 255]) + data


def entry(  # noqa: PLR0913  (one argument per field that a test bends)
    kind: int,
    number: int,
    payload: bytes,
    *,
    suffix: str = "",
    codec: str = "none",
    isa: tuple[int, int] = (9, 0),
    flags: int = FLAG_64BIT,
    version: int = 0x0101,
    header_size: int = 64,
    declared: int | None = None,
    packed_size: int | None = None,
    payload_size: int | None = None,
    identifier: bytes = b"",
    compat: bytes = b"",
) -> bytes:
    """Make one entry; `declared` falsifies the unpacked size, `payload_size` the packed one.

    Args:
        compat: The header's copy of the cubin's `.nv.compat`, after an empty text.
    """
    packers: dict[str, Callable[[bytes], bytes]] = {"lz4": lz4_literals, "zstd": zstd.compress}
    packed = packers[codec](payload) if codec in packers else payload
    flags |= {"none": 0, "lz4": FLAG_LZ4, "zstd": FLAG_ZSTD}[codec] | FLAG_SUFFIX[suffix]
    is_packed = codec != "none"
    options = pad(identifier)
    options_at = header_size + len(options) if compat else 0
    if compat:
        flags |= FLAG_BINARY
        options = pad(options + struct.pack("<II", options_at + 8, len(compat)) + b"\0" + compat)
    body = pad(packed)
    header = struct.pack(
        "<HHIQIIHHIIIQQQ",
        *(kind, version, header_size + len(options)),
        len(body) if payload_size is None else payload_size,
        (len(packed) if packed_size is None else packed_size) if is_packed else 0,
        *(options_at, isa[1], isa[0], number),
        *((header_size, len(identifier)) if identifier else (0, 0)),
        *(flags, 0),
        (len(payload) if declared is None else declared) if is_packed else 0,
    )
    return header.ljust(header_size, b"\0") + options + body


def stream(*images: bytes, codec: str = "zstd", table: bytes | None = None) -> bytes:
    """Put the images of stored entries into one entry of kind 256, like `fatbinary --concat`."""
    records, whole = b"", b""
    for image in images:
        size, payload_size = struct.unpack_from("<IQ", image, 4)
        records += image[:4] + struct.pack("<I", len(whole)) + image[8:size]
        whole += image[size : size + payload_size]
    if table is None:
        table = struct.pack("<II", len(images), 8 + len(records)) + records
    packed = zstd.compress(whole) if codec == "zstd" else lz4_literals(whole)
    flags = FLAG_64BIT | (FLAG_ZSTD if codec == "zstd" else FLAG_LZ4)
    header = struct.pack(
        "<HHIQIIHHIIIQQQ",
        *(STREAM, 0x0101, 64 + len(table), len(pad(packed)), len(packed), 64),
        *(1, 0, 0, 0, 0, flags, 0, len(whole)),
    )
    return header + table + pad(packed)


def container(*entries: bytes, version: int = 1, size: int | None = None) -> bytes:
    """Return a container that holds the entries."""
    body = b"".join(entries)
    size = len(body) if size is None else size
    return struct.pack("<IHHQ", 0xBA55ED50, version, 16, size) + body
