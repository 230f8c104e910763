"""Unpacks one member of a zip archive piece by piece, for any compression ratio.

Python's zipfile bounds the output of stored and deflated members. For bzip2 and LZMA it unpacks a
whole piece, a thousand times its size, and allocates any dictionary that the member asks for.
"""

from __future__ import annotations

import bz2
import lzma
import zipfile
import zlib
from struct import Struct
from typing import TYPE_CHECKING, Final, Protocol

from ..errors import FatbinError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO

MAX_DICTIONARY: Final = 64 << 20  # of LZMA; its strongest preset uses as much

_CHUNK: Final = 1 << 20
_PACKED_CHUNK: Final = 1 << 16
_LOCAL: Final = Struct("<4s22xHH")  # signature, ..., bytes of name and of extra fields
_LZMA_HEAD: Final = Struct("<2xHBI")  # version, size of properties; lc, lp and pb; dictionary
_LZMA_PROPERTIES: Final = 5


class _Decoder(Protocol):
    @property
    def eof(self) -> bool: ...

    @property
    def needs_input(self) -> bool: ...

    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


def read_chunks(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Iterator[bytes]:
    """Yield the contents of a member and check them against its header.

    Raises:
        FatbinError: The LZMA dictionary is unreasonably large.
        zipfile.BadZipFile, zlib.error, lzma.LZMAError, OSError, EOFError: The member is damaged.
    """
    with archive.open(info) as member:  # compares both headers, and refuses encryption
        if info.compress_type not in {zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA}:
            while chunk := member.read(_CHUNK):
                yield chunk
            return
    checksum, left = 0, info.file_size
    for chunk in _decode(archive, info):
        checksum = zlib.crc32(chunk, checksum)
        left -= len(chunk)
        if left < 0:
            break
        yield chunk
    if left or checksum != info.CRC:
        message = f"it must unpack to {info.file_size} bytes with checksum {info.CRC:#010x}"
        raise zipfile.BadZipFile(message)


def _decode(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Iterator[bytes]:
    file = archive.fp
    if file is None:
        message = "the archive is closed"
        raise zipfile.BadZipFile(message)
    file.seek(info.header_offset)
    _, name, extra = _LOCAL.unpack(_read(file, _LOCAL.size))
    file.seek(name + extra, 1)
    left = info.compress_size
    decoder: _Decoder = bz2.BZ2Decompressor()
    if info.compress_type == zipfile.ZIP_LZMA:
        head = _read(file, _LZMA_HEAD.size)
        left -= len(head)
        decoder = _open_lzma(head)
    while not decoder.eof:
        packed = b""
        if decoder.needs_input:
            if left <= 0:
                return
            packed = _read(file, min(left, _PACKED_CHUNK))
            left -= len(packed)
        chunk = decoder.decompress(packed, _CHUNK)
        if chunk:
            yield chunk


def _open_lzma(head: bytes) -> lzma.LZMADecompressor:
    size, properties, dictionary = _LZMA_HEAD.unpack(head)
    if size != _LZMA_PROPERTIES:
        message = f"LZMA properties must have {_LZMA_PROPERTIES} bytes, got {size}"
        raise zipfile.BadZipFile(message)
    if dictionary > MAX_DICTIONARY:
        message = f"an LZMA dictionary must have at most {MAX_DICTIONARY} bytes, got {dictionary}"
        raise FatbinError(message)
    rest, lc = divmod(properties, 9)
    pb, lp = divmod(rest, 5)
    chain = {
        "id": lzma.FILTER_LZMA1,
        "dict_size": max(dictionary, 4096),
        "lc": lc,
        "lp": lp,
        "pb": pb,
    }
    return lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=[chain])


def _read(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        message = f"expected {size} bytes of a member, got {len(data)}"
        raise EOFError(message)
    return data
