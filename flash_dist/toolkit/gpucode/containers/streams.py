"""Reads several images of a container in one compressed stream: entries of kind 256.

`fatbinary --concat` of CUDA 13.4 and newer writes them. After the header come a count, the size of
a table, and the table: a header for each image like that of an entry, whose size field is the
offset in the unpacked stream. The layout was found by building with and without the option; it is
not a stable ABI.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final

from ...binaries.view import unpack
from ...errors import FatbinError
from ..images import Stream
from .entries import FORM, Header, make_entry, measure_header

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...binaries.view import FileView
    from ..images import FatbinEntry

CONCATENATED: Final = 256
COST: Final = 4  # in images: one costs as much work as any, and takes few bytes of the file
_TABLE: Final = Struct("<II")  # number of images, size of the table including these two


def read_members(
    data: FileView, place: int, raw: Header, *, section: str, container: int
) -> Iterator[FatbinEntry]:
    """Yield the images of the entry at an offset.

    Raises:
        FatbinError: The table is malformed, which may show only after the last image.
    """
    _, _, codec = raw.interpret()
    stream = Stream(place + raw.header_size, raw.compressed_size, raw.uncompressed_size, codec)
    for at, record in _walk(data, place, raw):
        entry = make_entry(data, at, record, section=section, container=container, stream=stream)
        if entry.kind == "unknown":
            message = f"a stream holds an image of kind {record.kind}, version {record.version:#x}"
            raise FatbinError(message)
        yield entry


def _walk(data: FileView, place: int, raw: Header) -> Iterator[tuple[int, Header]]:
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
        if record.header_size != unpacked:  # here it is the offset in the stream
            break
        yield at, record
        unpacked += record.payload_size
        at += measure_header(data, at, record, end)
    if at != start + size or at > end or unpacked != raw.uncompressed_size or not count:
        message = f"the table of a stream of {count} images is invalid"
        raise FatbinError(message)
