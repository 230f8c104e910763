"""Reads public keys of releases: ed25519 keys in the JSON of TUF and in-toto, each with a last day.

The last day is in the key's file, which users get from a source that they trust. A day in a signed
file would prove nothing, because the signer writes it. After its last day a key proves nothing, not
even for a signature with an older date: whoever steals the private key can backdate signatures.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from datetime import date, datetime, timezone
from typing import TYPE_CHECKING, Any, Final

from ..binaries.json_text import parse_json
from ..builds.linkage import EXTRAS
from ..errors import KernelsError, UsageError
from ..product import FOLDER, IMPORTED_AS, SCRIPT

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

EXTRA: Final = "sign"
KIND: Final = "ed25519"  # keytype and scheme
_PUBLIC: Final = re.compile(r"[0-9a-f]{64}")
_KEYS: Final = {"keytype", "scheme", "keyval", "expires"}
_HINT: Final = "name the public.json of the release's publisher, from a source that you trust"
_SHOWN: Final = 200


class MissingExtraError(KernelsError):
    """The library that verifies signatures is not installed."""


@dataclass(frozen=True)
class PublicKey:
    """A public key and its last day."""

    public: str  # 32 bytes in hexadecimal
    expires: date  # the last day

    @property
    def keyid(self) -> str:
        """The SHA-256 of the key in canonical JSON, as securesystemslib computes it."""
        text = json.dumps(self._fields(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def name(self) -> str:
        """The beginning of the key's id, and the last day on which the key is valid."""
        return f"{self.keyid[:12]} (until {self.expires})"

    def _fields(self) -> dict[str, Any]:
        return {"keytype": KIND, "scheme": KIND, "keyval": {"public": self.public}}

    def to_text(self) -> str:
        """Return the content of the key's file."""
        return f"{json.dumps({**self._fields(), 'expires': f'{self.expires}'}, indent=1)}\n"


def require_extra() -> None:
    """Raise unless the library that verifies signatures is installed.

    Raises:
        MissingExtraError: The library is not installed.
    """
    try:
        import cryptography.hazmat.primitives.asymmetric.ed25519  # noqa: F401, PLC0415 - optional
        import securesystemslib.dsse  # noqa: F401, PLC0415
    except ImportError as error:
        message = f"nothing was verified: --key needs securesystemslib and cryptography ({error})"
        name = SCRIPT if IMPORTED_AS else FOLDER
        packages = " ".join(one.partition("<")[0] for one in EXTRAS[EXTRA])
        hint = f"`pip install '{name}[{EXTRA}]'`, or `pip install {packages}`"
        raise MissingExtraError(message, hint=hint) from error


def today() -> date:
    """Return today's date in UTC."""
    return datetime.now(timezone.utc).date()


def read_key(path: Path) -> PublicKey:
    """Read the file of a public key.

    Raises:
        UsageError: The file cannot be read, or is not a public key.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        message = f"cannot read the key `{path}`: {error.strerror or error}"
        raise UsageError(message, hint=_HINT) from error
    if b"PRIVATE KEY" in text:
        message = f"`{path}` is a private key, --key takes a public one"
        raise UsageError(message, hint="name the public.json beside it, and show nobody this file")
    try:
        return _parse(parse_json(text))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        told = f"{type(error).__name__} {error}"[:_SHOWN]
        message = f"`{path}` is no public key with {', '.join(sorted(_KEYS))}: {told}"
        raise UsageError(message, hint=_HINT) from error


def _parse(data: Mapping[str, Any]) -> PublicKey:
    public = data["keyval"]["public"]
    if data.keys() != _KEYS:
        message = f"the fields of this key are {', '.join(sorted(map(str, data)))}"
        raise ValueError(message)
    kinds = (data["keytype"], data["scheme"])
    if kinds != (KIND, KIND):
        message = f"keytype and scheme must be {KIND}, got {kinds[0]} and {kinds[1]}"
        raise ValueError(message)
    if _PUBLIC.fullmatch(public) is None:
        message = f"public must have 64 hexadecimal digits, got `{public}`"
        raise ValueError(message)
    return PublicKey(public, date.fromisoformat(data["expires"]))
