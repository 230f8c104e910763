"""Cubins in a program's data without a container: the program passes the driver their address.

Packages that embed the output of `nvcc -cubin` store them unchanged; cuBLASLt has 409, each a frame
of zstd.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from ...binaries.codecs import read_zstd_frame
from ...binaries.elf import EM_CUDA, MAGIC, Elf, read_elf
from ...binaries.view import unpack
from ...errors import FatbinError, LimitError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...binaries.budget import Budget
    from ...binaries.codecs import Codec
    from ...binaries.view import Buffer, FileView

START: Final = MAGIC + b"\x02\x01\x01"  # 64-bit, little-endian, version 1
ZSTD_START: Final = bytes.fromhex("28b52ffd")
MOST_TRIED: Final = 10_000  # false beginnings allowed in one file

_HEAD: Final = Struct("<18xH12xQQ6xHHHH")  # machine; offsets and sizes of both tables
_SECTION_BYTES: Final = 64


class Bare(NamedTuple):
    """One cubin."""

    offset: int
    size: int  # in the file
    codec: Codec
    data: Buffer  # unpacked
    elf: Elf


@dataclass
class Search:
    """A search through the data of one file. It ends after too many false beginnings."""

    data: FileView
    budget: Budget
    tries: int = MOST_TRIED

    def find(self, start: int, end: int) -> Iterator[Bare]:
        """Yield the cubins between two offsets; skip false beginnings.

        Raises:
            LimitError: They exceed the file's limit.
        """
        for magic in (START, ZSTD_START):
            place = self.data.find(magic, start, end)
            while place >= 0 and self.tries > 0:
                found = self._read(magic, place, end)
                self.tries -= found is None
                if found is not None:
                    yield found
                past = place + len(magic) if found is None else place + found.size
                place = self.data.find(magic, past, end)

    def _read(self, magic: bytes, place: int, end: int) -> Bare | None:
        part = self.data.part(place, end - place)
        try:
            if magic == ZSTD_START:
                size, cubin = read_zstd_frame(part, self.budget, _is_cubin)
                return Bare(place, size, "zstd", cubin, read_elf(cubin, self.budget))
            stored = part.part(0, _measure(part))
            return Bare(place, len(stored), "none", stored, read_elf(stored, self.budget))
        except LimitError:
            raise
        except FatbinError:
            return None


def _is_cubin(head: bytes) -> bool:
    whole = head.startswith(START) and len(head) >= _HEAD.size
    return whole and _HEAD.unpack_from(head)[0] == EM_CUDA


def _measure(part: FileView) -> int:
    """Return the length of a cubin: both tables are at its end."""
    if not _is_cubin(part[: _HEAD.size]):
        message = "it is not a cubin"
        raise FatbinError(message)
    _, programs, sections, program_size, program_count, section_size, count = unpack(_HEAD, part)
    size: int = max(programs + program_size * program_count, sections + section_size * count)
    if section_size != _SECTION_BYTES or size > len(part):
        message = f"cubin of {size} bytes must have at most {len(part)}"
        raise FatbinError(message)
    return size
