"""Reads parts of an open file on demand, without mapping it.

If a mapped file shrinks during a read, SIGBUS ends the process. Here, the read raises an error.
Small reads near each other are served from one buffer of 4096 bytes.
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
_BLOCK: Final = 512  # bytes per block of st_blocks

MORE_FILES_HINT: Final = "`ulimit -n 1024` lets a process open more files"


class FileView:
    """A file, or a part of one, that is read like bytes. Views of a file share the open file.

    Raises:
        FatbinError: From every reading method: the file ends too early, or the disk fails.
    """

    def __init__(self, file: IO[bytes] | _Handle, start: int = 0, size: int | None = None) -> None:
        self._handle = file if isinstance(file, _Handle) else _Handle(file)
        self._start = start
        self._size = self._handle.size - start if size is None else size
        self._window = 0, b""

    def close(self) -> None:
        """Close the file, which other views may share."""
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
        """Return a part of the file as a separate view."""
        return FileView(self._handle, self._start + start, min(size, self._size - start))

    def find(self, wanted: bytes, start: int = 0, end: int | None = None) -> int:
        """Return the offset of `wanted`, or -1 if it does not occur. Holes of the file are skipped.

        NOTE: if `wanted` begins with a zero, it may begin in a hole, so holes are searched, too.
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
        """Tell if all bytes between two offsets are zero. Holes of the file are skipped."""
        while (start := self._skip_hole(start)) < end:
            if self[start : min(end, start + _CHUNK)].strip(b"\0"):
                return False
            start += _CHUNK
        return True

    @property
    def stored(self) -> int:
        """Upper bound of the bytes of this view that are stored on disk, outside of holes."""
        return min(self._size, self._handle.stored)

    def _skip_hole(self, start: int) -> int:
        """Return `start`, or the end of the hole that contains it."""
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
    """An open file that is closed with its last view."""

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
        if hasattr(os, "posix_fadvise"):  # headers are far apart: disable read-ahead
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self) -> None:
        if hasattr(self, "_file"):  # opening succeeded
            self.close()

    def close(self) -> None:
        self._file.close()

    def find_data(self, place: int) -> int:
        """Return the first offset at or after `place` that is not in a hole, or the file's end.

        NOTE: the file's position is shared with the caller that opened the file, so this method
        restores it.
        """
        if not hasattr(os, "SEEK_DATA"):
            return place
        number = self._file.fileno()
        with self._lock:
            before = os.lseek(number, 0, os.SEEK_CUR)
            try:
                return os.lseek(number, place, os.SEEK_DATA)
            except OSError as error:  # ENXIO: only a hole is left
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
            with self._lock:  # Windows has no pread: another thread may move the file offset
                self._file.seek(place)
                return self._file.read(size) or b""
        except OSError as error:
            message = f"{size} bytes at offset {place} cannot be read: {error.strerror or error}"
            raise FatbinError(message, hint="check the disk that it is on") from error


Buffer = bytes | FileView


def unpack(form: Struct, data: Buffer, place: int = 0) -> tuple[Any, ...]:
    """Read numbers in the format `form` at an offset, which the caller has checked."""
    if isinstance(data, FileView):
        return form.unpack(data[place : place + form.size])
    return form.unpack_from(data, place)
