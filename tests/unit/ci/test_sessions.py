"""Every session installs what its modules import: a fresh environment has nothing by chance."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ci import sessions as helpers
from ci.project import PYPROJECT, ROOT, read_pyproject
from ci.release.channels import CHANNELS
from tests.unit.ci.release.test_channels import load_noxfile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

READERS = ("ci.release.index", "ci.release.manifest", "ci.trials.install")  # load all channels
OWN = ("ci.", "tests.", "flash_dist")
NATIVE = ("build_wheels", "build_arm")  # in a container they install less: both are tried


@dataclass
class Fake:
    """A session that notes which groups it installs, and with which of them it runs a module."""

    folder: Path
    posargs: list[str]
    venv_backend: str = "virtualenv"
    env: dict[str, str] = field(default_factory=dict)
    groups: list[str] = field(default_factory=list)
    ran: list[tuple[str, ...]] = field(default_factory=list)  # groups, module, arguments

    @property
    def virtualenv(self) -> SimpleNamespace:
        return SimpleNamespace(location=str(self.folder / ".nox" / "fake"))

    def install(self, *words: str) -> None:
        if "--target" not in words:
            paths = [Path(word) for word in words if "/locks/" in word]
            self.groups += [path.stem for path in paths if path.suffix == ".txt"]
            self.groups += ["torch"] * any(word.startswith("torch==") for word in words)

    def run(self, *words: str, **_: object) -> str:
        if words[0] in ("python", sys.executable) and words[1] == "-m":
            outside = words[0] != "python"  # the environment that nox runs in
            if words[2].startswith(OWN):
                groups = ["nox"] if outside else self.groups
                self.ran.append((",".join(dict.fromkeys(groups)), *words[2:]))
        return ""

    def create_tmp(self) -> str:
        return str(self.folder)

    def chdir(self, _: object) -> None: ...

    def log(self, _: str) -> None: ...

    def error(self, text: str) -> None:
        pytest.fail(text)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make what sessions look for in the tree, and no more."""
    folder = tmp_path_factory.mktemp("tree")
    for name in ("all", "hopper"):
        (folder / "dist" / name).mkdir(parents=True)
        (folder / "dist" / name / "flash_dist-0.1.0-py3-none-any.whl").touch()
    for name in ("tests", "csrc"):
        (folder / name).mkdir()
    (folder / "pyproject.toml").touch()
    return folder


def record(
    name: str, posargs: list[str], tree: Path, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, ...]]:
    """Run a session of the noxfile, but for what takes a machine's compiler, engine or GPU."""
    module, sessions = load_noxfile(monkeypatch)
    found = [SimpleNamespace(toolkit="13.0", is_own=False)]
    played: dict[str, Callable[..., Any]] = {
        "run_preflight": lambda *_, **__: found,
        "install_nvcc": lambda *_, **__: tree,
        "require_tools": lambda _: None,
        "copy_tree": lambda *_: None,
        "is_covered": lambda: True,
    }
    for place in (module, helpers):
        for one, function in played.items():
            if hasattr(place, one):
                monkeypatch.setattr(place, one, function)
        monkeypatch.setattr(place, "ROOT", tree)
    engine = None if "--native" in posargs else "podman"
    monkeypatch.setattr(helpers, "find_engine", lambda _: engine)
    session = Fake(tree, posargs)
    if "--system-site-packages" in (sessions[name].venv_params or ()):
        session.groups.append("torch")  # of the machine with the GPU
    sessions[name].func(session)
    return session.ran


def calls(monkeypatch: pytest.MonkeyPatch, tree: Path) -> Iterator[tuple[str, ...]]:
    """Yield each session with what it runs; and what runs where nothing is installed yet."""
    for name in load_noxfile(monkeypatch)[1]:
        choices: list[list[str]] = [["--native"], []] if name in NATIVE else [[]]
        if name == "peer_tests":
            choices = [["checkout", "x.whl"]]
        if name == "arm_test":
            choices.append(["--torch"])
        for posargs in choices:
            for ran in record(name, posargs, tree, monkeypatch):
                yield (name, *ran)
                for row in CHANNELS.values() if ran[1] in READERS else ():
                    yield (name, ran[0], row.module)
                    if row.trial and ran[1] == "ci.trials.install":
                        yield (name, ran[0], row.trial)
    yield ("the noxfile", "nox", "noxfile")
    yield ("pip install .", "", "ci.build.backend")
    yield ("the matrix of build.yml", "", "ci.build.matrix")
    steps = read_pyproject(PYPROJECT)["tool"]["cibuildwheel"]["linux"]
    yield ("before-all", "", steps["before-all"].split(" -m ")[1])
    yield ("repair-wheel-command", "build", steps["repair-wheel-command"].split()[2])
    yield ("audit-command", "runtime,audit,container", "ci.wheels.gates")


@pytest.mark.slow
def test_every_session_installs_what_its_modules_import(
    monkeypatch: pytest.MonkeyPatch, tree: Path
) -> None:
    wanted: dict[tuple[str, ...], list[str]] = {}
    for name, groups, module, *words in calls(monkeypatch, tree):
        shown = [words[0], "--help"] if module == "flash_dist" else []
        wanted.setdefault((groups, module, *shown), []).append(name)
    assert {"zipapp", "sdist", "index", "docs", "manifest"} <= {
        name for names in wanted.values() for name in names
    }
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        done = dict(zip(wanted, pool.map(load, wanted), strict=True))
    failed = [
        f"{', '.join(wanted[called])}: {called}: {one.stderr.strip().splitlines()[-1]}"
        for called, one in done.items()
        if one.returncode
    ]
    assert not failed, "\n".join(failed)  # noxfile.py, ci/release/channels.py: the groups lack it


def load(words: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Load a module where only some groups are installed."""
    command = [sys.executable, "-m", "tests.unit.made.fresh_environment", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.slow
def test_a_module_that_no_group_has_is_missed() -> None:
    done = load(("zipapp", "ci.release.zipapp"))
    assert done.returncode == 1
    assert "No module named 'packaging' in a fresh environment" in done.stderr
    assert load(("runtime", "ci.release.zipapp")).returncode == 0
