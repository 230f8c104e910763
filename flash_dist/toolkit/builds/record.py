"""Compares the RECORD of a wheel with its files: each must be listed with SHA-256 and size."""

from __future__ import annotations

import base64
import binascii
import csv
from typing import TYPE_CHECKING, Final, NamedTuple

from ..binaries.files import hash_file

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..binaries.wheel import Wheel

_SIGNATURES: Final = (".jws", ".p7s")  # signatures of RECORD; RECORD does not list them


class _Entry(NamedTuple):
    sha256: str  # in hexadecimal
    size: str


def find_damage(wheel: Wheel) -> Iterator[str]:
    """Describe where files and RECORD differ."""
    records = [name for name in wheel.names if name.endswith(".dist-info/RECORD")]
    if len(records) != 1 or records[0].count("/") != 1:
        yield f"the wheel holds {len(records)} RECORD files, not one"
        return
    (record,) = records
    entries: dict[str, _Entry] = {}
    lines = wheel.read(record).decode("utf-8", "backslashreplace").splitlines()
    try:
        rows = list(csv.reader(lines))
    except csv.Error as error:
        yield f"RECORD is not understood: {error}"
        return
    for row in rows:
        if len(row) != 3 or row[0] in entries:  # noqa: PLR2004 - name, hash, size
            yield f"RECORD has a malformed line: {','.join(row)}"
            continue
        entries[row[0]] = _Entry(_decode(row[1]), row[2])
    own = {record, *(record + suffix for suffix in _SIGNATURES)}
    for name in sorted(entries.keys() - set(wheel.names)):
        yield f"RECORD lists {name}, which the wheel does not hold"
    for name in sorted(set(wheel.names) - own):
        yield from _compare(wheel, name, entries.get(name))


def _compare(wheel: Wheel, name: str, entry: _Entry | None) -> Iterator[str]:
    if entry is None:
        yield f"{name} is not in RECORD"
    elif not entry.sha256:
        yield f"RECORD has no SHA-256 of {name}"
    elif entry.size != str(wheel.size(name)):
        yield f"{name} has {wheel.size(name)} bytes, RECORD says {entry.size or 'nothing'}"
    elif hash_member(wheel, name) != entry.sha256:
        yield f"{name} has another SHA-256 than RECORD says"


def hash_member(wheel: Wheel, name: str) -> str:
    """Return the SHA-256 of a file in a wheel."""
    with wheel.unpacked(name) as file:
        return hash_file(file).hex()


def _decode(text: str) -> str:
    """Return a hash of RECORD, `sha256=<urlsafe base64>`, in hexadecimal; empty for other text."""
    method, _, value = text.partition("=")
    if method != "sha256":
        return ""
    try:
        return base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()
    except (binascii.Error, ValueError):
        return ""
