"""The install tests, without running a client such as pip: their results, phases and leftovers."""

from __future__ import annotations

import json
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from ci.install_tests import install, torch_matrix
from ci.install_tests.bare_debian import list_small
from ci.install_tests.client import (
    DROPPED,
    ClientTests,
    _require_same,
    _words_for,
    make_next,
    next_version,
)
from ci.install_tests.clients import call, find_strangers, runs_here
from ci.install_tests.install import PHASES, conclude, main
from ci.install_tests.results import InstallError, NotRunError, Result, attempt
from ci.install_tests.torch_matrix import PAIRS, Pair, _require, find_python, try_torches
from flash_dist.toolkit.make.wheels.artefacts import find_artefacts, read_artefact
from tests.unit.made.wheels import write_dist
from tests.unit.made.whole_wheel import write_whole_wheel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from flash_dist.toolkit.make.wheels.artefacts import Artefact

PAIR = Pair("2.15", "3.13")


def whole_wheel(folder: Path) -> Artefact:
    return read_artefact(write_whole_wheel(folder))


def probed(**changes: object) -> str:
    found = {
        "torch": "2.15.0+cu132",
        "cuda": "13.2",
        "python": "3.13",
        "gil": True,
        "bound": True,
        "flash_dist": "0.1.0+cu130.hopper",
    }
    return "what the operator says\n" + json.dumps({**found, **changes})


def raise_(error: Exception) -> str:
    raise error


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (NotRunError("no such Python"), "NOT RUN"),
        (InstallError("another version"), "FAIL"),
        (FileNotFoundError("uv"), "FAIL"),
    ],
)
def test_a_result_distinguishes_failures_from_tests_that_cannot_run(
    error: Exception, outcome: str
) -> None:
    result = attempt("pip", "something", lambda: raise_(error))
    assert (result.outcome, result.detail) == (outcome, str(error))


@pytest.mark.parametrize(
    ("outcomes", "options", "status"),
    [
        (("ok", "ok"), (), 0),
        (("ok", "NOT RUN"), (), 1),
        (("ok", "NOT RUN"), ("--allow-missing",), 0),
        (("ok", "FAIL"), ("--allow-missing",), 1),
        ((), (), 1),
    ],
)
def test_a_run_passes_only_when_something_ran_and_all_of_it_passed(
    outcomes: Sequence[str],
    options: Sequence[str],
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def phase(_: object) -> Iterator[Result]:
        return (Result("pip", str(i), one) for i, one in enumerate(outcomes))  # type: ignore[arg-type]

    write_dist(tmp_path)
    monkeypatch.setitem(install.PHASES, "pip", phase)
    assert main(["--only", "pip", "--dist", str(tmp_path), *options]) == status


def test_the_verdict_names_the_phases_that_were_not_asked_for() -> None:
    said = conclude([Result("pip", "something", "ok")], ("pip",))
    assert said.startswith("1 ok, 0 FAIL, 0 NOT RUN: pip; not asked for: ")
    assert said.endswith(", ".join(name for name in PHASES if name != "pip"))
    assert "not asked" not in conclude([], tuple(PHASES))


def test_an_unknown_phase_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--only", "pip,poetry"])
    assert stop.value.code == 2
    assert "got `poetry`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "after"),
    [("0.1.0+cu130.all", "0.2.0+cu130.all"), ("1.9", "1.10.0"), ("2.0.9+x", "2.1.0+x")],
)
def test_the_next_version_is_newer_and_of_the_same_set(version: str, after: str) -> None:
    assert next_version(Version(version)) == Version(after)


def test_the_next_version_of_a_wheel_declares_itself_and_lacks_one_file(tmp_path: Path) -> None:
    one = whole_wheel(tmp_path / "old")
    after = make_next(one, tmp_path / "new")
    assert str(after.version) == "0.2.0+cu130.hopper"
    assert after.metadata.version == "0.2.0+cu130.hopper"
    assert (after.tags, after.requires_python) == (one.tags, one.requires_python)
    assert after.embedded == one.embedded
    with zipfile.ZipFile(one.path) as old, zipfile.ZipFile(after.path) as new:
        names = {name.replace("0.1.0", "0.2.0") for name in old.namelist()}
        assert names - {*new.namelist()} == {f"flash_dist/{DROPPED}"}


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("", "0.1.0", "flash-dist==0.1.0"),
        ("0.1.0", "0.2.0", "--upgrade flash-dist"),
        ("0.2.0+a", "0.1.0+a", "flash-dist==0.1.0+a"),
        ("0.1.0", "0.2.0+a", "flash-dist==0.2.0+a"),
        ("0.1.0+a", "0.1.0", "--force-reinstall flash-dist==0.1.0"),
    ],
)
def test_an_upgrade_is_asked_for_as_users_do(before: str, after: str, words: str) -> None:
    passed = [Version(before)] if before else []
    assert _words_for(Version(after), passed) == words.split()


def test_a_failed_command_is_quoted_from_both_ends() -> None:
    code = "import sys; sys.exit('hashes differ ' + 9999 * 'x' + ' expected 0')"
    with pytest.raises(InstallError) as caught:
        call([sys.executable, "-c", code])
    said = str(caught.value)
    assert "ended with 1: hashes differ xx" in said
    assert said.endswith("xx expected 0")
    assert len(said) < 1000


def test_select_and_doctor_must_say_the_same_of_every_gpu() -> None:
    _require_same({"8.7": "jit"}, {"8.7": "jit"})
    for found in ({"8.7": "native"}, {}, {"8.7": "jit", "9.0": "native"}):
        with pytest.raises(InstallError, match="doctor of the installed wheel says"):
            _require_same({"8.7": "jit"}, found)


