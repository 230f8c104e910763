"""Interprets the header of each image in a container.

An entry is a header of 64 bytes or more and a payload: a cubin, PTX text or LTO-IR. NVIDIA does not
publish the layout of the header. We found it by building images for 22 targets and comparing with
NVIDIA's tools. The layout is not a stable ABI: an entry with unexpected values gets the kind
`unknown`, and its numbers are kept as they are in the file.

An entry of kind 256 holds several images in one compressed stream: `fatbinary --concat` of CUDA
13.4 and newer writes such entries. Their header ends with a table: the number of images, the size
of the table, and a record for each image. A record has the layout of an entry's header, but
`header_size` holds the offset of the image in the unpacked stream.
"""

from __future__ import annotations

from dataclasses import replace
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from ...binaries.view import FileView, unpack
from ...errors import FatbinError
from ...targets.archs import Arch
from ..image_target import read_accelerated
from ..images import FatbinEntry, Kind, Stream

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...binaries.codecs import Codec

MAX_IDENTIFIER: Final = 4096

CONCATENATED: Final = 256
COST: Final = 4  # an image in a stream counts as four, because a few bytes can hold many images

FORM: Final = Struct("<HHIQIIHHIIIQQQ")
_TABLE: Final = Struct("<II")  # number of images, size of the table including these two
_OPTIONS: Final = Struct("<II")  # offset in the header, and length
_VERSION: Final = 0x0101
_KINDS: Final[dict[int, Kind]] = {1: "ptx", 2: "sass", 8: "lto"}
_NUMBERS: Final = range(10, 1000)

_LZ4, _ZSTD = 0x2000, 0x8000
_SUFFIX_A, _SUFFIX_F = 0x100000, 0x200000
_SUFFIXES: Final = {0: "", _SUFFIX_A: "a", _SUFFIX_F: "f"}
_CODECS: Final[dict[int, Codec]] = {_LZ4: "lz4", _ZSTD: "zstd"}
_BINARY_OPTIONS: Final = 0x1000000  # the options are a text and a copy of `.nv.compat`
# The other known flags: 64-bit, debug, producer (2 bits), host system (3 bits), LTO-IR.
_OTHER_FLAGS: Final = _BINARY_OPTIONS | 0x1007F
_NAMES: Final = {128: " (CUDA Tile IR)", CONCATENATED: " (several images in one stream)"}
_KNOWN_FLAGS: Final = _OTHER_FLAGS | _LZ4 | _ZSTD | _SUFFIX_A | _SUFFIX_F


