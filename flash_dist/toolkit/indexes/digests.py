"""Compares a file with the hash that an address or an index names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ..binaries.files import hash_file, open_file
from ..errors import FetchError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# Hashes of fixed length; the first one in this order that a page names is used.
_METHODS: Final = ("sha256", "sha512", "sha384", "sha3_256", "sha3_512", "blake2b", "blake2s")
_WEAK: Final = ("sha224", "sha1", "md5")
METHODS: Final = (*_METHODS, *_WEAK)


def choose_digest(hashes: Mapping[str, object]) -> str:
    """Return the first hash in the order of METHODS, as `sha256=<hex>`; empty if there is none."""
    return next((f"{name}={hashes[name]}" for name in METHODS if name in hashes), "")


def parse_digest(fragment: str) -> str:
    """Read the hash in the fragment of an address, such as `sha256=<hex>&egg=name`."""
    parts = (part.partition("=") for part in fragment.split("&"))
    return choose_digest({name: value for name, separator, value in parts if separator})


def require_digest(path: Path, digest: str, name: str) -> None:
    """Check a file against a named hash; do nothing if `digest` is empty.

    Raises:
        FetchError: The file has another hash.
        FatbinError: The file cannot be read.
    """
    method, _, wanted = digest.partition("=")
    if not method:
        return
    with open_file(path) as file:
        found = hash_file(file, method).hex()
    if found != wanted.lower():
        message = f"`{name}` has the {method} {found}, named for it is `{wanted:.130}`"
        hint = "do not install it: download it again, or ask whoever named the hash"
        raise FetchError(message, hint=hint)
