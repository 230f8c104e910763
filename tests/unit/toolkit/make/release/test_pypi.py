"""Wheels under the plain version: their content. Other files beside them are refused."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.audit.own import audit_wheel
from flash_dist.toolkit.audit.verify import verify_wheel
from flash_dist.toolkit.make.release import index, pypi
from flash_dist.toolkit.make.wheels.artefacts import ArtefactError, find_artefacts, read_artefact
from tests.unit.made.whole_wheel import NAME, write_whole_wheel

if TYPE_CHECKING:
    from pathlib import Path

PLAIN = NAME.replace("+cu130.hopper", "")


@pytest.fixture
def dist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a dist/ with a wheel of the default set, which is `hopper` here."""
    monkeypatch.setattr(index, "pick_name", lambda _: "hopper")
    path = write_whole_wheel(tmp_path / "dist" / "hopper")
    with zipfile.ZipFile(path, "a") as wheel:
        wheel.writestr("flash_dist/", b"")  # as auditwheel does
    return tmp_path / "dist"


def read(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as wheel:
        return {name: wheel.read(name) for name in wheel.namelist()}


def test_a_plain_wheel_differs_in_its_version_alone(dist: Path) -> None:
    artefacts = find_artefacts(dist)
    (path,) = pypi.write(dist, artefacts, partial=False)
    assert path == dist / "pypi" / PLAIN
    assert [one.name for one in verify_wheel(path).results if not one] == []
    assert audit_wheel(path)
    plain, labelled = read(path), read(artefacts[0].path)
    same = {name.replace("0.1.0+cu130.hopper", "0.1.0"): name for name in labelled}
    assert sorted(plain) == sorted(same)
    changed = {name.rpartition("/")[2] for name in plain if plain[name] != labelled[same[name]]}
    assert changed == {"METADATA", "RECORD", "_build.json", "flash_dist.cdx.json"}
    assert not [name for name, data in plain.items() if b"+cu130.hopper" in data]
    assert pypi.make_plain(artefacts[0]) == path.read_bytes()


def test_the_plain_wheels_are_no_wheels_of_the_indexes(dist: Path) -> None:
    artefacts = find_artefacts(dist)
    (path,) = pypi.write(dist, artefacts, partial=False)
    assert find_artefacts(dist) == artefacts
    with pytest.raises(ArtefactError, match="does not name its arch set"):
        read_artefact(path)


def test_a_release_lists_them_as_what_they_are(dist: Path) -> None:
    artefacts = find_artefacts(dist)
    assert pypi.check(dist, artefacts) == []
    (path,) = pypi.write(dist, artefacts, partial=False)
    (published,) = pypi.check(dist, artefacts)
    assert (published.path, published.wheel) == (path, artefacts[0])
    assert published.told == {"version": "0.1.0"}


def test_other_files_beside_them_are_refused(dist: Path) -> None:
    artefacts = find_artefacts(dist)
    (path,) = pypi.write(dist, artefacts, partial=False)
    (dist / "pypi" / "notes.txt").touch()
    with pytest.raises(ArtefactError, match=r"notes\.txt` is not what the wheels"):
        pypi.check(dist, artefacts)
    (dist / "pypi" / "notes.txt").unlink()
    files = read(path)
    files["flash_dist/__init__.py"] = b"import os\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    with pytest.raises(ArtefactError, match=r"whl` is not what the wheels"):
        pypi.check(dist, artefacts)
    path.unlink()
    with pytest.raises(ArtefactError, match="nox -s pypi"):
        pypi.check(dist, artefacts)


def test_the_default_sets_are_needed(dist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artefacts = find_artefacts(dist)
    pypi.write(dist, artefacts, partial=False)
    monkeypatch.setattr(index, "pick_name", lambda _: "all")
    with pytest.raises(ArtefactError, match="of the set `all`, and dist/ holds no wheel of it"):
        pypi.write(dist, artefacts, partial=False)
    assert pypi.write(dist, artefacts, partial=True) == []
