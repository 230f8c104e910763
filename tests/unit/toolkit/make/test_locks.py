"""Packages from PyPI have the locked bytes, and no other package is installed."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
from packaging.requirements import Requirement

from flash_dist.toolkit.make import locks, sessions
from flash_dist.toolkit.make.container import smoke_test
from flash_dist.toolkit.make.container.image import CONTAINERFILE
from flash_dist.toolkit.make.container.settings import cibuildwheel_settings
from flash_dist.toolkit.make.locks import (
    LockError,
    compile_locks,
    flatten,
    is_covered,
    lock_path,
    locked,
)
from flash_dist.toolkit.make.project import ROOT, load_groups
from flash_dist.toolkit.make.release.channels import CHANNELS
from flash_dist.toolkit.targets.archs import DEFAULT_TOOLKIT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GROUPS = load_groups()
FILES = sorted([*locks.LOCKS.glob("*.txt"), *locks.OWN_LOCKS.glob("*.txt")])
CLIENTS = {
    "pip": ("pip", "install", "--quiet", "--no-index", "--no-cache-dir"),
    "uv": ("uv", "pip", "install", "--quiet", "--no-index", "--no-cache", "--no-config"),
}
each_client = pytest.mark.parametrize("client", CLIENTS)


class Recorder:
    """A session that records its commands."""

    posargs: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.installed: list[tuple[str, ...]] = []
        self.said: list[str] = []

    def install(self, *words: str) -> None:
        self.installed.append(words)

    def log(self, text: str) -> None:
        self.said.append(text)


def make_wheel(folder: Path, name: str, *needs: str) -> Path:
    """Write a wheel of one module."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0"]
    files = {
        f"{name}.py": "",
        f"{info}/METADATA": "\n".join([*metadata, *(f"Requires-Dist: {one}" for one in needs)]),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)
        listed = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
        wheel.writestr(f"{info}/RECORD", listed)
    return path


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Serve a package and its dependencies from a folder, and lock both as a group."""
    wheels = {
        "given": make_wheel(tmp_path, "given", "needed"),
        "needed": make_wheel(tmp_path, "needed"),
    }
    monkeypatch.setattr(locks, "LOCKS", tmp_path / "locks")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    for name in ("PIP_FIND_LINKS", "UV_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "UV_INDEX"):
        monkeypatch.delenv(name, raising=False)
    lock(tmp_path, wheels)
    return wheels


def lock(folder: Path, wheels: dict[str, Path]) -> None:
    """Write the lock of the group `group`."""
    (folder / "locks").mkdir(exist_ok=True)
    lines = (f"{name}==1.0 \\\n    --hash=sha256:{hash_of(path)}" for name, path in wheels.items())
    (folder / "locks" / "group.txt").write_text("\n".join(["#: given", *lines, ""]))


def hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def install(client: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Install the group as a session does."""
    words = [*CLIENTS[client], "--find-links", str(folder), "--target", str(folder / "site")]
    command = [sys.executable, "-m", *words, *locked({"group": ["given"]})]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@each_client
@pytest.mark.slow
def test_locked_packages_are_installed(
    client: str, served: dict[str, Path], tmp_path: Path
) -> None:
    done = install(client, tmp_path)
    assert done.returncode == 0, done.stderr
    assert all((tmp_path / "site" / f"{name}.py").is_file() for name in served)


@each_client
@pytest.mark.slow
@pytest.mark.parametrize("name", ["given", "needed"])
def test_an_altered_wheel_is_refused(
    client: str, name: str, served: dict[str, Path], tmp_path: Path
) -> None:
    with zipfile.ZipFile(served[name], "a") as wheel:
        wheel.writestr("added.py", "print('not what was locked')")
    done = install(client, tmp_path)
    assert done.returncode != 0
    assert re.search(r"hash", done.stderr, re.IGNORECASE)
    assert hash_of(served[name]) in done.stderr
    assert not (tmp_path / "site" / "added.py").exists()


@each_client
@pytest.mark.slow
def test_a_package_that_is_needed_and_not_locked_is_refused(
    client: str, served: dict[str, Path], tmp_path: Path
) -> None:
    lock(tmp_path, {"given": served["given"]})
    done = install(client, tmp_path)
    assert done.returncode != 0
    assert "needed" in done.stderr
    assert not (tmp_path / "site" / "needed.py").exists()


