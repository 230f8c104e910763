"""Doctor on the address of a wheel, and of an index page: doctor judges the page's best wheel."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pytest

from ci.install_tests.clients import serve
from flash_dist.toolkit.doctor.record import Record
from flash_dist.toolkit.indexes import fetch
from flash_dist.toolkit.redaction import Redaction
from tests.unit.made.builds import ALL, make_environment
from tests.unit.made.wheels import write_dist, write_simple_index

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.made.command import Cli

HOPPER = "flash_dist-0.1.0%2Bcu130.hopper-py3-none-manylinux_2_34_x86_64.whl"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    return write_simple_index(tmp_path / "site", write_dist(tmp_path / "dist"))


def doctor(cli: Cli, place: str, gpus: str) -> tuple[int, str, str]:
    return cli.run("doctor", "--wheel", place, "--gpu", gpus, "--driver", "580")


def test_a_wheel_by_its_address(
    site: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    with serve(site) as url:
        status, out, err = doctor(cli, f"{url}files/{HOPPER}", "9.0")
    assert (status, err) == (0, "")
    assert "native code (sm_90a)" in out
    assert list(temporary.iterdir()) == []
    assert doctor(cli, (site / "files").as_uri(), "9.0")[0] == 0


@pytest.mark.parametrize("method", ["sha256", "sha512", "md5"])
def test_the_hash_of_an_address_is_held_against_what_came(
    site: Path, cli: Cli, method: str
) -> None:
    data = (site / "files" / unquote(HOPPER)).read_bytes()
    right = f"{method}={hashlib.new(method, data).hexdigest()}"
    wrong = f"{method}={hashlib.new(method, b'').hexdigest()}"
    with serve(site) as url:
        for place in (f"{url}files/{HOPPER}", (site / "files" / unquote(HOPPER)).as_uri()):
            assert doctor(cli, f"{place}#{right}", "9.0")[0] == 0
            assert doctor(cli, f"{place}#egg=x&{right}", "9.0")[0] == 0
            status, out, err = doctor(cli, f"{place}#{wrong}", "9.0")
            assert (status, out) == (2, "")
            assert f"has the {method} {right.partition('=')[2]}, named for it is" in err


def test_the_hash_of_an_index_page_is_held_against_what_came(site: Path, cli: Cli) -> None:
    page = site / "simple" / "flash-dist" / "index.html"
    (site / "files" / unquote(HOPPER)).write_bytes(b"PK")
    with serve(site) as url:
        status, out, err = doctor(cli, f"{url}simple/flash-dist/", "9.0")
    assert (status, out) == (2, "")
    assert "has the sha256 " in err
    status, out, _ = doctor(cli, str(page), "9.0")  # judges and reports another wheel
    assert status == 0
    assert "judged: flash_dist-0.1.0+cu130.hopper" not in out
    assert ".hopper-py3-none-manylinux_2_34_x86_64.whl is not judged: " in out


@pytest.mark.parametrize(
    ("gpus", "label", "status"),
    [("9.0", "hopper", 0), ("8.6,9.0,12.0", "all", 0), ("12.1", "blackwell", 0), ("7.0", "", 1)],
)
def test_an_index_page_is_listed_and_the_best_is_judged(
    site: Path, cli: Cli, gpus: str, label: str, status: int
) -> None:
    with serve(site) as url:
        code, out, _ = doctor(cli, f"{url}simple/flash-dist/", gpus)
    assert code == status
    assert f"6 wheels on {url}simple/flash-dist/; judged: flash_dist-0.1.0+cu130.{label}" in out
    assert out.count(".whl") == 7
    assert out.count("* flash_dist-") == 1


def test_the_wheel_for_a_machine_elsewhere_is_for_its_own_python(
    tmp_path: Path, cli: Cli, site: Path
) -> None:
    wheel = next((site / "files").glob("*hopper*")).read_bytes()
    for tags in ("cp312-cp312-win_amd64", "cp312-cp312-manylinux_2_28_x86_64"):
        (tmp_path / f"other-1.0-{tags}.whl").write_bytes(wheel)
    (tmp_path / "other-2.0-cp313-cp313-manylinux_2_28_x86_64.whl").write_bytes(wheel)
    machine = make_environment(ALL, "9.0")
    for python, judged in (("3.12.1", "other-1.0-cp312"), ("3.13.0rc1", "other-2.0-cp313")):
        place = tmp_path / "record.json"
        there = replace(machine, python=python)
        record = Record.make(there, (), written_by="0.1.0", recorded="2026-11-22 19:44 UTC")
        place.write_text(record.to_text(Redaction()))
        with serve(tmp_path) as url:
            out = cli("doctor", "--load", place, "--wheel", url).out
        assert f"judged: {judged}" in out
        assert "manylinux_2_28_x86_64" in out.partition("judged: ")[2].splitlines()[0]


def test_a_page_in_a_file(site: Path, cli: Cli) -> None:
    page = site / "simple" / "flash-dist" / "index.html"
    status, out, _ = doctor(cli, str(page), "12.0")
    assert status == 0
    assert "judged: flash_dist-0.1.0+cu130.blackwell" in out


def test_another_projects_newest_wheel_for_this_python_is_judged(
    tmp_path: Path, cli: Cli, site: Path
) -> None:
    wheel = next((site / "files").glob("*hopper*")).read_bytes()
    for version in ("1.0", "1.10", "1.9", "2.0rc1"):
        (tmp_path / f"other-{version}-py3-none-any.whl").write_bytes(wheel)
    (tmp_path / "other-3.0-py2-none-any.whl").write_bytes(wheel)
    with serve(tmp_path) as url:
        status, out, _ = doctor(cli, url, "9.0")
    assert status == 0
    assert "judged: other-1.10-py3-none-any.whl" in out


def test_a_file_that_is_too_large_or_absent_gives_a_sentence(
    site: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch.save, "__kwdefaults__", {"limit": 1000})
    with serve(site) as url:
        status, _, err = doctor(cli, f"{url}files/{HOPPER}", "9.0")
        assert (status, "it is larger than 1000 bytes" in err) == (2, True)
        status, _, err = doctor(cli, f"{url}files/absent.whl", "9.0")
        assert (status, "HTTP 404" in err) == (2, True)
        (site / "empty").mkdir()
        (site / "empty" / "index.html").write_text("<html></html>")
        status, _, err = doctor(cli, f"{url}empty/", "9.0")
        assert (status, "can be judged: there is none" in err) == (2, True)


LINES = (
    'pip install "flash_dist==0.1.0+cu130.hopper" --extra-index-url {url}simple/',
    'uv pip install "flash_dist==0.1.0+cu130.hopper" --index {url}simple/',
    "flash_dist==0.1.0+cu130.hopper --index-url={url}simple/",
    "flash-dist==0.1.0+cu130.hopper -i {url}simple/flash-dist/",
    "flash_dist @ {url}files/HOPPER",
    "pip install {url}files/HOPPER",
    "{url}files/HOPPER",
)


@pytest.mark.parametrize("line", LINES)
def test_a_line_for_pip_is_the_wheel_that_it_installs(line: str, site: Path, cli: Cli) -> None:
    with serve(site) as url:
        status, out, err = doctor(cli, line.format(url=url).replace("HOPPER", HOPPER), "9.0")
        assert (status, err) == (0, ""), err
        assert "native code (sm_90a)" in out
        assert doctor(cli, line.format(url=url).replace("HOPPER", HOPPER), "12.0")[0] == 1


def test_the_address_that_pip_is_told_leads_to_the_best_wheel(site: Path, cli: Cli) -> None:
    with serve(site) as url:
        _, printed, _ = cli.run("select", "--gpu", "12.0", "--index", url)
        lines = re.findall(r"^(?:pip|uv) +(\S.+)$", printed, re.MULTILINE)
        assert len(lines) == 2
        for place in (f"{url}simple/", *lines):
            status, out, err = doctor(cli, place, "12.0")
            assert (status, err) == (0, "")
            assert "judged: flash_dist-0.1.0+cu130.blackwell" in out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("flash_dist==0.1.0+cu130.hopper", "must name one version and an index"),
        ("flash_dist>=0.1 --index-url {url}simple/", "must name one version and an index"),
        ("flash_dist==0.1.* -i {url}simple/", "must name one version and an index"),
        ("flash_dist==9.9 -i {url}simple/", "has no wheel of flash-dist 9.9"),
        ("flash_dist==0.1.0 -i INDEX", "INDEX"),
    ],
)
def test_a_line_that_leads_nowhere_is_a_sentence(
    line: str, words: str, site: Path, cli: Cli
) -> None:
    with serve(site) as url:
        status, _, err = doctor(cli, line.format(url=url), "9.0")
    assert status == 2
    assert words in err


def test_several_wheels_are_judged_after_one_option(site: Path, cli: Cli) -> None:
    hopper, blackwell = (
        str(next((site / "files").glob(f"*{name}*"))) for name in ("hopper", "blackwell")
    )
    out = cli("doctor", "--wheel", hopper, hopper, "--gpu", "9.0").out
    assert out.count("native code (sm_90a)") == 2
    # code in one wheel does not help users of the other
    for words in (["--wheel", hopper, blackwell], ["--wheel", hopper, "--wheel", blackwell]):
        out = cli("doctor", *words, "--gpu", "9.0", status=1).out
        assert re.search(r"\[fail\] +gpu 0 +flash_dist-0\.1\.0\+cu130\.blackwell", out)
        assert out.count("driver ") == 2  # from the check and from the sentence


def test_a_line_that_is_refused_shows_no_password(cli: Cli) -> None:
    line = "flash_dist>=0.1 --index-url https://me:secret@index.invalid/simple/"
    status, out, err = doctor(cli, line, "9.0")
    assert (status, "flash_dist>=0.1" in err) == (2, True)
    assert "secret" not in out + err
