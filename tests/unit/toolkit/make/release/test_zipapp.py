"""The program in one file, run by a Python without packages."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.make.project import load_project
from flash_dist.toolkit.make.release.zipapp import MAIN, build_zipapp, check
from flash_dist.toolkit.make.wheels.artefacts import ArtefactError
from flash_dist.toolkit.make.wheels.channel import Published
from tests.unit.made.fatbin_builder import SASS, Kernel, container, cubin, entry, library
from tests.unit.made.whole_wheel import make_declared, make_files, write_whole_wheel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.slow  # packs the program, and starts Python many times

Run = subprocess.CompletedProcess[str]


@pytest.fixture
def run(program: Path, tmp_path: Path) -> Callable[..., Run]:
    def call(*argv: str) -> Run:
        command = [sys.executable, "-I", "-S", str(program), *argv]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    return call


@pytest.fixture
def lib(tmp_path: Path) -> str:
    path = tmp_path / "lib.so"
    path.write_bytes(library(container(entry(SASS, 80, cubin(Kernel("alpha"))))))
    return str(path)


def test_it_inspects_audits_and_answers_what_if(run: Callable[..., Run], lib: str) -> None:
    done = run("inspect", "--level", "coverage", lib)
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 kernel: each is real" in done.stdout
    assert run("audit", lib, "--require", "8.0").returncode == 0
    done = run("audit", lib, "--require", "9.0")
    assert done.returncode == 1
    assert "no code for sm_90, which is required" in done.stdout
    done = run("doctor", "--wheel", lib, "--gpu", "8.6,9.0", "--driver", "580")
    assert done.returncode == 1
    assert "code of the same major (sm_80)" in done.stdout


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="this Python unpacks zstd by itself")
def test_a_what_if_of_our_wheels_needs_no_module_for_zstd(
    run: Callable[..., Run], tmp_path: Path
) -> None:
    write_whole_wheel(tmp_path / "wheelhouse")
    done = run("doctor", "--wheel", "wheelhouse", "--gpu", "9.0", "--driver", "580", "-v")
    assert (done.returncode, done.stderr) == (0, "")
    assert "native code (sm_90a)" in done.stdout
    assert "judged by only its headers and _build.json: " in done.stdout
    assert run("doctor", "--wheel", "wheelhouse", "--gpu", "8.6").returncode == 1
    lacking = make_files(make_declared(), ("sm_100",))  # contradicts its declaration
    write_whole_wheel(tmp_path / "other", lacking)
    assert run("doctor", "--wheel", "other", "--gpu", "9.0").returncode == 1
    done = run("audit", "wheelhouse", "--require", "9.0a")
    assert done.returncode == 1
    assert "Python has no module to unpack it" in done.stdout
    assert run("audit", "wheelhouse", "--require", "9.0a", "--headers-only").returncode == 0


def test_it_selects_among_the_published_sets(run: Callable[..., Run]) -> None:
    done = run("select", "--gpu", "9.0")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("hopper: SASS sm_90a")


def test_it_is_published_where_it_is_of_these_sources(program: Path, tmp_path: Path) -> None:
    assert check(tmp_path, ()) == []
    path = tmp_path / "flash_dist.pyz"
    shutil.copy2(program, path)
    assert check(tmp_path, ()) == [Published(path)]
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("flash_dist/evil.py", "import os\n")
    with pytest.raises(ArtefactError, match="is not the program of these sources"):
        check(tmp_path, ())


def test_it_knows_its_version(run: Callable[..., Run]) -> None:
    assert run("--version").stdout == f"flash_dist {load_project().version}\n"


def test_two_builds_give_the_same_bytes(program: Path, tmp_path: Path) -> None:
    build_zipapp(program.parent / "dependencies", tmp_path / "again.pyz")
    digests = [
        hashlib.sha256(path.read_bytes()).hexdigest() for path in (program, tmp_path / "again.pyz")
    ]
    assert digests[0] == digests[1]


def test_it_calls_itself_as_it_was_called(run: Callable[..., Run], program: Path) -> None:
    for given in (["--help"], ["inspect", "--help"], ["inspect"], ["nothing"]):
        done = run(*given)
        assert "python -m flash_dist" not in done.stdout + done.stderr
        assert f"python {program}" in done.stdout + done.stderr


def test_a_hint_names_no_nox_where_there_are_no_sources(run: Callable[..., Run]) -> None:
    done = run("inspect", "absent.so")
    assert done.returncode == 2
    assert "hint: check the path\n" in done.stderr


def test_an_older_python_is_told_which_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    with pytest.raises(SystemExit) as ended:
        exec(compile(MAIN, "__main__.py", "exec"), {})  # noqa: S102 - as Python does
    assert ended.value.code == 2
    said = "error: flash_dist.pyz needs Python 3.10 or newer, got 3.9\n\nhint: `python3.12"
    assert capsys.readouterr().err.startswith(said)
