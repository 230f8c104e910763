"""`verify --key`: only what a given key has signed passes; the rest is refused in a sentence."""

from __future__ import annotations

import base64
import json
import sys
from dataclasses import dataclass
from datetime import date, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from securesystemslib.dsse import Envelope
from securesystemslib.signer import CryptoSigner

from flash_dist.toolkit.audit import signatures
from flash_dist.toolkit.audit.public_keys import PublicKey, read_key, today
from flash_dist.toolkit.audit.signatures import envelope_of, read_release
from flash_dist.toolkit.audit.verify import verify_wheel
from flash_dist.toolkit.cli import main
from flash_dist.toolkit.errors import UsageError
from tests.unit.made.signed_release import LAST_DAY, Pair, make_pair, write_signed
from tests.unit.made.whole_wheel import NAME
from tests.unit.toolkit.cli.test_schemas import check

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.made.command import Cli

YESTERDAY = today() - timedelta(1)


@dataclass
class Signed:
    """A signed release, and the key that verifies it."""

    dist: Path
    wheel: Path
    pair: Pair

    @property
    def manifest(self) -> Path:
        return self.dist / "manifest.json"

    @property
    def statement(self) -> Path:
        return self.dist / "provenance" / f"{NAME}.intoto.json"

    def words(self, *keys: Path) -> list[str]:
        named = [word for key in keys or (self.pair.path,) for word in ("--key", str(key))]
        return ["verify", "--manifest", str(self.manifest), *named, str(self.wheel)]


@pytest.fixture
def signed(tmp_path: Path) -> Signed:
    pair = make_pair(tmp_path)
    return Signed(tmp_path / "dist", write_signed(tmp_path / "dist", pair), pair)


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data, indent=1) + "\n")


def sign_again(path: Path, pair: Pair, kind: str = "") -> None:
    old = Envelope.from_dict(json.loads(envelope_of(path).read_text()))
    envelope = Envelope(path.read_bytes(), kind or old.payload_type, {})
    envelope.sign(pair.signer)
    envelope_of(path).write_text(json.dumps(envelope.to_dict()))


def test_a_signed_release_passes_and_names_key_and_commit(signed: Signed, cli: Cli) -> None:
    out = " ".join(cli(*signed.words()).out.split())
    key = read_key(signed.pair.path)
    assert (
        f"[ok] signature the manifest is signed by key {key.keyid[:12]} (until {LAST_DAY})" in out
    )
    assert "[ok] provenance made of commit cccccccccccc, says key" in out
    assert "[ok] release no file of another release lies beside it" in out
    assert "who built" not in out


