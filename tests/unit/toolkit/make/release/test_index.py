"""The static index: pages for pip and uv, and one for people."""

from __future__ import annotations

import hashlib
import html
import json
import re
from typing import TYPE_CHECKING

import pytest

from ci.install_tests.clients import serve
from flash_dist.toolkit.builds.published import MACHINES, load_picks, published_sets
from flash_dist.toolkit.cli import main as flash_dist
from flash_dist.toolkit.errors import ArchError
from flash_dist.toolkit.indexes.index import read_index
from flash_dist.toolkit.make.release.index import main, write_index
from flash_dist.toolkit.make.wheels.artefacts import ArtefactError, find_artefacts
from tests.unit.made.wheels import write_dist, write_wheel
from tests.unit.toolkit.builds.test_published import ONE, write

if TYPE_CHECKING:
    from pathlib import Path

URL = "https://example.org/flash_dist/"
SETS = {one.name for one in published_sets()}
ROW = re.compile(r"<tr><th scope=\"row\">([^<]+)</th><td>([^<]+)</td><td><a href=\"#([^\"]+)\"")


def make(folder: Path, version: str = "0.1.0") -> Path:
    out, dist = folder / "index", folder / "dist"
    if not list(dist.rglob(f"flash_dist-{version}*")):
        write_dist(dist, version)
    write_index(out, find_artefacts(dist), URL, partial=False)
    return out


