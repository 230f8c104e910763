"""Signs the manifest and the statements of a release, and makes keys: `nox -s keys -- FOLDER`.

    FOLDER/private.pem    ed25519, PKCS #8; VARIABLE names it for `nox -s manifest`
    FOLDER/public.json    for `verify --key`, with the last day on which the key is valid

The folder is outside every repository, and only its owner can read it. Nothing is overwritten.
Signatures of ed25519 are deterministic: the same files and keys give the same envelopes.
"""

from __future__ import annotations

import argparse
import json
import os
import stat
import sys
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from securesystemslib.dsse import Envelope
from securesystemslib.signer import CryptoSigner

from ...audit.public_keys import PublicKey, today
from ...audit.signatures import envelope_of
from ...errors import KernelsError
from ...product import VARIABLES
from ..command import command
from ..project import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VARIABLE: Final = f"{VARIABLES}SIGNING_KEY"
PRIVATE, PUBLIC = "private.pem", "public.json"
DAYS: Final = 730  # how long a new key is valid by default
_OTHERS: Final = 0o077  # permissions of group and others
_MAKE: Final = "`nox -s keys -- ~/keys` makes a pair of keys"


class KeyFileError(KernelsError):
    """A key file cannot be read or made, or is not stored safely."""


def require_outside(path: Path) -> Path:
    """Return the real path of a key or its folder.

    Raises:
        KeyFileError: The path is in a repository, where it would be committed or packed.
    """
    real = path.expanduser().resolve()
    for folder in (real, *real.parents):
        if folder == ROOT.resolve() or (folder / ".git").exists():
            message = (
                f"a private key is kept outside of every repository, `{path}` is in `{folder}`"
            )
            raise KeyFileError(message, hint="choose a folder in your home directory")
    return real


def require_private(path: Path) -> None:
    """Raise unless the path belongs to this user, and is closed to all other users.

    Raises:
        KeyFileError: Other users can read or replace the file.
    """
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid():
        message = f"`{path}` is of user {status.st_uid}, you are {os.geteuid()}"
        raise KeyFileError(message, hint="use a folder and a key of your own")
    if mode & _OTHERS:
        message = f"`{path}` can be used by others: its mode is {mode:o}"
        raise KeyFileError(message, hint=f"`chmod go= {path}`")


def make_keys(folder: Path, expires: date) -> PublicKey:
    """Make a pair of keys in a folder, which is created if it is absent.

    Raises:
        KeyFileError: The folder is unsafe, there is a key in it, or the last day is in the past.
    """
    if expires < today():
        message = f"the last day of a key must be today or later, got {expires}"
        raise KeyFileError(message, hint=f"without --expires it is {DAYS} days from today")
    real = require_outside(folder)
    if not real.parent.is_dir():
        message = f"`{real.parent}` is no folder"
        raise KeyFileError(message, hint="create it, or choose another")
    real.mkdir(mode=0o700, exist_ok=True)
    require_private(real)
    for name in (PRIVATE, PUBLIC):
        if (real / name).exists() or (real / name).is_symlink():
            message = f"`{real / name}` exists, and no key is overwritten"
            raise KeyFileError(message, hint="choose a new folder for the new pair")
    signer = CryptoSigner.generate_ed25519()
    key = PublicKey(str(signer.public_key.keyval["public"]), expires)
    _write_new(real / PRIVATE, signer.private_bytes, 0o600)
    _write_new(real / PUBLIC, key.to_text().encode(), 0o644)
    return key


def _write_new(path: Path, data: bytes, mode: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)


def find_signers(environ: Mapping[str, str] = os.environ) -> list[CryptoSigner]:
    """Read the private keys that the environment names. Without any, the release is not signed.

    Raises:
        KeyFileError: A file is absent, holds no private key, or is not kept safely.
    """
    named = environ.get(VARIABLE, "")
    return [_read_signer(Path(one)) for one in named.split(os.pathsep)] if named else []


def _read_signer(path: Path) -> CryptoSigner:
    real = require_outside(path)
    if not real.is_file():
        message = f"{VARIABLE} must name the file of a private key, got `{path}`"
        raise KeyFileError(message, hint=_MAKE)
    require_private(real)
    try:
        key = load_pem_private_key(real.read_bytes(), None)
    except (TypeError, ValueError, UnsupportedAlgorithm) as error:  # TypeError: a password is set
        message = f"`{path}` holds no private key without a password: {f'{error}'[:200]}"
        raise KeyFileError(message, hint=_MAKE) from error
    if not isinstance(key, Ed25519PrivateKey):
        message = f"`{path}` must be an ed25519 key, got {type(key).__name__}"
        raise KeyFileError(message, hint=_MAKE)
    return CryptoSigner(key)


def sign_file(path: Path, kind: str, signers: Sequence[CryptoSigner]) -> Path:
    """Sign a file, write the envelope next to it, and return the envelope's path.

    Args:
        path: The file.
        kind: The payload type of the envelope.
        signers: The keys, each of which signs.
    """
    envelope = Envelope(path.read_bytes(), kind, {})
    for signer in signers:
        envelope.sign(signer)
    out = envelope_of(path)
    out.write_text(json.dumps(envelope.to_dict(), indent=1) + "\n", encoding="utf-8")
    return out


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="nox -s keys --", description="Make a pair of keys.")
    parser.add_argument("folder", type=Path, help="a folder that only you can read")
    parser.add_argument(
        "--expires",
        type=date.fromisoformat,
        metavar="2028-12-31",
        default=today() + timedelta(DAYS),
        help=f"the last day of the key (default: in {DAYS} days)",
    )
    args = parser.parse_args(arguments)
    key = make_keys(args.folder, args.expires)
    real = args.folder.expanduser().resolve()
    print(f"key     {key.keyid}, until {key.expires}")
    print(f"private {real / PRIVATE}: back it up, and show it to nobody")
    print(f"public  {real / PUBLIC}: publish it, for `verify --key`")
    print(f"sign    {VARIABLE}={real / PRIVATE} nox -s manifest")
    return 0


if __name__ == "__main__":
    sys.exit(main())
