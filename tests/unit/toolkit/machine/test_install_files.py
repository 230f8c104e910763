"""The installed files compared with pip's record."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from flash_dist.toolkit.checks.install import build_fix as fix_of
from flash_dist.toolkit.checks.install import check_build, check_install
from flash_dist.toolkit.machine.install_files import InstallFiles, read_install_files
from flash_dist.toolkit.machine.installed import read_installed
from flash_dist.toolkit.product import KERNELS
from tests.unit.made.builds import HOPPER, make_environment
from tests.unit.made.fatbin_builder import SASS, Kernel, container, cubin, entry, library

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[4]
CONTENTS = {"__init__.py": b"", "_C.so": b"\x7fELF" * 100, "masks/spec.py": b"x = 1\n"}


def record(name: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a package installed as pip does it."""
    package = tmp_path / "site-packages" / "flash_dist"
    info = package.parent / "flash_dist-0.1.0.dist-info"
    info.mkdir(parents=True)
    lines = ["flash_dist-0.1.0.dist-info/RECORD,,\n", "flash_dist/__pycache__/spec.pyc,,\n"]
    for name, data in CONTENTS.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        lines.append(record(f"flash_dist/{name}", data))
    metadata = b"Metadata-Version: 2.1\nName: flash_dist\nVersion: 0.1.0\n"
    (info / "METADATA").write_bytes(metadata)
    lines.append(record("flash_dist-0.1.0.dist-info/METADATA", metadata))
    (info / "RECORD").write_text("".join(lines))
    return package


def read(package: Path, *others: Path) -> InstallFiles:
    return read_install_files(package, [str(package.parent), *map(str, others)])


def build_fix(files: InstallFiles, **variables: str) -> str:
    return fix_of(replace(make_environment(HOPPER), files=files, variables=variables))


def check(files: InstallFiles) -> tuple[str, str, str, str]:
    result = check_install(replace(make_environment(HOPPER, "9.0"), files=files))
    return result.status, result.id, result.summary, result.fix


def test_a_sound_install_is_as_recorded(package: Path) -> None:
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "new.cpython-311.pyc").write_bytes(b"1")
    files = read(package)
    assert files == InstallFiles("recorded", str(package.parent), count=5)
    status, _, summary, _ = check(files)
    assert status == "ok"
    assert summary == f"5 files as recorded, in {package.parent}"


def test_a_script_that_is_elsewhere_is_no_damage(package: Path) -> None:
    """`pip install --target` and a copy of site-packages leave the script in another place."""
    path = package.parent / "flash_dist-0.1.0.dist-info" / "RECORD"
    count = read(package).count
    path.write_text(path.read_text() + record("../../../bin/flash-dist", b"#!/bin/python\n"))
    files = read(package)
    assert (files.status, files.count, files.missing) == ("recorded", count, ())


def test_files_that_went_or_changed_are_named(package: Path) -> None:
    (package / "masks" / "spec.py").unlink()
    (package / "_C.so").write_bytes(b"\x7fELG" * 100)  # the same size
    files = read(package)
    assert files.missing == ("flash_dist/masks/spec.py",)
    assert files.changed == ("flash_dist/_C.so",)
    status, cause, summary, fix = check(files)
    assert (status, cause) == ("fail", "install-damaged")
    assert "1 file is missing and 1 file is changed" in summary
    assert "--force-reinstall" in fix


def test_another_copy_on_the_path_is_a_warning(package: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / "flash_dist").mkdir(parents=True)
    (other / "flash_dist" / "__init__.py").touch()
    files = read(package, other, tmp_path)
    assert files.copies == (str(other),)
    status, cause, summary, _ = check(files)
    assert (status, cause) == ("warn", "install-twice")
    assert str(other) in summary


def link_files(package: Path, view: Path) -> None:
    """Install like `uv --link-mode symlink` and Spack: each file is a link."""
    for file in package.parent.rglob("*"):
        if file.is_file():
            link = view / file.relative_to(package.parent)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file)


def link_folders(package: Path, view: Path) -> None:
    """Install like `pex --venv` and Nix: each folder is a link."""
    view.mkdir(parents=True)
    for folder in package.parent.iterdir():
        (view / folder.name).symlink_to(folder)