class Header(NamedTuple):
    """The first 64 bytes of an entry."""

    kind: int
    version: int
    header_size: int
    payload_size: int  # padded to a multiple of 8
    compressed_size: int  # 0: not compressed
    options_offset: int
    isa_minor: int  # of the PTX ISA, or of the code version of a cubin
    isa_major: int
    number: int  # number of the target: 90 for sm_90a
    name_offset: int
    name_size: int
    flags: int
    key: int  # for LTO-IR; not used here
    uncompressed_size: int

    @property
    def size(self) -> int:
        """Number of bytes from this entry to the next one."""
        return self.header_size + self.payload_size

    @property
    def is_image(self) -> bool:
        """Tell if version and kind are known."""
        return self.version == _VERSION and self.kind in _KINDS

    def interpret(self) -> tuple[Kind, Arch | None, Codec]:
        """Return kind, target and codec. Kind or codec is `unknown` for unexpected values.

        The target is None unless the kind is `sass` or `ptx`.
        """
        packing = self.flags & (_LZ4 | _ZSTD)
        codec: Codec = _CODECS.get(packing, "unknown") if self.compressed_size else "none"
        kind = _KINDS.get(self.kind, "unknown")
        suffix = _SUFFIXES.get(self.flags & (_SUFFIX_A | _SUFFIX_F))
        if self.version != _VERSION or suffix is None or self.number not in _NUMBERS:
            kind = "unknown"
        if suffix is None or kind not in {"sass", "ptx"}:
            return kind, None, codec
        return kind, Arch(self.number // 10, self.number % 10, suffix, ptx=kind == "ptx"), codec


def read_header(data: FileView, place: int, end: int) -> Header:
    """Read the header of the entry at an offset.

    Raises:
        FatbinError: The entry does not end before `end`, or its sizes contradict each other.
    """
    raw = Header._make(unpack_within(FORM, data, place, end))
    fits = place + raw.size <= end
    if raw.header_size < FORM.size or raw.compressed_size > raw.payload_size or not fits:
        message = f"image of {raw.header_size} + {raw.payload_size} bytes does not fit"
        raise FatbinError(message)
    return raw


def make_entry(  # noqa: PLR0913 - four say where it is
    data: FileView,
    place: int,
    raw: Header,
    *,
    section: str,
    container: int,
    stream: Stream | None = None,
) -> FatbinEntry:
    """Return an image as plain values.

    Args:
        data: The file.
        place: Offset of the header, or of the record in a stream's table.
        raw: The header or record.
        section: Name of the section.
        container: Number of the container.
        stream: The stream that contains the image, if any.
    """
    kind, arch, codec = raw.interpret()
    version = raw.isa_major, raw.isa_minor
    claimed = str(arch) if kind == "sass" else ""
    if arch is not None and claimed and _is_accelerated(data, place, raw):
        arch = replace(arch, suffix="a")
    packed, unpacked = raw.compressed_size or raw.payload_size, raw.payload_size
    if stream is not None:
        codec, packed = stream.codec, stream.packed * unpacked // max(stream.unpacked, 1)
    elif raw.compressed_size:
        unpacked = raw.uncompressed_size
    return FatbinEntry(
        kind=kind,
        arch=arch,
        codec=codec,
        ptx_isa=version if kind == "ptx" else None,
        payload_offset=stream.offset if stream else place + raw.header_size,
        compressed_size=packed,
        uncompressed_size=unpacked,
        section=section,
        container=container,
        identifier=_read_identifier(data, place, raw),
        raw_kind=raw.kind,
        raw_version=raw.version,
        raw_number=raw.number,
        raw_flags=raw.flags,
        code_version=version if kind == "sass" else None,
        claimed=claimed,
        stream=stream._replace(start=raw.header_size) if stream else None,
    )


def describe_doubt(entry: FatbinEntry) -> str:
    """Describe an entry with an unknown kind, codec or flag; empty for any other entry."""
    if "unknown" not in {entry.kind, entry.codec} and not entry.raw_flags & ~_KNOWN_FLAGS:
        return ""
    name = _NAMES.get(entry.raw_kind, "")
    return (
        f"image of kind {entry.raw_kind}{name}, version {entry.raw_version:#x}, "
        f"number {entry.raw_number}, flags {entry.raw_flags:#x} is not fully understood"
    )


def read_members(
    data: FileView, place: int, raw: Header, *, section: str, container: int
) -> Iterator[FatbinEntry]:
    """Yield the images in the stream of the entry at an offset.

    Raises:
        FatbinError: An image is of unknown kind, or the table is malformed. The error may come
            after all images were yielded.
    """
    _, _, codec = raw.interpret()
    stream = Stream(place + raw.header_size, raw.compressed_size, raw.uncompressed_size, codec)
    for at, record in _walk_table(data, place, raw):
        entry = make_entry(data, at, record, section=section, container=container, stream=stream)
        if entry.kind == "unknown":
            message = f"a stream holds an image of kind {record.kind}, version {record.version:#x}"
            raise FatbinError(message)
        yield entry


def _walk_table(data: FileView, place: int, raw: Header) -> Iterator[tuple[int, Header]]:
    """Yield the offset and the values of each record of the table."""
    start = place + raw.options_offset
    end = place + raw.header_size
    if not raw.compressed_size or not FORM.size <= raw.options_offset <= raw.header_size - 8:
        message = "a stream of images has no table"
        raise FatbinError(message)
    count, size = unpack(_TABLE, data, start)
    at, unpacked = start + _TABLE.size, 0
    for _ in range(count):
        if at + FORM.size > end:
            break
        record = Header._make(unpack(FORM, data, at))
        if record.header_size != unpacked:  # in a stream, header_size is the offset of the image
            break
        yield at, record
        unpacked += record.payload_size
        at += _measure_header(data, at, record, end)
    if at != start + size or at > end or unpacked != raw.uncompressed_size or not count:
        message = f"the table of a stream of {count} images is invalid"
        raise FatbinError(message)


def _measure_header(data: FileView, place: int, raw: Header, end: int) -> int:
    """Compute the length of a table record from its offsets, because it has no length field."""
    size = max(FORM.size, raw.name_offset + raw.name_size if raw.name_size else 0)
    if raw.options_offset:
        start, length = unpack_within(_OPTIONS, data, place + raw.options_offset, end)
        size = max(size, start + length + 1)
    size += -size % 8
    if place + size > end:
        message = f"header of {size} bytes does not fit"
        raise FatbinError(message)
    return size


def _is_accelerated(data: FileView, place: int, raw: Header) -> bool:
    """Tell if code is for one chip only, from the copy of the cubin's attributes in its header."""
    if not raw.flags & _BINARY_OPTIONS or not raw.options_offset:
        return False
    start = place + raw.options_offset
    offset, size = _OPTIONS.unpack(data[start : start + _OPTIONS.size].ljust(_OPTIONS.size, b"\0"))
    text = data[place + offset : place + offset + min(size, MAX_IDENTIFIER) + 1]
    return bool(read_accelerated(text.partition(b"\0")[2]))


def unpack_within(form: Struct, data: FileView, place: int, end: int) -> tuple[int, ...]:
    """Unpack the values at an offset.

    Raises:
        FatbinError: The values do not fit before `end`.
    """
    if place + form.size > end:
        message = f"a header needs {form.size} bytes, got {end - place}"
        raise FatbinError(message)
    return unpack(form, data, place)


def _read_identifier(data: FileView, place: int, raw: Header) -> str:
    """Return the source file's name, which nvcc -g or -lineinfo records; empty if absent."""
    fits = raw.name_offset + raw.name_size <= raw.header_size
    if not fits or not 0 < raw.name_size <= MAX_IDENTIFIER:
        return ""
    start = place + raw.name_offset
    text = data[start : start + raw.name_size]
    return text.rstrip(b"\0").decode("utf-8", "backslashreplace")