def test_a_set_without_a_wheel_and_a_wheel_of_another_machine_are_cells_not_run(
    tmp_path: Path,
) -> None:
    one = whole_wheel(tmp_path / "hopper")
    other = tmp_path / "hopper" / one.file_name.replace("x86_64", "riscv64")
    one.path.rename(other)
    foreign = read_artefact(other)
    assert runs_here(one)
    assert not runs_here(foreign)
    results = list(ClientTests("pip", "http://127.0.0.1:1/", [foreign], tmp_path).results())
    assert {result.outcome for result in results} == {"NOT RUN"}
    said = {result.what: result.detail for result in results}
    assert said["index hopper"] == "the wheel of hopper is not for this machine"
    assert said["index all"] == "no wheel of all in dist/"
    assert "all" in said["select for 8.7, driver 580"]


def test_a_file_that_no_installed_version_recorded_is_found(tmp_path: Path) -> None:
    with zipfile.ZipFile(whole_wheel(tmp_path / "wheel").path) as archive:
        archive.extractall(tmp_path / "site")
    assert find_strangers(tmp_path / "site") == []
    (tmp_path / "site" / "flash_dist" / "of_the_old_version.py").touch()
    assert find_strangers(tmp_path / "site") == ["flash_dist/of_the_old_version.py"]
    (tmp_path / "site" / "flash_dist-0.0.9.dist-info").mkdir()
    with pytest.raises(InstallError, match=r"not one flash_dist-\*\.dist-info but .*0\.0\.9"):
        find_strangers(tmp_path / "site")


def test_every_torch_is_a_cell_not_run_without_a_wheel(tmp_path: Path) -> None:
    write_dist(tmp_path)
    results = list(try_torches(find_artefacts(tmp_path), "no-such-set", tmp_path))
    assert [result.outcome for result in results] == ["NOT RUN"] * len(PAIRS)


def test_too_small_a_disk_is_not_run_before_anything_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_matrix, "FREE_BYTES", 1 << 60)
    with pytest.raises(NotRunError, match="GB are free in"):
        torch_matrix.Matrix(tmp_path / "torch")._require_space()


@pytest.mark.parametrize(
    ("most", "outcome"),
    [(None, "installed"), (3_000_000, "installed"), (2_999_999, "NOT RUN")],
)
def test_a_torch_that_is_larger_than_allowed_is_not_run(
    most: int | None, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock has a torch of two platforms, a small package, and a wheel on this disk."""
    sizes = [[2_000_000, 1_000_000], [1_000_000]]
    lines = [f"wheels = [{', '.join(f'{{ size = {x} }}' for x in of)}]" for of in sizes]
    lines.append('wheels = [{ url = "file:///wheels/filelock.whl" }]')

    def answer(matrix: torch_matrix.Matrix, *command: str) -> str:
        if "compile" in command:
            text = "\n".join(f"[[packages]]\n{line}" for line in lines)
            (matrix.work / "pylock.toml").write_text(text)
        return probed(python="3.11", flash_dist="0.1.0+cu130.hopper")

    monkeypatch.setattr(torch_matrix.Matrix, "_uv", answer)
    monkeypatch.setattr(torch_matrix, "find_python", lambda _: tmp_path / "python")
    one, matrix = whole_wheel(tmp_path / "wheel"), torch_matrix.Matrix(tmp_path / "torch", most)
    result = attempt("torch", "cell", lambda: matrix.try_pair(Pair("2.15", "3.11"), one))
    assert result.outcome == outcome.replace("installed", "ok")
    assert outcome != "NOT RUN" or "3.0 MB to download, `--download` allows 3.0 MB" in result.detail


def test_the_requirements_without_torch_have_no_extras(tmp_path: Path) -> None:
    names = [Requirement(one).name for one in list_small(whole_wheel(tmp_path))]
    assert "packaging" in names
    assert not {"torch", "matplotlib", "cryptography"} & {*names}


def test_the_result_has_the_output_of_the_probe(tmp_path: Path) -> None:
    said = _require(PAIR, whole_wheel(tmp_path), probed())
    assert said == "torch 2.15.0+cu132, Python 3.13, stream symbol bound"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"bound": False}, "stream symbol not bound, and torch was built for CUDA 13.2"),
        ({"torch": "2.14.1+cu130"}, "asked for torch 2.15, Python 3.13, got torch 2.14.1"),
        ({"gil": False}, "stream symbol bound, and the GIL is off"),
        ({"python": "3.13t"}, "stream symbol bound, and the GIL is on"),
        ({"python": "3.12"}, "asked for torch 2.15, Python 3.13, got"),
        ({"cuda": None, "bound": False}, "asked for torch 2.15"),
        ({"flash_dist": "0.0.9"}, "0.0.9 was imported"),
    ],
    ids=[
        "unbound",
        "another torch",
        "no GIL",
        "a GIL",
        "another Python",
        "a CPU build",
        "another wheel",
    ],
)
def test_a_probe_that_saw_something_else_fails(
    changes: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(InstallError, match=sentence):
        _require(PAIR, whole_wheel(tmp_path), probed(**changes))


def test_a_missing_python_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uv = tmp_path / "uv"
    uv.write_text(f"#!{sys.executable}\nraise SystemExit('no interpreter found')\n")
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotRunError, match=r"no Python 3\.99 on this machine"):
        find_python("3.99")
