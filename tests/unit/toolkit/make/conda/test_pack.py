"""Conda packages that are packed here: equal bytes each time, files as in the wheels, checks."""

from __future__ import annotations

import json
import re
import zipfile
from typing import TYPE_CHECKING

import pytest

from ci.install_tests.clients import serve
from flash_dist.toolkit.audit.verify import verify_wheel
from flash_dist.toolkit.builds.conda_package import open_conda
from flash_dist.toolkit.builds.listing import read_listing
from flash_dist.toolkit.cli import main
from flash_dist.toolkit.errors import FatbinError, UsageError
from flash_dist.toolkit.indexes.channels import CondaPackage
from flash_dist.toolkit.indexes.index import read_index
from flash_dist.toolkit.make.conda.check import check_package, find_packages
from flash_dist.toolkit.make.conda.pack import write_channel
from flash_dist.toolkit.make.release.channels import CHANNELS
from flash_dist.toolkit.make.release.index import find_offers, write_index
from flash_dist.toolkit.make.release.manifest import write_release
from flash_dist.toolkit.make.wheels.artefacts import ArtefactError, find_artefacts
from tests.unit.made.whole_wheel import (
    INFO,
    make_declared,
    make_files,
    make_metadata,
    write_whole_wheel,
)
from tests.unit.toolkit.cli.test_schemas import check

if TYPE_CHECKING:
    from pathlib import Path

EPOCH = "1767225600"
BUILD = "cuda130_hopper_1"
PACKAGE = f"linux-64/flash-dist-0.1.0-{BUILD}.conda"
METADATA = make_metadata(
    make_declared(), "Summary: attention", "License-Expression: BSD-3-Clause"
).decode()


def make_dist(folder: Path, **more: str) -> Path:
    texts = {"METADATA": METADATA, "licenses/LICENSE": "BSD", **more}
    files = {**make_files(), **{f"{INFO}/{name}": text.encode() for name, text in texts.items()}}
    write_whole_wheel(folder / "hopper", files)
    return folder


def pack(folder: Path) -> Path:
    make_dist(folder)
    (path,) = write_channel(folder / "conda", find_artefacts(folder), epoch=EPOCH)
    assert path == folder / "conda" / PACKAGE.replace(BUILD, path.stem.rpartition("-")[2])
    return path


def test_two_runs_give_the_same_bytes(tmp_path: Path) -> None:
    one, two = pack(tmp_path / "one"), pack(tmp_path / "two")
    assert one.read_bytes() == two.read_bytes()
    lists = [path.with_name("repodata.json").read_bytes() for path in (one, two)]
    assert lists[0] == lists[1]
    assert (tmp_path / "one" / "conda" / "noarch" / "repodata.json").is_file()


def test_a_package_says_what_the_solver_needs(tmp_path: Path) -> None:
    path = pack(tmp_path)
    entry = json.loads(path.with_name("repodata.json").read_text())["packages.conda"][path.name]
    assert entry["depends"] == [
        "python >=3.10",
        "pytorch >=2.10",
        "packaging",
        "rich",
        "backports.zstd",
        "__glibc >=2.34",
        "__cuda >=13.0",
    ]
    assert entry["constrains"] == ["__cuda_arch >=9.0,<9.1a0"]
    assert (entry["noarch"], entry["subdir"]) == ("python", "linux-64")
    assert (entry["license"], entry["size"]) == ("BSD-3-Clause", path.stat().st_size)


def test_conda_is_the_installer_and_record_knows_it(tmp_path: Path) -> None:
    with open_conda(pack(tmp_path)) as package, zipfile.ZipFile(package.wheel) as wheel:
        assert wheel.read(f"{INFO}/INSTALLER") == b"conda\n"
        assert f"{INFO}/INSTALLER,sha256=" in wheel.read(f"{INFO}/RECORD").decode()
        assert "info/licenses/LICENSE" in package.info


def test_a_client_is_told_of_the_script(tmp_path: Path) -> None:
    with open_conda(pack(tmp_path)) as package:
        link = json.loads(package.info["info/link.json"])
        assert "info/link.json" not in package.listed
    assert link["noarch"]["entry_points"] == ["flash-dist = flash_dist.__main__:run"]


def test_verify_takes_a_conda_package_and_its_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = pack(tmp_path)
    write_release(tmp_path, find_artefacts(tmp_path), None)
    found = verify_wheel(path, read_listing(tmp_path / "manifest.json"))
    assert [(one.name, one.status) for one in found.results] == [
        (name, "ok")
        for name in (
            *("manifest", "archive", "paths", "package"),
            *("files", "record", "metadata", "audit", "sbom"),
        )
    ]
    assert f"conda/linux-64/{path.name}" in (tmp_path / "SHA256SUMS").read_text()
    listed = json.loads((tmp_path / "manifest.json").read_text())["artefacts"]
    assert [one["kind"] for one in listed] == ["wheel", "conda"]
    assert listed[1]["wheel"] == listed[0]["file"]
    assert main(["verify", "--json", str(path)]) == 0
    check("verify", json.loads(capsys.readouterr().out))


