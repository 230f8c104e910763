"""Every session installs all packages that its modules import: a fresh environment has none."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from flash_dist.toolkit.builds.published import load_archsets
from flash_dist.toolkit.make import sessions as helpers
from flash_dist.toolkit.make.container.settings import cibuildwheel_settings
from flash_dist.toolkit.make.project import ARCHSETS, ROOT
from flash_dist.toolkit.make.release.channels import CHANNELS
from tests.unit.toolkit.make.release.test_channels import load_noxfile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import nox


def published_sets_by_name() -> tuple[str, ...]:
    return tuple(load_archsets(ARCHSETS))


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ({}, "test cannot be installed: Dependency group 'test' not found"),
        (
            {"test": "pytest"},
            "test cannot be installed: Dependency group 'test' contained a string",
        ),
        ({"test": [3]}, "test cannot be installed: Invalid dependency group item: 3"),
        ({"test": ["pytest >>1"]}, "test cannot be installed: Expected"),
    ],
    ids=str,
)
def test_a_missing_group_of_a_project_gives_a_sentence(
    groups: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def error(text: str) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(helpers, "GROUPS", groups)
    monkeypatch.setattr(helpers, "EMBEDDED", False)
    session = cast("nox.Session", SimpleNamespace(error=error))
    with pytest.raises(RuntimeError) as caught:
        helpers.install(session, "runtime", "test")
    assert str(caught.value).startswith(said)
    assert str(caught.value).endswith(
        'hint: for example `test = ["pytest"]` in [dependency-groups] of pyproject.toml'
    )


READERS = (
    "flash_dist.toolkit.make.release.index",
    "flash_dist.toolkit.make.release.manifest",
    "ci.install_tests.install",
)  # load all channels
OWN = ("ci.", "tests.", "flash_dist")
NATIVE = ("build_wheels", "build_arm")  # install less in a container: both cases are tested


@dataclass
class Fake:
    """A session that records which groups it installs, and with which groups it runs a module."""

    folder: Path
    posargs: list[str]
    venv_backend: str = "virtualenv"
    env: dict[str, str] = field(default_factory=dict)
    groups: list[str] = field(default_factory=list)
    ran: list[tuple[str, ...]] = field(default_factory=list)  # groups, module, arguments
    installed: list[tuple[str, ...]] = field(default_factory=list)

    @property
    def virtualenv(self) -> SimpleNamespace:
        return SimpleNamespace(location=str(self.folder / ".nox" / "fake"))

    def install(self, *words: str) -> None:
        self.installed.append(words)
        if "--target" not in words:
            paths = [Path(word) for word in words if "/locks/" in word]
            self.groups += [path.stem for path in paths if path.suffix == ".txt"]
            self.groups += ["torch"] * any(word.startswith("torch==") for word in words)

    def run(self, *words: str, **_: object) -> str:
        if words[0] in ("python", sys.executable) and words[1] == "-m":
            outside = words[0] != "python"  # nox's own environment
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
    """Create the files that sessions need in the tree."""
    folder = tmp_path_factory.mktemp("tree")
    for name in published_sets_by_name():
        (folder / "dist" / name).mkdir(parents=True)
        (folder / "dist" / name / "flash_dist-0.1.0-py3-none-linux_x86_64.whl").touch()
    for name in ("tests", "csrc"):
        (folder / name).mkdir()
    (folder / "examples" / "own_kernels").mkdir(parents=True)
    own = folder / "build" / "own_kernels" / "dist" / "all"  # built by the session itself
    own.mkdir(parents=True)
    (own / "own_kernels-0.1.0-py3-none-linux_x86_64.whl").touch()
    (folder / "pyproject.toml").touch()
    return folder


def record(name: str, posargs: list[str], tree: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Run a session of the noxfile, without a compiler, a container engine or a GPU."""
    module, sessions = load_noxfile(monkeypatch)
    found = [SimpleNamespace(toolkit="13.0", is_own=False)]
    played: dict[str, Callable[..., Any]] = {
        "run_preflight": lambda *_, **__: found,
        "install_nvcc": lambda *_, **__: tree,
        "require_tools": lambda _: None,
        "copy_tree": lambda *_: None,
        "see_torch": lambda _: None,
        "is_covered": lambda: True,
        "walk": lambda _dist, _basis, steps, run: [
            *filter(None, map(run, steps))
        ],  # nothing is built
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
        session.groups.append("torch")  # the machine with the GPU has torch
    sessions[name].func(session)
    return session


def calls(monkeypatch: pytest.MonkeyPatch, tree: Path) -> Iterator[tuple[str, ...]]:
    """Yield each session with its commands; and commands that run before any installation."""
    for name in load_noxfile(monkeypatch)[1]:
        choices: list[list[str]] = [["--native"], []] if name in NATIVE else [[]]
        if name == "peer_tests":
            choices = [["checkout", "x.whl"]]
        if name == "arm_test":
            choices.append(["--torch"])
        for posargs in choices:
            for ran in record(name, posargs, tree, monkeypatch).ran:
                yield (name, *ran)
                for row in CHANNELS.values() if ran[1] in READERS else ():
                    yield (name, ran[0], row.module)
                    if row.install_test and ran[1] == "ci.install_tests.install":
                        yield (name, ran[0], row.install_test)
    yield ("the noxfile", "nox", "noxfile")
    yield ("pip install .", "", "flash_dist.toolkit.make.building.backend")
    yield ("the matrix of build.yml", "", "flash_dist.toolkit.make.building.matrix")
    steps = cibuildwheel_settings()
    yield ("before-all", "", steps["CIBW_BEFORE_ALL"].split(" -m ")[1])
    yield ("repair-wheel-command", "build", steps["CIBW_REPAIR_WHEEL_COMMAND"].split()[2])
    yield ("audit-command", "runtime,audit,container", "flash_dist.toolkit.make.wheels.gates")


@pytest.mark.parametrize(("option", "recached"), [([], True), (["--cached"], False)])
def test_repro_compares_a_build_that_may_have_a_cache_with_one_without(
    option: list[str], *, recached: bool, monkeypatch: pytest.MonkeyPatch, tree: Path
) -> None:
    built: list[tuple[str, bool]] = []
    run = Fake.run

    def spy(session: Fake, *words: str, **options: object) -> str:
        if "build_wheels" in words:
            place = Path(words[words.index("-f") + 1]).parents[1].name
            built.append((place, "CCACHE_RECACHE" in session.env))
        return run(session, *words, **options)

    monkeypatch.setattr(Fake, "run", spy)
    record("repro", ["--native", *option], tree, monkeypatch)
    assert built == [("one", False), ("another-folder", recached)]


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
    assert not failed, "\n".join(
        failed
    )  # fix: add the group in noxfile.py or flash_dist/toolkit/make/release/channels.py


def load(words: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Load a module with only some groups installed."""
    command = [sys.executable, "-m", "tests.unit.made.fresh_environment", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("sizes", r"no wheel of turing-ampere-ada, .*hint: `nox -s build_wheels -- turing-"),
        ("outputs", r"no wheel of all\n\nhint: `nox -s build_wheels -- all` builds it"),
        ("gpu_outputs", r"no wheel of all\n\nhint"),
        ("fingerprints", r"no wheel of all\n\nhint"),
        ("root_test", r"no wheel of all\n\nhint"),
        ("audit", r"no wheel\n\nhint: `nox -s build_wheels` builds it"),
        ("fingerprint_check", r"no wheel\n\nhint: `nox -s build_wheels` builds it"),
    ],
)
def test_a_session_that_needs_wheels_says_so_before_it_installs_anything(
    name: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def install(*_: object) -> None:
        pytest.fail("something was installed")

    monkeypatch.setattr(Fake, "install", install)
    with pytest.raises(pytest.fail.Exception, match=f"(?s)dist/ holds {sentence}"):
        record(name, [], tmp_path, monkeypatch)


def test_a_module_that_no_group_has_is_missed() -> None:
    done = load(("zipapp", "flash_dist.toolkit.make.release.zipapp"))
    assert done.returncode == 1
    assert "No module named 'packaging' in a fresh environment" in done.stderr
    assert load(("runtime", "flash_dist.toolkit.make.release.zipapp")).returncode == 0


@pytest.mark.parametrize("posargs", [[], ["transformers-5.22.2.tar.gz"]], ids=["tiny", "their-own"])
def test_upgrading_packages_keeps_the_pinned_torch(
    posargs: list[str], tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = record("integrations", posargs, tree, monkeypatch).installed
    upgrades = [words for words in calls if "--upgrade" in words]
    assert upgrades
    for words in upgrades:  # otherwise uv would upgrade torch to the newest, for CUDA
        assert any(word.startswith("torch==") for word in words), words


def test_no_session_beside_a_machines_torch_is_made_by_uv_which_would_not_see_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beside = {
        name: session.venv_backend
        for name, session in load_noxfile(monkeypatch)[1].items()
        if "--system-site-packages" in (session.venv_params or ())
    }
    assert {"gpu_tests", "gpu_fuzz", "peer_tests", "fingerprints", "gpu_outputs"} <= beside.keys()
    assert set(beside.values()) == {"virtualenv"}


class Environment:
    """A session in an existing virtual environment; it records what it installs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env: dict[str, str] = {}
        self.installed: list[tuple[str, ...]] = []

    def run(self, *words: str, **_: object) -> str:
        command = [str(self.folder / "bin" / words[0]), *words[1:]]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def install(self, *words: str) -> None:
        self.installed.append(words)

    @property
    def session(self) -> nox.Session:
        return cast("nox.Session", self)


@pytest.fixture
def empty(tmp_path: Path) -> Environment:
    """Make an empty environment."""
    folder = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return Environment(folder)


def test_a_session_sees_the_torch_of_the_virtual_environment_that_nox_is_in(
    empty: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "of nox" / "site-packages"
    for name in ("torch", "numpy"):
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").touch()
    monkeypatch.delitem(sys.modules, "torch", raising=False)  # left by an earlier test
    monkeypatch.syspath_prepend(site)
    helpers.see_torch(empty.session)
    printed = empty.run("python", "-c", "import torch, numpy; print(torch.__file__)")
    assert printed.strip() == str(site / "torch" / "__init__.py")


def test_a_session_of_a_nox_without_torch_is_left_as_it_is(
    empty: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helpers, "find_spec", lambda _: None)
    helpers.see_torch(empty.session)
    assert not list(empty.folder.rglob("*.pth"))


def test_a_wheel_that_was_built_again_is_installed_again(
    empty: Environment, tmp_path: Path
) -> None:
    wheel = str(tmp_path / "flash_dist-0.1.0-py3-none-any.whl")
    helpers.install_beside_torch(empty.session, wheel)
    assert empty.installed[-2:] == [("--force-reinstall", "--no-deps", wheel), (wheel,)]


@pytest.mark.slow
def test_a_plugin_beside_a_machines_torch_does_not_stop_its_tests(
    empty: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helpers.install_beside_torch(empty.session, "a.whl")
    info = tmp_path / "benchmark-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: benchmark\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pytest11]\nbenchmark = benchmark\n")
    (tmp_path / "benchmark.py").write_text("raise RuntimeError('loaded')")
    (tmp_path / "test_one.py").write_text("def test_one(): pass")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "pytest", "-n", "1", "-c", os.devnull, "test_one.py"]
    stopped, ran = (
        subprocess.run(command, env=os.environ | env, capture_output=True, text=True, check=False)
        for env in ({}, empty.env)
    )
    assert "RuntimeError: loaded" in stopped.stderr
    assert "1 passed" in ran.stdout


FULL = """
import sys
sys.path.insert(0, {root!r})
from flash_dist.toolkit.make.sessions import session_of

@session_of(venv_backend="none")
def full(session):
    '''Write to a full disk.'''
    raise OSError(28, "No space left on device", "/data/build")
"""


def test_a_session_on_a_full_disk_ends_with_a_sentence(tmp_path: Path) -> None:
    noxfile = tmp_path / "noxfile.py"
    noxfile.write_text(FULL.format(root=str(ROOT)))
    command = [sys.executable, "-m", "nox", "-f", str(noxfile), "-s", "full"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert "cannot use `/data/build`: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    assert "nox.session" not in (ROOT / "noxfile.py").read_text()


def test_a_wheel_of_the_toolkit_itself_is_none_of_a_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(helpers, "ROOT", tmp_path)
    names = "toolkit/fatwheel-0.1.0-py3-none-any.whl", "all/x-1-py3-none-linux_x86_64.whl"
    for name in names:
        (tmp_path / "dist" / name).parent.mkdir(parents=True)
        (tmp_path / "dist" / name).touch()
    assert helpers.built_wheels() == [str(tmp_path / "dist" / names[1])]