@pytest.mark.parametrize("name", sorted(GROUPS.keys() - {locks.UNLOCKED}))
def test_every_group_is_locked_as_it_is_now(name: str) -> None:
    path = str(lock_path(name))
    assert locked({name: flatten(GROUPS, name)}) == ["--require-hashes", "--requirement", path]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_locked_package_has_hashes(path: Path) -> None:
    assert path.stem in GROUPS, "no such group: `nox -s lock_requirements` removes its file"
    found = list(read_packages(path))
    assert found
    for package, hashes in found:
        assert re.fullmatch(r"==[^=,*]+", str(package.specifier)), package
        assert hashes, package
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes), package
        assert package.name != locks.UNLOCKED


@pytest.mark.parametrize("machine", locks.MACHINES)
@pytest.mark.parametrize("minor", range(locks.OLDEST[1], locks.NEWEST[1] + 1))
def test_groups_have_the_same_versions_wherever_they_are_installed(
    minor: int, machine: str
) -> None:
    place = {"python_version": f"3.{minor}", "python_full_version": f"3.{minor}.9"}
    place |= {"platform_machine": machine, "sys_platform": "linux", "os_name": "posix"}
    found: dict[str, set[str]] = {}
    for path in FILES:
        needs_newer = locks.PYTHONS.get(path.stem) == "3.11" and minor == 10
        if path.stem not in locks.ALONE and not needs_newer:
            for package, _ in read_packages(path):
                if package.marker is None or package.marker.evaluate(place):
                    found.setdefault(package.name, set()).add(str(package.specifier))
    assert {name: versions for name, versions in found.items() if len(versions) > 1} == {}


def read_packages(path: Path) -> Iterator[tuple[Requirement, list[str]]]:
    """Yield the locked packages of a file, with their hashes."""
    for line in path.read_text(encoding="utf-8").replace("\\\n", "").splitlines():
        if not line.startswith("#"):
            package, *hashes = re.split(r" +(?=--hash)", line)
            yield Requirement(package), hashes


def test_a_file_lies_where_its_group_is_looked_for() -> None:
    assert [lock_path(path.stem) for path in FILES] == FILES
    assert lock_path("first").parent == locks.LOCKS


def test_locks_of_channels_and_the_container_are_data_of_the_toolkit() -> None:
    groups = {name for row in CHANNELS.values() for name in (*row.groups, *row.packed)}
    assert {lock_path(name).parent for name in groups} == {locks.OWN_LOCKS}
    assert str(lock_path("beside_torch")) == smoke_test.BESIDE
    before_build = cibuildwheel_settings()["CIBW_BEFORE_BUILD"]
    assert before_build.endswith(f" {{project}}/{lock_path('build').relative_to(ROOT)}")


def test_a_group_is_locked_again_where_its_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = {"LOCKS": tmp_path / "ci", "OWN_LOCKS": tmp_path / "make"}
    for name, folder in folders.items():
        folder.mkdir()
        (folder / f"gone_{name}.txt").touch()
        monkeypatch.setattr(locks, name, folder)
    (folders["OWN_LOCKS"] / "build.txt").touch()
    monkeypatch.setattr(locks, "ROOT", tmp_path)
    monkeypatch.setattr(locks, "compile_locks", lambda _: dict.fromkeys(("build", "docs"), "new"))
    assert locks.main() == 0
    assert capsys.readouterr().out == "make/build.txt: 0 hashes\nci/docs.txt: 0 hashes\n"
    assert [path.read_text() for path in tmp_path.rglob("*.txt")] == ["new", "new"]


def test_a_group_that_was_changed_says_how_it_is_locked() -> None:
    with pytest.raises(
        LockError, match=r"group `docs` of pyproject\.toml .* `another>=2` is not in "
    ):
        locked({"docs": [*flatten(GROUPS, "docs"), "another>=2"]})
    with pytest.raises(LockError, match=r"less than ci/locks/docs\.txt") as error:
        locked({"docs": flatten(GROUPS, "docs")[:-1]})
    assert error.value.hint == "`nox -s lock_requirements` locks all groups again"
    with pytest.raises(LockError, match=r"group `parcels` .* `parcel` is not in ci/locks/parcels"):
        locked({"parcels": ["parcel"]})


