"""The bytes of an open file, read where they are asked for and never mapped.

A mapped file that shrinks while it is read ends the process with SIGBUS; here it is an error like
any other. Small reads that are near each other share one window.
"""

from __future__ import annotations

import errno
import os
import threading
from typing import IO, TYPE_CHECKING, Any, Final, overload

from ..errors import AccessError, FatbinError

if TYPE_CHECKING:
    from struct import Struct

_WINDOW: Final = 4096
_CHUNK: Final = 1 << 20
_BLOCK: Final = 512  # bytes, of st_blocks

MORE_FILES_HINT: Final = "`ulimit -n 1024` lets a process open more files"


class FileView:
    """A file, or a part of one, that is read like bytes. Whoever shares it, shares the open file.

    Raises:
        FatbinError: From all that reads: the file ends before it should, or the disk fails.
    """

    def __init__(self, file: IO[bytes] | _Handle, start: int = 0, size: int | None = None) -> None:
        self._handle = file if isinstance(file, _Handle) else _Handle(file)
        self._start = start
        self._size = self._handle.size - start if size is None else size
        self._window = 0, b""

    def close(self) -> None:
        """Close the file, of which other views may be parts."""
        self._handle.close()
        self._window = 0, b""

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, place: slice) -> bytes: ...

    @overload
    def __getitem__(self, place: int) -> int: ...

    def __getitem__(self, place: slice | int) -> bytes | int:
        if isinstance(place, int):
            return self._read(place, place + 1)[0]
        start, end, _ = place.indices(self._size)
        return self._read(start, end) if start < end else b""

    def part(self, start: int, size: int) -> FileView:
        """Return a part of the file as a view of its own."""
        return FileView(self._handle, self._start + start, min(size, self._size - start))

    def find(self, wanted: bytes, start: int = 0, end: int | None = None) -> int:
        """Return where some bytes begin, -1 where they do not occur; holes of the file are passed.

        NOTE: what begins with a zero may begin in a hole, so that for it holes are read.
        """
        end = self._size if end is None else min(end, self._size)
        step = _WINDOW
        while start < end:
            if step == _CHUNK and wanted[0]:
                start = self._skip_hole(start)
            stop = min(end, start + step)
            found = self._read(start, stop).find(wanted)
            if found >= 0:
                return start + found
            if stop == end:
                break
            start = stop - len(wanted) + 1
            step = min(4 * step, _CHUNK)
        return -1

    def is_zero(self, start: int, end: int) -> bool:
        """Whether all bytes between two offsets are zero; holes of the file are passed."""
        while (start := self._skip_hole(start)) < end:
            if self[start : min(end, start + _CHUNK)].strip(b"\0"):
                return False
            start += _CHUNK
        return True

    @property
    def stored(self) -> int:
        """Bytes that the disk holds of the file: holes are none."""
        return min(self._size, self._handle.stored)

    def _skip_hole(self, start: int) -> int:
        """Return the offset itself, or where the hole ends that it is in."""
        return min(self._size, self._handle.find_data(self._start + start) - self._start)

    def _read(self, start: int, end: int) -> bytes:
        first, window = self._window
        if first <= start and end <= first + len(window):
            return window[start - first : end - first]
        if end - start >= _WINDOW:
            return self._handle.read(self._start + start, end - start)
        window = self._handle.read(self._start + start, min(_WINDOW, self._size - start))
        self._window = start, window
        return window[: end - start]


class _Handle:
    """An open file of its own: it is closed with the last view of it."""

    def __init__(self, file: IO[bytes]) -> None:
        try:
            self._file = os.fdopen(os.dup(file.fileno()), "rb", buffering=0)
        except OSError as error:
            message = f"cannot open another file: {error.strerror}"
            raise AccessError(message, hint=MORE_FILES_HINT) from error
        self._lock = threading.Lock()
        status = os.fstat(self._file.fileno())
        self.size = status.st_size
        blocks: int | None = getattr(status, "st_blocks", None)
        self.stored = self.size if blocks is None else blocks * _BLOCK
        if hasattr(os, "posix_fadvise"):  # headers are far apart: no read-ahead
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self) -> None:
        if hasattr(self, "_file"):  # it could be opened
            self.close()

    def close(self) -> None:
        self._file.close()

    def find_data(self, place: int) -> int:
        """Return the first offset from one on that is in no hole; the file's end where none is.

        NOTE: whoever gave the file has its position in common with it, so that it is put back.
        """
        if not hasattr(os, "SEEK_DATA"):
            return place
        number = self._file.fileno()
        with self._lock:
            before = os.lseek(number, 0, os.SEEK_CUR)
            try:
                return os.lseek(number, place, os.SEEK_DATA)
            except OSError as error:  # of ENXIO: nothing but a hole is left
                return self.size if error.errno == errno.ENXIO else place
            finally:
                os.lseek(number, before, os.SEEK_SET)

    def read(self, place: int, size: int) -> bytes:
        pieces: list[bytes] = []
        left = size
        while left:
            piece = self._read_some(place + size - left, left)
            if not piece:
                message = (
                    f"it shrank while it was read: expected {size} bytes at offset {place} of "
                    f"{self.size} bytes"
                )
                raise FatbinError(message, hint="try again when no program writes to it")
            pieces.append(piece)
            left -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _read_some(self, place: int, size: int) -> bytes:
        try:
            if hasattr(os, "pread"):
                return os.pread(self._file.fileno(), size, place)
            with self._lock:  # Windows: another thread may read elsewhere
                self._file.seek(place)
                return self._file.read(size) or b""
        except OSError as error:
            message = f"{size} bytes at offset {place} cannot be read: {error.strerror or error}"
            raise FatbinError(message, hint="check the disk that it is on") from error


Buffer = bytes | memoryview | FileView


def unpack(form: Struct, data: Buffer, place: int = 0) -> tuple[Any, ...]:
    """Read numbers at an offset that was checked."""
    if isinstance(data, FileView):
        return form.unpack(data[place : place + form.size])
    return form.unpack_from(data, place)
