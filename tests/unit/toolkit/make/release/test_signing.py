"""`nox -s keys`, and signing with a key that the environment names."""

from __future__ import annotations

import os
import stat
import subprocess
from datetime import date, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
)
from securesystemslib.signer import CryptoSigner

from flash_dist.toolkit.audit.public_keys import read_key, today
from flash_dist.toolkit.make.project import ROOT
from flash_dist.toolkit.make.release.manifest import main as write_manifest
from flash_dist.toolkit.make.release.manifest import write_release
from flash_dist.toolkit.make.release.signing import (
    PRIVATE,
    PUBLIC,
    VARIABLE,
    KeyFileError,
    find_signers,
    main,
    make_keys,
)
from flash_dist.toolkit.make.wheels.artefacts import ArtefactError, find_artefacts
from tests.unit.made.whole_wheel import write_whole_wheel

NEXT_YEAR = today() + timedelta(365)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "keys"


def test_a_pair_of_keys_is_made_for_its_owner_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(folder)]) == 0
    key = read_key(folder / PUBLIC)
    assert key.expires == today() + timedelta(730)
    assert (mode(folder), mode(folder / PRIVATE)) == (0o700, 0o600)
    (signer,) = find_signers({VARIABLE: str(folder / PRIVATE)})
    assert signer.public_key.keyid == key.keyid
    said = capsys.readouterr().out
    assert f"{VARIABLE}={folder / PRIVATE} nox -s manifest" in said
    assert key.keyid in said
    assert VARIABLE == "FLASH_DIST_SIGNING_KEY"


def test_no_key_is_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_keys(folder, NEXT_YEAR)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert main([str(folder)]) == 1
    assert "exists, and no key is overwritten" in capsys.readouterr().err
    (folder / PRIVATE).unlink()
    with pytest.raises(KeyFileError, match=r"public\.json` exists"):
        make_keys(folder, NEXT_YEAR)
    (folder / PUBLIC).unlink()
    (folder / PRIVATE).symlink_to("nowhere")
    with pytest.raises(KeyFileError, match=r"private\.pem` exists"):
        make_keys(folder, NEXT_YEAR)
    assert len(before) == 2


def test_no_key_is_made_in_a_repository(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="outside of every repository"):
        make_keys(ROOT / "keys", NEXT_YEAR)
    with pytest.raises(KeyFileError, match="outside of every repository"):
        make_keys(ROOT / "dist" / ".." / "keys", NEXT_YEAR)
    (tmp_path / "link").symlink_to(ROOT)
    with pytest.raises(KeyFileError, match="outside of every repository"):
        make_keys(tmp_path / "link" / "keys", NEXT_YEAR)
    other = tmp_path / "other"
    subprocess.run(["git", "init", "--quiet", str(other)], check=True)
    with pytest.raises(KeyFileError, match=f"is in `{other}`"):
        make_keys(other / "deep", NEXT_YEAR)
    assert not (ROOT / "keys").exists()


def test_no_key_is_made_where_others_can_read(folder: Path) -> None:
    for open_to in (0o755, 0o750, 0o701):
        folder.mkdir(exist_ok=True)
        folder.chmod(open_to)
        with pytest.raises(KeyFileError, match=f"can be used by others: its mode is {open_to:o}"):
            make_keys(folder, NEXT_YEAR)
        assert not list(folder.iterdir())
    folder.chmod(0o700)
    make_keys(folder, NEXT_YEAR)


def test_no_key_is_made_in_a_folder_of_somebody_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(KeyFileError, match="is of user"):
        make_keys(folder, NEXT_YEAR)


def test_a_key_that_has_expired_is_not_made(folder: Path) -> None:
    with pytest.raises(KeyFileError, match="must be today or later, got 2020-01-01"):
        make_keys(folder, date(2020, 1, 1))
    with pytest.raises(KeyFileError, match="is no folder"):
        make_keys(folder / "a" / "b", NEXT_YEAR)
    assert not folder.exists()


def spoil_text(path: Path) -> None:
    path.write_text("no key")


def lock(path: Path) -> None:
    key = CryptoSigner.generate_ed25519()._private_key
    secret = BestAvailableEncryption(b"secret")
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, secret))


def use_another_kind(path: Path) -> None:
    path.write_bytes(CryptoSigner.generate_ecdsa().private_bytes)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (Path.unlink, "must name the file of a private key, got"),
        (lambda path: path.chmod(0o644), "can be used by others: its mode is 644"),
        (spoil_text, "holds no private key without a password"),
        (lock, "holds no private key without a password"),
        (use_another_kind, "must be an ed25519 key, got ECPrivateKey"),
    ],
    ids=["absent", "readable", "no key", "with a password", "of another kind"],
)
def test_a_key_that_cannot_sign_stops_the_release(
    change: object,
    told: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_keys(folder, NEXT_YEAR)
    assert callable(change)
    change(folder / PRIVATE)
    dist = folder.parent / "dist"
    write_whole_wheel(dist / "hopper")
    monkeypatch.setenv(VARIABLE, str(folder / PRIVATE))
    monkeypatch.setattr("sys.argv", ["manifest", "--dist", str(dist), "--no-commit"])
    assert write_manifest() == 1
    assert told in capsys.readouterr().err
    assert not (dist / "manifest.json").exists()


def test_a_key_in_the_repository_does_not_sign(folder: Path) -> None:
    make_keys(folder, NEXT_YEAR)
    subprocess.run(["git", "init", "--quiet", str(folder.parent)], check=True)
    with pytest.raises(KeyFileError, match="outside of every repository"):
        find_signers({VARIABLE: str(folder / PRIVATE)})


def test_several_keys_sign_and_none_is_no_error(folder: Path, tmp_path: Path) -> None:
    make_keys(folder, NEXT_YEAR)
    make_keys(tmp_path / "new", NEXT_YEAR)
    named = os.pathsep.join(str(one / PRIVATE) for one in (folder, tmp_path / "new"))
    assert len(find_signers({VARIABLE: named})) == 2
    assert find_signers({}) == []
    assert find_signers({VARIABLE: ""}) == []


def test_a_signed_release_names_its_commit(tmp_path: Path) -> None:
    write_whole_wheel(tmp_path / "hopper")
    with pytest.raises(ArtefactError, match="a signed release names its commit"):
        write_release(tmp_path, find_artefacts(tmp_path), None, [CryptoSigner.generate_ed25519()])