def test_a_session_installs_by_hash_and_torch_after_what_it_needs() -> None:
    recorder: Any = Recorder()
    sessions.install(recorder, "runtime", "torch", "runtime")
    files = [
        word for name in ("runtime", "beside_torch") for word in ("--requirement", lock_of(name))
    ]
    assert recorder.installed[0] == ("--require-hashes", *files)
    assert recorder.installed[1][-1].startswith("torch==")
    assert len(recorder.installed) == 2


def lock_of(name: str) -> str:
    return str(lock_path(name))


def test_a_session_installs_nothing_of_a_changed_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "GROUPS", {"docs": ["another"]})
    recorder: Any = Recorder()
    with pytest.raises(LockError, match=r"`another` is not in ci/locks/docs\.txt"):
        sessions.install(recorder, "docs")
    assert recorder.installed == []


def test_a_python_that_is_not_locked_installs_without_hashes_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert [is_covered((3, minor)) for minor in (9, 10, 14, 15)] == [False, True, True, False]
    monkeypatch.setattr(sessions, "is_covered", lambda: False)
    recorder: Any = Recorder()
    sessions.install(recorder, "docs")
    assert any(one.startswith("sphinx==") for one in recorder.installed[0])
    (said,) = recorder.said
    assert said == (
        "hashes are locked for Python 3.10 to 3.14 on Linux, x86_64 or aarch64: "
        "installed without hashes"
    )


def test_tools_of_checks_workflows_and_images_are_installed_by_hash() -> None:
    places = [CONTAINERFILE]
    if (ROOT / ".github").is_dir():  # an archive of the sources has no .github
        places += [*(ROOT / ".github" / "workflows").glob("*.yml"), ROOT / ".ci" / "run"]
    texts = {path.name: path.read_text(encoding="utf-8") for path in places}
    for name, text in {**texts, "settings": cibuildwheel_settings()["CIBW_BEFORE_BUILD"]}.items():
        installs = re.findall(r'pip"? install [^&\n]*', text)
        assert installs or name == "release.yml", name
        for words in installs:
            files = re.findall(r"-r \S*?(\w+)\.txt", words)
            assert "--require-hashes" in words, words
            assert files, words
            assert {*files} <= GROUPS.keys(), words


def test_the_toolkit_that_is_locked_is_the_one_of_the_published_sets() -> None:
    for name in ("nvcc", "nvcc_aarch64"):
        (wanted,) = GROUPS[name]
        assert wanted.endswith(f"=={DEFAULT_TOOLKIT}.*")


@pytest.mark.parametrize(
    ("wheel", "taken"),
    [
        ("rich-15.0.0-py3-none-any.whl", True),
        ("six-1.17.0-py2.py3-none-any.whl", True),
        ("ruff-0.17.6-py3-none-manylinux_2_17_aarch64.manylinux2014_aarch64.whl", True),
        ("numpy-2.5.5-cp314-cp314-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl", True),
        ("cryptography-50.0.2-cp39-abi3-manylinux_2_28_x86_64.whl", True),
        ("numpy-2.5.5-cp315-cp315-manylinux_2_28_x86_64.whl", False),
        ("numpy-2.5.5-cp314-cp314t-manylinux_2_28_x86_64.whl", False),
        ("numpy-2.5.5-cp314-cp314-musllinux_1_2_x86_64.whl", False),
        ("ruff-0.17.6-py3-none-manylinux_2_17_armv7l.whl", False),
        ("ruff-0.17.6-py3-none-win_amd64.whl", False),
        ("ruff-0.17.6-py3-none-macosx_11_0_arm64.whl", False),
    ],
)
def test_hashes_are_of_wheels_that_are_installed_here(wheel: str, taken: bool) -> None:  # noqa: FBT001
    assert locks._is_ours(wheel) is taken


def test_failures_to_lock_have_uvs_words(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "error: No solution found")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(LockError, match=r"cannot be locked:\nerror: No solution found"):
        compile_locks({"docs": ["sphinx"]})