@pytest.mark.parametrize("link", [link_files, link_folders])
def test_an_install_of_links_is_one_install(
    package: Path, tmp_path: Path, link: Callable[[Path, Path], None]
) -> None:
    view = tmp_path / "venv" / "site-packages"
    link(package, view)
    for places in ([view], [view, package.parent], [package.parent, view]):
        for found in (view / "flash_dist", package):
            files = read_install_files(found, list(map(str, places)))
            assert files == InstallFiles("recorded", str(found.parent), count=5)
            assert check(files)[0] == "ok"
    other = tmp_path / "other" / "flash_dist"
    shutil.copytree(package, other)
    files = read_install_files(view / "flash_dist", [str(view), str(other.parent)])
    assert files.copies == (str(other.parent),)


def test_a_package_that_was_found_through_a_link_knows_the_link(package: Path) -> None:
    """The package's folder is where Python found it, not the link's target."""
    venv = package.parents[1] / "venv"
    venv.mkdir()
    (venv / "flash_dist").symlink_to(ROOT / "flash_dist")
    code = "from flash_dist.toolkit.builds.package import FOUND, PACKAGE; print(FOUND, PACKAGE)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=venv,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(venv / "flash_dist"), str(ROOT / "flash_dist")]


def test_leftovers_are_found(package: Path) -> None:
    (package / "old_kernels.so").write_bytes(b"1")
    (package.parent / "~lash_dist-0.0.9.dist-info").mkdir()
    files = read(package)
    assert files.leftovers == ("flash_dist/old_kernels.so", "~lash_dist-0.0.9.dist-info")
    status, cause, summary, _ = check(files)
    assert (status, cause) == ("warn", "install-leftovers")
    assert "flash_dist/old_kernels.so" in summary