def rewrite(path: Path, change: str) -> None:
    """Pack a package again with one of its parts taken from another."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    part = next(name for name in parts if name.startswith(change))
    other = path.parents[2] / "other"
    make_dist(other, METADATA=METADATA.replace("attention", "attentive"))
    (twin,) = write_channel(other / "conda", find_artefacts(other), epoch=EPOCH)
    with zipfile.ZipFile(twin) as archive:
        parts[part] = archive.read(part)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, data)


@pytest.mark.parametrize("part", ["pkg-", "info-"])
def test_files_that_are_not_those_listed_are_found(tmp_path: Path, part: str) -> None:
    path = pack(tmp_path)
    rewrite(path, part)
    failed = {one.name: one.details for one in verify_wheel(path).results if not one}
    assert "METADATA has another SHA-256 or size than paths.json says" in failed["paths"][0]
    with pytest.raises(ArtefactError, match="is not the conda package of"):
        find_packages(tmp_path, find_artefacts(tmp_path))


def test_a_package_of_another_wheel_is_not_taken_for_this_one(tmp_path: Path) -> None:
    path = pack(tmp_path / "one")
    make_dist(tmp_path / "two", METADATA=METADATA.replace("attention", "attentive"))
    (other,) = find_artefacts(tmp_path / "two")
    with pytest.raises(ArtefactError, match="METADATA differs"):
        check_package(path, other)


def test_a_channel_that_lacks_a_wheel_or_has_one_too_many_is_refused(tmp_path: Path) -> None:
    path = pack(tmp_path)
    artefacts = find_artefacts(tmp_path)
    assert list(find_packages(tmp_path, artefacts)) == [path]
    stray = path.with_name("flash-dist-0.0.9-cuda130_hopper_1.conda")
    stray.write_bytes(path.read_bytes())
    with pytest.raises(ArtefactError, match=r"0\.0\.9.* belongs to no wheel"):
        find_packages(tmp_path, artefacts)
    stray.unlink()
    repodata = path.with_name("repodata.json")
    repodata.write_text(repodata.read_text().replace("__cuda_arch >=9.0", "__cuda_arch >=8.0"))
    with pytest.raises(ArtefactError, match="does not list the packages"):
        find_packages(tmp_path, artefacts)
    path.unlink()
    with pytest.raises(ArtefactError, match="is missing"):
        find_packages(tmp_path, artefacts)


@pytest.mark.parametrize("name", ["RECORD.jws", "INSTALLER"])
def test_a_wheel_that_a_package_cannot_represent_is_refused(tmp_path: Path, name: str) -> None:
    make_dist(tmp_path, **{name: "[console_scripts]\na=b:c\n"})
    with pytest.raises(ArtefactError, match=f"{name} is no file of this package"):
        write_channel(tmp_path / "conda", find_artefacts(tmp_path), epoch=EPOCH)
    assert not (tmp_path / "conda").exists()


@pytest.mark.parametrize("epoch", ["0", "now", "-1", ""])
def test_an_epoch_that_no_package_can_hold_is_a_sentence(tmp_path: Path, epoch: str) -> None:
    with pytest.raises(UsageError, match="SOURCE_DATE_EPOCH is a number of seconds"):
        write_channel(tmp_path / "conda", (), epoch=epoch)


def test_a_file_that_is_no_conda_package_gives_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "a.conda"
    path.write_bytes(b"PK")
    with pytest.raises(FatbinError, match="not a conda package"), open_conda(path):
        pass
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("metadata.json", "{}")
    with pytest.raises(FatbinError, match="holds 0 files info-"), open_conda(path):
        pass


def test_the_index_has_the_channel_and_select_finds_it(tmp_path: Path) -> None:
    path = pack(tmp_path)
    artefacts = find_artefacts(tmp_path)
    out = tmp_path / "index"
    with serve(tmp_path) as url:
        place = f"{url}index/"
        offers = find_offers(tmp_path, artefacts, [CHANNELS["conda"]], place)
        write_index(out, artefacts, place, partial=True, offers=offers)
        index = read_index(place)
    (package,) = index.packages
    assert isinstance(package, CondaPackage)
    assert package.channel == f"{place}conda"
    assert (out / "conda" / "linux-64" / path.name).read_bytes() == path.read_bytes()
    page = re.sub("</?span[^>]*>", "", (out / "index.html").read_text())  # spans color options
    line = f"conda install -c {place}conda -c conda-forge"
    assert line in page
