"""A small release, signed by keys that are made here; and forgeries of such a release."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING

from securesystemslib.signer import CryptoSigner

from flash_dist.toolkit.audit.public_keys import PublicKey, read_key
from flash_dist.toolkit.audit.signatures import (
    MANIFEST_TYPE,
    PREDICATE_TYPE,
    PROVENANCE,
    STATEMENT,
    STATEMENT_TYPE,
    envelope_of,
    read_release,
)
from flash_dist.toolkit.audit.verify import verify_wheel
from flash_dist.toolkit.make.release.manifest import write_release
from flash_dist.toolkit.make.release.signing import sign_file
from flash_dist.toolkit.make.wheels.artefacts import find_artefacts
from flash_dist.toolkit.make.wheels.source import Source
from tests.unit.made.whole_wheel import BLOBS, NAME, make_declared, write_whole_wheel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from flash_dist.toolkit.audit.verify import Verification

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


def forge(dist: Path, file: Path, *signers: CryptoSigner) -> None:
    """Write manifest and statement of any file, without a check; each signer signs them."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    listed = {"file": file.name, "sha256": digest, "size": file.stat().st_size}
    manifest = {"version": 1, "project": "flash_dist", "source_commit": COMMIT}
    source = {"name": "source", "digest": {"gitCommit": COMMIT}}
    statement = {
        "subject": [{"name": file.name, "digest": {"sha256": digest}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {"buildDefinition": {"resolvedDependencies": [source]}},
    }
    places = {
        dist / "manifest.json": (MANIFEST_TYPE, {**manifest, "artefacts": [listed]}),
        dist / PROVENANCE / f"{file.name}{STATEMENT}": (STATEMENT_TYPE, statement),
    }
    for path, (kind, data) in places.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data))
        if signers:
            sign_file(path, kind, signers)


def verify(dist: Path, file: Path, pair: Pair) -> Verification:
    """Verify a file as `verify --key` does."""
    return verify_wheel(file, signed=read_release(dist / "manifest.json", [read_key(pair.path)]))


def deceive(folder: Path, sound: Path, changed: Path) -> Iterator[tuple[str, set[str]]]:
    """Pass a changed file off as a signed one, in every way that a forger has.

    Yields:
        Each way, and the ids of the findings of `verify --key`.
    """
    pair, forger = make_pair(folder), CryptoSigner.generate_ed25519()
    assert verify_sound(folder, sound, pair)
    for way in ("files of the sound one", "unsigned", "other key", "envelopes of the sound one"):
        dist = folder / way
        honest = dist / "honest" / sound.name
        honest.parent.mkdir(parents=True)
        shutil.copyfile(sound, honest)
        forge(dist, honest, pair.signer)
        envelopes = {path: path.read_bytes() for path in dist.rglob("*.dsse.json")}
        shutil.rmtree(honest.parent)
        file = dist / changed.name
        shutil.copyfile(changed, file)
        if way != "files of the sound one":
            shutil.rmtree(dist / PROVENANCE)
            envelope_of(dist / "manifest.json").unlink()
            forge(dist, file, *([forger] if way == "other key" else []))
        if way == "envelopes of the sound one":
            for path, data in envelopes.items():
                path.write_bytes(data)
        found = verify(dist, file, pair)
        assert found.exit_code == 1, way
        yield way, {one.id for one in found.results if not one}


def verify_sound(folder: Path, sound: Path, pair: Pair) -> Verification:
    """Verify the sound file, in a release that is forged with the true key."""
    file = folder / "sound" / sound.name
    file.parent.mkdir()
    shutil.copyfile(sound, file)
    forge(file.parent, file, pair.signer)
    return verify(file.parent, file, pair)


# The possible findings for each kind of change.
REFUSED_BY = {
    "files of the sound one": {"verify-checksum", "verify-not-listed"},
    "unsigned": {"verify-unsigned"},
    "other key": {"verify-signature"},
    "envelopes of the sound one": {"verify-signature"},
}