def test_a_source_tree_has_no_record(tmp_path: Path) -> None:
    package = tmp_path / "flash_dist"
    package.mkdir()
    (package / "__init__.py").touch()
    files = read(package)
    assert files == InstallFiles(folder=str(tmp_path), in_sources=True)
    status, _, summary, _ = check(files)
    assert (status, summary) == ("ok", f"pip has no record of the package in {tmp_path}")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Make a source tree."""
    folder = tmp_path / "clone"
    for name in ("flash_dist/__init__.py", "csrc/kernels.toml"):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).touch()
    return folder


def test_a_source_tree_that_hides_a_wheel_is_to_be_left(package: Path, tree: Path) -> None:
    (package / "__init__.py").touch()
    files = read(tree / "flash_dist", package.parent)
    assert files == InstallFiles(folder=str(tree), copies=(str(package.parent),), in_sources=True)
    assert check(files)[:2] == ("warn", "install-twice")
    assert check(files)[3] == build_fix(files)
    assert "`cd ..`" in build_fix(files)
    assert "uninstall" not in check(files)[3]


def test_a_source_tree_alone_is_to_be_built_and_left(tree: Path) -> None:
    fix = build_fix(read(tree / "flash_dist"))
    assert "nox -s build_wheels" in fix
    assert fix.endswith("leave the source tree: `cd ..`")


def test_only_the_tree_that_python_started_in_is_to_be_left(package: Path, tree: Path) -> None:
    inside = read_install_files(tree / "flash_dist", [str(package.parent), str(tree)])
    assert not inside.in_sources  # in PYTHONPATH, so `cd` would not help
    assert not read(package).in_sources
    assert build_fix(read(package)) == (
        "install a wheel: `python -m flash_dist select` says which, and how"
    )


def test_an_egg_info_beside_the_sources_is_no_record(package: Path) -> None:
    for path in package.parent.glob("*.dist-info"):
        shutil.rmtree(path)
    egg = package.parent / "flash_dist.egg-info"
    egg.mkdir()
    (egg / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: flash_dist\nVersion: 0.1.0\n")
    (egg / "SOURCES.txt").write_text("flash_dist/__init__.py\n")
    assert read(package).status == "unrecorded"


def test_doctor_in_a_clone_says_to_leave_it(tmp_path: Path) -> None:
    (tmp_path / "flash_dist").mkdir()
    (tmp_path / "flash_dist" / "__init__.py").touch()  # represents the installed package
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "flash_dist", "doctor", "--only", "install,build", "--json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**environ, "PYTHONPATH": str(tmp_path)},
    )
    checks = json.loads(done.stdout)["checks"]
    assert [check["id"] for check in checks] == ["install-twice", "not-built"]
    assert all(check["fix"].startswith("leave the source tree") for check in checks)


def test_a_copy_of_the_package_alone_is_to_be_left_for_the_wheel_it_hides(
    package: Path, tmp_path: Path
) -> None:
    (tmp_path / "work" / "flash_dist").mkdir(parents=True)
    (tmp_path / "work" / "flash_dist" / "__init__.py").touch()
    files = read(tmp_path / "work" / "flash_dist", package.parent)
    assert files.in_sources
    assert check(files)[3] == build_fix(files)
    assert "leave" in build_fix(files)
    assert "`cd ..`" in build_fix(files)
    assert "uninstall" not in check(files)[3]


def test_sources_that_pythonpath_names_are_to_be_taken_out_of_it(package: Path, tree: Path) -> None:
    files = read_install_files(tree / "flash_dist", ["/usr/bin", str(tree), str(package.parent)])
    fix = build_fix(files, PYTHONPATH=f"/opt:{tree}/")
    assert fix.startswith(f"remove {tree} from PYTHONPATH: ")


def test_a_folder_in_place_of_a_file_counts_as_changed(package: Path) -> None:
    path = package / "_C.so"
    path.unlink()
    path.mkdir()
    assert read(package).changed == ("flash_dist/_C.so",)


def refuse(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Make files of these names unreadable for this user, even as root."""

    def opens(path: Path, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - as Path.open
        if path.name in names:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return open(path, *args, **options)  # noqa: PTH123 - what is stood in for

    monkeypatch.setattr(Path, "open", opens)


def test_files_that_this_user_may_not_read_are_no_damage(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, "_C.so")
    files = read(package)
    assert (files.changed, files.unreadable) == ((), ("flash_dist/_C.so",))
    status, cause, summary, fix = check(files)
    assert (status, cause) == ("fail", "install-unreadable")
    assert f" 1 file in {package.parent}: flash_dist/_C" in summary
    assert fix == f"as its owner: `chmod -R a+rX '{package}'*`"


def test_a_library_that_this_user_may_not_read_is_not_to_be_installed_again(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (package / KERNELS).write_bytes(b"\x7fELF" * 100)
    refuse(monkeypatch, KERNELS)
    installed = replace(read_installed(package), build=make_environment(HOPPER).installed.build)
    result = check_build(replace(make_environment(HOPPER), installed=installed))
    assert result.summary.endswith("Permission denied")
    assert "`ls -ld`" in result.fix


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python has a module for zstd")
def test_a_library_that_this_python_cannot_unpack_is_not_to_be_installed_again(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = entry(SASS, 90, cubin(Kernel("alpha")), codec="zstd")
    (package / KERNELS).write_bytes(library(container(image)))
    for name in ("backports", "backports.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    found = read_installed(package)
    installed = replace(found, build=make_environment(HOPPER).installed.build)
    result = check_build(replace(make_environment(HOPPER), installed=installed))
    assert "zstd" in result.summary
    assert result.fix == "`python -m pip install backports.zstd`"


@pytest.mark.parametrize(
    "record",
    [
        b"flash_dist/x.py,sha256=,many\n",
        b"\x80\xff\n",
        b"one,two,3,four\n",
        b"",
        b"x" * 200_000,
    ],
    ids=["no number", "no text", "too long a row", "empty", "too long a field"],
)
def test_a_record_that_cannot_be_read_is_a_finding(package: Path, record: bytes) -> None:
    info = next(package.parent.glob("*.dist-info"))
    (info / "RECORD").write_bytes(record)
    files = read(package)
    assert files.changed == (f"{info.name}/RECORD",)
    assert check(files)[:2] == ("fail", "install-damaged")


def test_a_record_that_this_user_may_not_read_is_no_damage(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    monkeypatch.setattr("importlib.metadata.PathDistribution.files", None)
    assert read(package).unreadable[0].endswith("RECORD")
