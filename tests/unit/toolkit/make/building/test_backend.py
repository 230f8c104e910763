from __future__ import annotations

import importlib.metadata
import os
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.make.building import backend
from flash_dist.toolkit.make.container.settings import cibuildwheel_settings
from flash_dist.toolkit.make.project import PYPROJECT, load_groups, load_project, load_requirements
from flash_dist.toolkit.make.toolchain import torch_headers

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from pathlib import Path

DATA = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_HOME", "FLASH_DIST_ARCH_SET", "FLASH_DIST_BUILD_DIR", "MAX_JOBS"):
        monkeypatch.delenv(name, raising=False)
    gxx = tmp_path / "g++-here"
    gxx.write_text("#!/bin/sh\necho 12.2.0\n")
    gxx.chmod(gxx.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(gxx))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a")
    monkeypatch.setenv("TORCH_ROOT", str(tmp_path))  # avoids downloading headers
    monkeypatch.setattr(
        "flash_dist.toolkit.make.toolchain.nvcc.importlib.metadata.distribution", _none_installed
    )


def _none_installed(name: str) -> None:
    raise importlib.metadata.PackageNotFoundError(name)


def test_the_frontend_installs_nothing_before_the_preflight() -> None:
    assert DATA["build-system"]["requires"] == []
    assert DATA["build-system"]["build-backend"] == "flash_dist.toolkit.make.building.backend"


def test_every_tool_of_a_build_by_pip_is_one_of_a_build_by_nox() -> None:
    assert load_groups()["build"][0] == {"include-group": "backend"}


def test_the_preflight_needs_no_package_that_a_fresh_environment_lacks() -> None:
    call = "print(len(backend.get_requires_for_build_wheel()))"
    backend = "from flash_dist.toolkit.make.building import backend"
    code = f"import sys; sys.path.append({str(PYPROJECT.parent)!r}); {backend}; {call}"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], check=True, capture_output=True, text=True
    )
    assert done.stdout.endswith(f"\n{len(load_groups()['backend']) + 1}\n")


def test_the_tools_are_read_from_pyproject_without_a_reader_of_toml() -> None:
    assert load_requirements("backend") == load_groups()["backend"]


def test_cibuildwheel_repairs_and_audits_by_itself() -> None:
    assert cibuildwheel_settings()["CIBW_CONFIG_SETTINGS"] == f"{backend.UNFINISHED}=true"
    assert "cibuildwheel" not in DATA["tool"]


def test_nvcc_comes_from_pypi_where_cuda_home_names_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    needed = backend.get_requires_for_build_wheel()
    assert needed == [*load_requirements("backend"), "cuda-toolkit[nvcc,cccl]==13.0.*"]
    told = capsys.readouterr().out
    assert "preflight: CUDA 13.0, g++ 12.2" in told
    assert "building for what TORCH_CUDA_ARCH_LIST says: sm_90a" in told


def test_torch_comes_with_the_tools_where_nothing_else_has_its_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_ROOT")
    monkeypatch.setenv("FLASH_DIST_BUILD_DIR", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    for name in ("find_local_wheel", "find_own_torch", "find_torch"):
        monkeypatch.setattr(torch_headers, name, lambda *_: None)
    assert f"torch>={load_project().torch_min}" in backend.get_requires_for_build_wheel()


def test_a_caller_that_finishes_the_wheel_itself_is_asked_for_the_tools_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "nonsense")
    needed = backend.get_requires_for_build_wheel({backend.UNFINISHED: "true"})
    assert needed == load_requirements("backend")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("CXX", "nonsense", "no C++ compiler `nonsense` was found"),
        ("TORCH_CUDA_ARCH_LIST", "9.5", "unknown architecture `9.5`"),
        ("CUDA_HOME", "/nowhere", "CUDA_HOME is `/nowhere`, which has no bin/nvcc"),
        ("MAX_JOBS", "many", "MAX_JOBS is the number of compilers that run at a time, got `many`"),
    ],
)
def test_a_build_that_fails_ends_in_one_sentence_and_a_hint(
    name: str, value: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as caught:
        backend.get_requires_for_build_wheel()
    told = str(caught.value.code)
    assert told.startswith(f"error: {sentence}")
    assert told.count("\n\nhint: ") == 1


def test_a_build_without_isolation_names_the_module_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "setuptools", None)
    monkeypatch.delitem(sys.modules, backend.__package__ + ".pack", raising=False)
    for build in (backend.build_sdist, backend.prepare_metadata_for_build_wheel):
        with pytest.raises(SystemExit) as caught:
            build(str(tmp_path))
        told = str(caught.value.code)
        assert told.startswith("error: the build needs the module `setuptools`")
        assert told.endswith("\n\nhint: leave `--no-build-isolation` out")


def test_an_editable_install_ends_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="not installed in editable mode"):
        backend.build_editable("dist")
    monkeypatch.setenv("PIP_BUILD_TRACKER", "folder")
    with pytest.raises(SystemExit, match="not installed in editable mode"):
        backend.get_requires_for_build_editable()


def test_uv_locks_a_project_by_the_metadata_of_an_editable_wheel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PIP_BUILD_TRACKER", raising=False)
    assert backend.get_requires_for_build_editable() == load_requirements("backend")
    assert backend.prepare_metadata_for_build_editable is backend.prepare_metadata_for_build_wheel


def test_the_environment_of_a_build_depends_on_nothing_that_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "nvcc").touch()
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    backend.settle_environment()
    assert os.environ["SOURCE_DATE_EPOCH"] == str(load_project().source_date_epoch)
    assert os.environ["FLASH_DIST_BUILD_DIR"] == str(PYPROJECT.parent / "build" / "pip")
    assert os.environ["CUDA_HOME"] == str(home)
