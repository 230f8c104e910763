"""A small release, signed by keys that are made here."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING

from securesystemslib.signer import CryptoSigner

from flash_dist.toolkit.audit.public_keys import PublicKey
from flash_dist.toolkit.make.release.manifest import write_release
from flash_dist.toolkit.make.wheels.artefacts import find_artefacts
from flash_dist.toolkit.make.wheels.source import Source
from tests.unit.made.whole_wheel import BLOBS, NAME, make_declared, write_whole_wheel

if TYPE_CHECKING:
    from pathlib import Path

LAST_DAY = date(2028, 12, 31)
COMMIT = "c" * 40


@dataclass(frozen=True)
class Pair:
    """A private key in memory, and the file of the public one."""

    signer: CryptoSigner
    path: Path

    @property
    def public(self) -> str:
        return str(self.signer.public_key.keyval["public"])

    def save(self, expires: date) -> None:
        self.path.write_text(PublicKey(self.public, expires).to_text())


def make_pair(folder: Path, name: str = "public", expires: date = LAST_DAY) -> Pair:
    """Make a pair of keys; write the public one."""
    pair = Pair(CryptoSigner.generate_ed25519(), folder / f"{name}.json")
    pair.save(expires)
    return pair


def write_signed(dist: Path, *pairs: Pair, commit: str = COMMIT) -> Path:
    """Write a release of one wheel, signed by each pair; return the wheel."""
    wheel = dist / "hopper" / NAME
    if not wheel.exists():
        write_whole_wheel(wheel.parent)
    source = Source(commit, BLOBS, make_declared().sources)
    write_release(dist, find_artefacts(dist), source, [one.signer for one in pairs])
    return wheel