def test_the_key_id_is_the_one_of_the_library(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    assert read_key(pair.path).keyid == pair.signer.public_key.keyid


def test_equal_keys_give_equal_envelopes(signed: Signed) -> None:
    before = {path: path.read_bytes() for path in signed.dist.rglob("*.json")}
    assert len(before) == 4
    write_signed(signed.dist, signed.pair)
    assert before == {path: path.read_bytes() for path in signed.dist.rglob("*.json")}
    assert "manifest.dsse.json" in (signed.dist / "SHA256SUMS").read_text()


def test_a_release_without_a_key_leaves_no_older_envelope(signed: Signed) -> None:
    write_signed(signed.dist)
    assert not list(signed.dist.rglob("*.dsse.json"))


def change_wheel(signed: Signed) -> None:
    signed.wheel.write_bytes(signed.wheel.read_bytes() + b"\0")


def change_wheel_and_manifest(signed: Signed) -> None:
    change_wheel(signed)
    write_signed_by_nobody(signed)


def write_signed_by_nobody(signed: Signed) -> None:
    edit(signed.manifest, lambda data: data["artefacts"][0].update(size=1))


def rename_wheel(signed: Signed) -> None:
    signed.wheel = signed.wheel.rename(signed.wheel.with_name(NAME.replace("hopper", "all")))


def sign_by_another(signed: Signed) -> None:
    write_signed(signed.dist, make_pair(signed.dist.parent, "another"))


def claim_the_key(signed: Signed) -> None:
    """Name the trusted key in an envelope of another key."""
    sign_by_another(signed)
    keyid = read_key(signed.pair.path).keyid
    for path in signed.dist.rglob("*.dsse.json"):
        edit(path, lambda data: data["signatures"][0].update(keyid=keyid))


def swap_envelopes(signed: Signed) -> None:
    """Put a signed statement where the manifest's envelope is expected."""
    signed.manifest.write_bytes(signed.statement.read_bytes())
    envelope_of(signed.manifest).write_bytes(envelope_of(signed.statement).read_bytes())
    edit(signed.manifest, lambda data: data.update(version=1, artefacts=[]))


def use_another_kind(signed: Signed) -> None:
    sign_again(signed.manifest, signed.pair, "application/vnd.in-toto+json")


def cut_the_payload(signed: Signed) -> None:
    def cut(data: dict[str, Any]) -> None:
        data["payload"] = base64.b64encode(b"{}").decode()

    edit(envelope_of(signed.manifest), cut)


def spoil(text: str) -> Callable[[Signed], None]:
    return lambda signed: void(envelope_of(signed.manifest).write_text(text))


def void(_: object) -> None:
    return None


def sign_statement_of_another_file(signed: Signed) -> None:
    edit(signed.statement, lambda data: data["subject"][0]["digest"].update(sha256="0" * 64))
    sign_again(signed.statement, signed.pair)


def sign_statement_of_another_commit(signed: Signed) -> None:
    signed.statement.write_text(signed.statement.read_text().replace("c" * 40, "d" * 40))
    sign_again(signed.statement, signed.pair)


def sign_statement_of_two_files(signed: Signed) -> None:
    edit(signed.statement, lambda data: data["subject"].append({"name": "x", "digest": {}}))
    sign_again(signed.statement, signed.pair)


def sign_statement_of_another_kind(signed: Signed) -> None:
    edit(signed.statement, lambda data: data.update(predicateType="https://example.org/x"))
    sign_again(signed.statement, signed.pair)


def put(name: str) -> Callable[[Signed], None]:
    def write(signed: Signed) -> None:
        path = signed.dist / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"of another release")

    return write


def drop(name: str) -> Callable[[Signed], None]:
    return lambda signed: (signed.dist / name).unlink()


