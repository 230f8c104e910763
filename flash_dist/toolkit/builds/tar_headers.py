"""Checks tar headers that extracting programs act on and our own reader ignores.

These are links, devices and permissions: our packages have regular files only. The reference is the
output of rattler-build: POSIX headers, with GNU's or pax's for a long name.
"""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Final

from ..errors import FatbinError

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_HEADERS: Final = 20_000
MAX_BYTES: Final = 2 << 30

_BLOCK, _CHUNK = 512, 1 << 20
_REGULAR = {b"0", b"\0"}
_LONG_NAMES = {b"L", b"x"}
_BAD_MODE = 0o7002  # setuid, setgid, sticky; writable for others
_AFTER_END = 1 << 20


def find_foreign_headers(file: IO[bytes]) -> Iterator[str]:
    """Describe headers that no package of ours holds.

    Raises:
        FatbinError: The archive is damaged.
    """
    budget = MAX_BYTES
    for _ in range(MAX_HEADERS):
        header = file.read(_BLOCK)
        if len(header) < _BLOCK:
            yield "an archive ends without its end"
            return
        if header == bytes(_BLOCK):
            if file.read(_AFTER_END).strip(b"\0") or file.read(1):
                yield "bytes follow the end of an archive"
            return
        name = header[:100].split(b"\0", 1)[0].decode("ascii", "backslashreplace")
        kind, size = header[156:157], _read_octal(header[124:136], name)
        if kind not in _REGULAR | _LONG_NAMES:
            yield f"{name} is no regular file but a tar entry of kind {kind!r}"
        elif kind in _REGULAR and _read_octal(header[100:108], name) & _BAD_MODE:
            yield f"{name} has permissions that no build gives"
        left = size + -size % _BLOCK
        budget -= left
        if budget < 0:
            yield f"an archive unpacks to more than {MAX_BYTES} bytes"
            return
        while left > 0:
            chunk = file.read(min(left, _CHUNK))
            if not chunk:
                yield "an archive is cut short"
                return
            left -= len(chunk)
    yield f"an archive has more than {MAX_HEADERS} entries"


def _read_octal(field: bytes, name: str) -> int:
    text = field.split(b"\0", 1)[0].strip() or b"0"
    try:
        number = int(text, 8)
    except ValueError:
        number = -1
    if number < 0:
        message = f"{name} has {field!r} where a tar header has a number"
        raise FatbinError(message)
    return number
