"""Unpacks LZ4 blocks and zstd data of fat binaries and packages, in bounded memory.

Sources: the LZ4 block format description (lz4 project); Python's module `compression.zstd`.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Literal

from ..errors import AccessError, FatbinError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from .budget import Budget
    from .view import FileView

Codec = Literal["none", "lz4", "zstd", "unknown"]

MAX_IMAGE_BYTES = 1 << 30
MAX_RATIO = 2_000  # the largest ratio of a real image is 207; zstd of zeros reaches 32 000
WINDOW_LOG_MAX = 27

_HEAD_BYTES = 64
_PACKED_CHUNK, _UNPACKED_CHUNK = 1 << 16, 1 << 20
_LENGTH_CONTINUES = 255
_NIBBLE_FULL = 15
_MIN_MATCH = 4


def decompress(codec: Codec, data: bytes, size: int) -> bytes:
    """Unpack data, and check that it has exactly the declared size.

    Data of the codec `none` is returned as it is, unchecked.

    Raises:
        FatbinError: The codec is unknown, or the data is damaged, unpacks to another size, or is
            larger than any real image.
    """
    if codec == "none":
        return data
    most = min(MAX_IMAGE_BYTES, MAX_RATIO * len(data))
    if size > most:
        message = f"image of {len(data)} bytes must unpack to at most {most} bytes, got {size}"
        raise FatbinError(message)
    if codec == "lz4":
        unpacked = decompress_lz4_in_c(data, size)
    elif codec == "zstd":
        unpacked = decompress_zstd(data, size)
    else:
        message = "image has an unknown compression"
        raise FatbinError(message)
    if len(unpacked) != size:
        message = f"image declares {size} bytes unpacked, got {len(unpacked)}"
        raise FatbinError(message)
    return unpacked


def decompress_zstd(data: bytes, size: int) -> bytes:
    """Unpack one zstd frame, but no more than `size + 1` bytes of it."""
    zstd, options = _import_zstd()
    decoder = zstd.ZstdDecompressor(options=options)
    try:
        unpacked: bytes = decoder.decompress(data, max_length=size + 1)
    except (zstd.ZstdError, MemoryError) as error:
        message = f"broken zstd image: {error}"
        raise FatbinError(message) from error
    if not decoder.eof and len(unpacked) <= size:
        message = f"truncated zstd image: {len(unpacked)} of {size} bytes"
        raise FatbinError(message)
    return unpacked


def read_zstd_frame(
    data: FileView, budget: Budget, is_wanted: Callable[[bytes], bool]
) -> tuple[int, bytes]:
    """Unpack the first frame of some data, and return its packed length and its contents.

    Raises:
        FatbinError: The frame is damaged or too large, or `is_wanted` rejects its first 64 bytes.
    """
    zstd, options = _import_zstd()
    decoder = zstd.ZstdDecompressor(options=options)
    unpacked, place = bytearray(), 0
    try:
        while not decoder.eof:
            packed = data[place : place + _PACKED_CHUNK] if decoder.needs_input else b""
            if decoder.needs_input and not packed:
                break
            place += len(packed)
            is_known = len(unpacked) >= _HEAD_BYTES
            most = _UNPACKED_CHUNK if is_known else _HEAD_BYTES - len(unpacked)
            piece = decoder.decompress(packed, max_length=most)
            budget.spend("bytes", len(piece))
            unpacked += piece
            if len(unpacked) > min(MAX_IMAGE_BYTES, MAX_RATIO * place):
                break
            if not is_known and len(unpacked) >= _HEAD_BYTES and not is_wanted(bytes(unpacked)):
                message = "the zstd frame does not hold the expected data"
                raise FatbinError(message)
    except (zstd.ZstdError, MemoryError) as error:
        message = f"broken zstd frame: {error}"
        raise FatbinError(message) from error
    if not decoder.eof:
        message = f"zstd frame is too large or truncated after {len(unpacked)} bytes"
        raise FatbinError(message)
    return place - len(decoder.unused_data), bytes(unpacked)


@contextmanager
def open_zstd(file: IO[bytes]) -> Iterator[IO[bytes]]:
    """Open a zstd file as a stream of unpacked bytes. Its unpacked size need not be known.

    Raises:
        FatbinError: The data is damaged. zstd errors in the `with` block are converted to it.
    """
    zstd, options = _import_zstd()
    try:
        with zstd.ZstdFile(file, options=options) as stream:
            yield stream
    except (zstd.ZstdError, EOFError, MemoryError) as error:
        message = f"broken zstd data: {error}"
        raise FatbinError(message) from error


def _import_zstd() -> tuple[ModuleType, dict[int, int]]:
    """Return Python's zstd module, and decompressor options that limit the window size."""
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd  # noqa: PLC0415  (absent on a broken install)
        else:
            from backports import zstd  # noqa: PLC0415
    except ImportError as error:
        message = "the data is compressed with zstd, and Python has no module to unpack it"
        raise AccessError(message, hint="`python -m pip install backports.zstd`") from error
    return zstd, {int(zstd.DecompressionParameter.window_log_max): WINDOW_LOG_MAX}


def decompress_lz4_in_c(data: bytes, size: int) -> bytes:
    """Unpack one raw LZ4 block, with the package `lz4` if it is installed.

    The package is 30 times as fast as `decompress_lz4`.
    """
    try:
        from lz4 import block  # noqa: PLC0415  (an optional package)
    except ImportError:
        return decompress_lz4(data, size)
    try:
        unpacked: bytes = block.decompress(data, uncompressed_size=size)
    except (block.LZ4BlockError, MemoryError, OverflowError) as error:
        message = f"broken LZ4 image: {error}"
        raise FatbinError(message) from error
    return unpacked


def decompress_lz4(data: bytes, size: int) -> bytes:
    """Unpack one raw LZ4 block; reject a match that would exceed `size`."""
    out = bytearray()
    place, end = 0, len(data)
    try:
        while place < end:
            token = data[place]
            length, place = _read_length(data, place + 1, token >> 4)
            literals = data[place : place + length]
            out += literals
            place += length
            if place == end and len(literals) == length:
                break  # the last sequence has no match
            offset = data[place] | data[place + 1] << 8
            length, place = _read_length(data, place + 2, token & _NIBBLE_FULL)
            _copy_match(out, offset, length + _MIN_MATCH, size)
    except IndexError:
        message = f"truncated LZ4 image: {len(out)} of {size} bytes"
        raise FatbinError(message) from None
    return bytes(out)


def _read_length(data: bytes, place: int, length: int) -> tuple[int, int]:
    """Return a length and the offset after it.

    After a nibble of 15 come bytes to add to it, up to and including the first one below 255.
    """
    if length == _NIBBLE_FULL:
        while data[place] == _LENGTH_CONTINUES:
            length += _LENGTH_CONTINUES
            place += 1
        length += data[place]
        place += 1
    return length, place


def _copy_match(out: bytearray, offset: int, length: int, size: int) -> None:
    if not 0 < offset <= len(out):
        message = f"broken LZ4 image: a match {offset} bytes back at byte {len(out)}"
        raise FatbinError(message)
    if len(out) + length > size:
        message = f"LZ4 image unpacks to more than the {size} bytes it declares"
        raise FatbinError(message)
    start = len(out) - offset
    if length <= offset:
        out += out[start : start + length]
        return
    pattern = bytes(out[start:])  # an overlapping match repeats its own output
    out += (pattern * (length // offset + 1))[:length]