STATEMENT = f"provenance/{NAME}.intoto.json"
OLDER = NAME.replace("0.1.0", "0.0.9")
# Each change of the release, and the findings that reject it.
REFUSED: dict[str, tuple[set[str], Callable[[Signed], None]]] = {
    "untampered but unsigned": (
        {"verify-unsigned"},
        lambda signed: void(write_signed(signed.dist)),
    ),
    "no envelope of the manifest": ({"verify-unsigned"}, drop("manifest.dsse.json")),
    "wrong key": ({"verify-signature"}, sign_by_another),
    "wrong key that claims the id": ({"verify-signature"}, claim_the_key),
    "expired key": ({"verify-key-expired"}, lambda signed: signed.pair.save(YESTERDAY)),
    "changed file": (
        {"verify-checksum", "verify-archive", "verify-provenance"},
        change_wheel,
    ),
    "changed file and manifest": (
        {"verify-checksum", "verify-archive", "verify-signature"},
        change_wheel_and_manifest,
    ),
    "changed manifest": ({"verify-checksum", "verify-signature"}, write_signed_by_nobody),
    "renamed file": (
        {"verify-not-listed", "verify-provenance", "verify-metadata", "verify-audit"},
        rename_wheel,
    ),
    "statement as manifest": ({"verify-not-listed", "verify-signature"}, swap_envelopes),
    "envelope of another kind": ({"verify-signature"}, use_another_kind),
    "other payload": ({"verify-signature"}, cut_the_payload),
    "empty envelope": ({"verify-unsigned"}, spoil("")),
    "envelope that is no JSON": ({"verify-signature"}, spoil("{")),
    "envelope of a list": ({"verify-signature"}, spoil("[]")),
    "envelope of nulls": (
        {"verify-signature"},
        spoil('{"payload": null, "payloadType": null, "signatures": null}'),
    ),
    "envelope without signatures": (
        {"verify-signature"},
        lambda signed: edit(envelope_of(signed.manifest), lambda data: data["signatures"].clear()),
    ),
    "no statement": ({"verify-provenance"}, drop(STATEMENT)),
    "unsigned statement": (
        {"verify-unsigned"},
        drop(STATEMENT.replace(".json", ".dsse.json")),
    ),
    "statement of another file": ({"verify-provenance"}, sign_statement_of_another_file),
    "statement of two files": ({"verify-provenance"}, sign_statement_of_two_files),
    "statement of another kind": ({"verify-provenance"}, sign_statement_of_another_kind),
    "statement of another commit": ({"verify-mixed-release"}, sign_statement_of_another_commit),
    "older wheel beside the wheel": ({"verify-mixed-release"}, put(f"hopper/{OLDER}")),
    "older sources beside the manifest": (
        {"verify-mixed-release"},
        put("flash_dist-0.0.9.tar.gz"),
    ),
    "older conda package beside the manifest": (
        {"verify-mixed-release"},
        put("flash-dist-0.0.9-cuda130_hopper_0.conda"),
    ),
    "older wheel of the same name beside the manifest": ({"verify-mixed-release"}, put(NAME)),
    "folder of the name of the wheel": (
        {"verify-mixed-release"},
        lambda signed: (signed.dist / NAME).mkdir(),
    ),
    "program of another release": ({"verify-mixed-release"}, put("flash_dist.pyz")),
    "older statement": ({"verify-mixed-release"}, put(f"provenance/{OLDER}.intoto.json")),
}


@pytest.mark.parametrize(("ids", "change"), REFUSED.values(), ids=REFUSED.keys())
def test_whatever_is_no_proof_is_refused(
    ids: set[str], change: Callable[[Signed], None], signed: Signed, cli: Cli
) -> None:
    change(signed)
    keys = [read_key(signed.pair.path)]
    failed = [
        one
        for one in verify_wheel(signed.wheel, signed=read_release(signed.manifest, keys)).results
        if not one
    ]
    assert {one.id for one in failed} == ids, failed
    assert all(one.summary and one.fix for one in failed)
    found = json.loads(cli(*signed.words(), "--json", status=1).out)
    check("verify", found)
    assert found["passed"] is False


@pytest.mark.parametrize(
    "name",
    ["torch-2.13.0-cp311-cp311-linux_x86_64.whl", "flash_dist_extra-1.0.tar.gz", "notes.txt"],
)
def test_files_of_other_projects_may_lie_beside_it(name: str, signed: Signed) -> None:
    put(f"hopper/{name}")(signed)
    assert main(signed.words()) == 0


def test_a_download_without_folders_passes(signed: Signed, tmp_path: Path) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    for path in [one for one in signed.dist.rglob("*") if one.is_file()]:
        path.rename(flat / path.name)
    assert main(Signed(flat, flat / NAME, signed.pair).words()) == 0
    (flat / f"{NAME}.intoto.json").unlink()
    assert main(Signed(flat, flat / NAME, signed.pair).words()) == 1


def test_any_of_the_given_keys_may_have_signed(signed: Signed, tmp_path: Path) -> None:
    new, stranger = make_pair(tmp_path, "new"), make_pair(tmp_path, "stranger")
    write_signed(signed.dist, signed.pair, new)  # both keys sign while they are being rotated
    for keys in ([signed.pair], [new], [stranger, new], [signed.pair, new]):
        assert main(signed.words(*(one.path for one in keys))) == 0
    assert main(signed.words(stranger.path)) == 1
    write_signed(signed.dist, new)
    assert main(signed.words(signed.pair.path, new.path)) == 0
    assert main(signed.words(signed.pair.path)) == 1


