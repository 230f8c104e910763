"""Opens files that a user named, and describes each failure in one sentence and one hint."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from ..errors import AccessError, FatbinError, hint_to_build
from ..product import NAME
from .view import MORE_FILES_HINT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ABSENT_HINT = hint_to_build(
    "check the path; `nox -s build_wheels` puts wheels into dist/<arch set>/", "check the path"
)
READ_HINT = "check its permissions with `ls -ld`"
DAMAGED_HINT = "build, copy or download it again"
LIBRARY_HINT = (
    "pass a library (.so, .pyd, .dll), an object or archive of objects (.o, .a, .lib), a .cubin, "
    "a .fatbin, a wheel (.whl), a .conda package or a folder"
)

_CHUNK: Final = 1 << 20


def open_file(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a regular file for reading.

    Raises:
        FatbinError: The file is absent, empty, not a regular file, or cannot be opened.
    """
    name = os.fspath(path)
    try:
        status = Path(name).stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe would block
            raise unreadable(name, "it is not a regular file", hint=LIBRARY_HINT)
        if status.st_size == 0:
            raise unreadable(name, "it is empty", hint=DAMAGED_HINT)
        return Path(name).open("rb")
    except OSError as error:
        hint, kind = READ_HINT, FatbinError
        if isinstance(error, FileNotFoundError):
            hint = ABSENT_HINT
        elif isinstance(error, PermissionError):
            kind = AccessError
        elif error.errno in {errno.EMFILE, errno.ENFILE}:
            hint, kind = MORE_FILES_HINT, AccessError
        raise unreadable(name, error.strerror or str(error), hint=hint, kind=kind) from error


def read_if_possible(path: Path) -> str:
    """Return the text of a system file; empty if the file is absent or not readable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def hash_file(file: IO[bytes], method: str = "sha256") -> bytes:
    """Return the digest of an open file, from its current position to its end.

    Raises:
        ValueError: This Python does not support the hash algorithm `method`.
    """
    digest = hashlib.new(method)
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.digest()


def unreadable(
    name: str,
    reason: object,
    *,
    archive: str = "",
    hint: str | None = DAMAGED_HINT,
    kind: type[FatbinError] = FatbinError,
) -> FatbinError:
    """Return the error for an unreadable file, which may be inside an archive."""
    inside = f" in `{archive}`" if archive else ""
    return kind(f"cannot read `{name}`{inside}: {reason}", hint=hint)


@contextmanager
def unpack_file(chunks: Iterable[bytes], name: str, archive: str) -> Iterator[IO[bytes]]:
    """Write a member of an archive to an unnamed temporary file; delete it after the block."""
    with tempfile.TemporaryFile(prefix=f"{NAME}-") as file:
        try:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
        except OSError as error:
            message = f"cannot unpack `{name}` of `{archive}`: {error.strerror}"
            raise FatbinError(message, hint="set TMPDIR to another folder") from error
        file.seek(0)
        yield file