def files(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def test_two_runs_give_the_same_bytes(tmp_path: Path) -> None:
    write_dist(tmp_path / "dist" / "old", "0.0.9")
    for path in sorted((tmp_path / "dist" / "old").rglob("*.whl")):
        (tmp_path / "dist" / path.parent.name).mkdir(exist_ok=True)
        path.rename(tmp_path / "dist" / path.parent.name / path.name)
    first = files(make(tmp_path))
    assert first == files(make(tmp_path))
    versions = json.loads(first["hopper/flash-dist/index.json"])["versions"]
    assert versions == ["0.0.9+cu130.hopper", "0.1.0+cu130.hopper"]


def test_a_client_without_a_choice_finds_only_the_set_of_the_table(tmp_path: Path) -> None:
    with serve(make(tmp_path)) as url:
        picked = read_index(f"{url}simple/").wheels
        picks = {load_picks(machine=machine)["pip"].label for machine in MACHINES}
        assert {wheel.label for wheel in picked} == picks == {"all", "arm"}
        for machine, label in (("x86_64", "all"), ("aarch64", "arm")):
            assert [one.label for one in picked if one.runs_on(machine)] == [label]
        for archset in published_sets():
            (wheel,) = read_index(f"{url}{archset.name}/").wheels
            assert (wheel.label, wheel.requires_python) == (archset.label, ">=3.10")
            assert wheel.index == f"{url}{archset.name}/"


def test_html_and_json_name_the_same_file_with_its_hash(tmp_path: Path) -> None:
    out = make(tmp_path)
    project = out / "hopper" / "flash-dist"
    (file,) = json.loads((project / "index.json").read_text())["files"]
    wheel = out / "packages" / file["filename"]
    assert file["hashes"]["sha256"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert file["size"] == wheel.stat().st_size
    metadata = out / "packages" / f"{file['filename']}.metadata"
    assert file["core-metadata"]["sha256"] == hashlib.sha256(metadata.read_bytes()).hexdigest()
    page = (project / "index.html").read_text()
    assert f'href="{file["url"]}#sha256={file["hashes"]["sha256"]}"' in page
    assert f'data-core-metadata="sha256={file["core-metadata"]["sha256"]}"' in page
    assert "%2B" in file["url"]
    assert file["url"].startswith("../../packages/")


def test_select_finds_the_set_from_the_first_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve(make(tmp_path)) as url:
        assert flash_dist(["select", "--gpu", "9.0", "--driver", "580", "--index", url]) == 0
        assert f"--extra-index-url {url}hopper/" in capsys.readouterr().out


def test_the_page_tells_targets_from_the_wheels_and_needs_nothing_else(tmp_path: Path) -> None:
    page = (make(tmp_path) / "index.html").read_text()
    assert "sm_75, sm_80, compute_80, sm_90a, sm_100, sm_120" in page
    code = re.findall(r"<b>pip</b><code>(.*?)</code>", page)
    command = f'pip install "flash_dist==0.1.0+cu130.all" --extra-index-url {URL}simple/'
    assert html.unescape(re.sub("<[^>]*>", "", code[0])) == command  # an element to copy from
    assert ".commands b { color: var(--dim); font-weight: 400; user-select: none; }" in page
    assert "<th>" not in page
    assert page.count('<th scope="col">') == 4 * page.count("<table>")
    assert "prefers-color-scheme: dark" in page
    links = re.findall(r'(?:href|src)="([^"]+)"', page)
    assert links
    assert not [link for link in links if ":" in link or link.startswith("/")]
    assert "<script" not in page
    assert "@import" not in page


def test_the_page_says_which_set_serves_which_gpu(tmp_path: Path) -> None:
    page = (make(tmp_path) / "index.html").read_text()
    tables = page.split("<table>")[1:]
    rows, arm_rows = (re.findall(ROW, table) for table in tables)
    assert {name for _, _, name in arm_rows} == {"arm"}
    assert [number for _, number, _ in arm_rows][:1] == ["8.0"]
    assert {"11.0", "12.1"} <= {number for _, number, _ in arm_rows}
    assert {number: name for _, number, name in rows} == {
        "7.5": "cuda12",  # as native as the larger turing-ampere-ada
        "8.0": "cuda12",
        "8.6": "turing-ampere-ada",
        "8.9": "turing-ampere-ada",
        "9.0": "hopper",
        "10.0": "blackwell",
        "10.3": "blackwell",
        "12.0": "blackwell",
    }


def test_without_the_set_of_the_default_index_there_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(tmp_path / "hopper", published_sets()[1])
    monkeypatch.setattr("sys.argv", ["index", "--dist", str(tmp_path)])
    assert main() == 1
    assert "holds no wheel of it" in capsys.readouterr().err
    assert not (tmp_path / "index").exists()
    monkeypatch.setattr("sys.argv", ["index", "--dist", str(tmp_path), "--partial"])
    assert main() == 0
    assert not (tmp_path / "index" / "simple").exists()


@pytest.mark.parametrize("url", ["ftp://example.org/", "example.org", "https://e.org/?x=1"])
def test_an_address_that_is_none_is_refused(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dist(tmp_path)
    monkeypatch.setattr("sys.argv", ["index", "--dist", str(tmp_path), "--url", url])
    assert main() == 1
    assert f"got `{url}`" in capsys.readouterr().err


def test_a_renamed_wheel_is_not_published(tmp_path: Path) -> None:
    path = write_wheel(tmp_path / "hopper", published_sets()[1])
    path.rename(path.with_name(path.name.replace("hopper", "all")))
    with pytest.raises(ArtefactError, match=r"says in _build\.json that it is"):
        find_artefacts(tmp_path)


def test_a_wheel_of_packed_sources_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.unit.made.wheels.tell_version", lambda _, version: version)
    path = write_wheel(tmp_path / "hopper", published_sets()[1])
    assert path.name.startswith("flash_dist-0.1.0-")
    with pytest.raises(ArtefactError, match=r"the version of `.*` does not name its arch set"):
        find_artefacts(tmp_path)


def test_no_wheels_and_twins_are_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match="there is no wheel"):
        find_artefacts(tmp_path)
    for name in ("one", "two"):
        write_wheel(tmp_path / name, published_sets()[1])
    with pytest.raises(ArtefactError, match="more than once"):
        find_artefacts(tmp_path)


def test_every_client_gets_a_set_that_serves_all_gpus(tmp_path: Path) -> None:
    assert {client: one.name for client, one in load_picks().items()} == {
        "pip": "all",
        "uv": "all",
        "conda": "all",
    }
    two = {"one": ONE, "two": ONE | {"label": "two", "archs": "9.0a"}}
    with pytest.raises(ArchError, match=r"`pip` gets `one`, which has no code for 9\.0"):
        load_picks(write(tmp_path, {"set": two, "picks": {"x86_64": {"pip": "one"}}}))
    with pytest.raises(ArchError, match="none of one, two"):
        load_picks(write(tmp_path, {"set": two, "picks": {"x86_64": {"uv": "three"}}}))