def test_an_expired_key_beside_a_good_one_does_not_count(signed: Signed, tmp_path: Path) -> None:
    new = make_pair(tmp_path, "new")
    signed.pair.save(YESTERDAY)
    assert main(signed.words(signed.pair.path, new.path)) == 1
    write_signed(signed.dist, signed.pair, new)
    assert main(signed.words(signed.pair.path, new.path)) == 0


def test_a_key_is_good_until_the_end_of_its_last_day(signed: Signed) -> None:
    keys = [read_key(signed.pair.path)]
    assert read_release(signed.manifest, keys, LAST_DAY).signature
    over = read_release(signed.manifest, keys, LAST_DAY + timedelta(1)).signature
    assert f"today is {LAST_DAY + timedelta(1)}" in over.summary


@pytest.mark.parametrize("missing", ["securesystemslib", "cryptography"])
def test_without_the_extra_nothing_passes(
    missing: str, signed: Signed, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [one for one in sys.modules if one.partition(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    said = cli(*signed.words(), status=3)
    assert said.out == ""
    assert "error: nothing was verified: --key needs securesystemslib" in said.err
    assert "hint: `pip install 'flash-dist[sign]'`" in said.err
    assert main(["verify", "--manifest", str(signed.manifest), str(signed.wheel)]) == 0


def test_the_extra_is_loaded_only_for_a_key() -> None:
    assert "securesystemslib" not in vars(signatures)


KEY = PublicKey("0" * 64, LAST_DAY).to_text()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("-----BEGIN PRIVATE KEY-----\n", "is a private key, --key takes a public one"),
        ("", "is no public key with expires, keytype, keyval, scheme"),
        ("[]", "is no public key"),
        ("{}", "KeyError 'keyval'"),
        (KEY.replace("0" * 64, "0" * 63), f"must have 64 hexadecimal digits, got `{'0' * 63}`"),
        (KEY.replace("ed25519", "rsa"), "keytype and scheme must be ed25519, got rsa and rsa"),
        (KEY.replace(f"{LAST_DAY}", "never"), "Invalid isoformat string: 'never'"),
        (
            KEY.replace("{", '{"more": 1, ', 1),
            "the fields of this key are expires, keytype, keyval, more, scheme",
        ),
        (KEY.replace(f'"{LAST_DAY}"', "null"), "TypeError"),
    ],
)
def test_a_file_that_is_no_public_key_is_wrong_usage(
    text: str, told: str, signed: Signed, cli: Cli
) -> None:
    signed.pair.path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_key(signed.pair.path)
    assert told in caught.value.message
    assert told in " ".join(cli(*signed.words(), status=2).err.split())


def test_a_key_without_a_manifest_or_a_file_is_wrong_usage(signed: Signed, cli: Cli) -> None:
    said = cli("verify", "--key", signed.pair.path, signed.wheel, status=2).err
    assert "--key proves a manifest, and no --manifest was given" in said
    signed.pair.path.unlink()
    assert "cannot read the key" in cli(*signed.words(), status=2).err
    signed.manifest.unlink()
    signed.pair.save(date.max)
    assert "cannot read the manifest" in cli(*signed.words(), status=2).err


def test_a_signature_of_another_kind_of_key_is_refused(signed: Signed) -> None:
    other = CryptoSigner.generate_ecdsa()
    envelope = Envelope(signed.manifest.read_bytes(), signatures.MANIFEST_TYPE, {})
    envelope.sign(other)
    envelope_of(signed.manifest).write_text(json.dumps(envelope.to_dict()))
    assert main(signed.words()) == 1
