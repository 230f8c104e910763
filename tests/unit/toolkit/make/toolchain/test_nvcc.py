from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.make.compile.parts import CUDA_13, package_version
from flash_dist.toolkit.make.toolchain.nvcc import (
    Toolchain,
    ToolchainError,
    complete_links,
    find_toolchain,
    keep_toolkit,
    named_home,
)

if TYPE_CHECKING:
    from pathlib import Path


def make_toolkit(folder: Path, release: str = "13.0, V13.0.88") -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "lib").mkdir()
    for tool in ("nvcc", "ptxas"):
        script = folder / "bin" / tool
        script.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}'\n")
        script.chmod(0o755)
    return folder


def test_cuda_home_is_honoured(tmp_path: Path) -> None:
    home = make_toolkit(tmp_path / "cuda")
    found = find_toolchain({"CUDA_HOME": str(home)})
    assert (found.home, found.cuda, found.nvcc, found.ptxas) == (home, "13.0", "13.0.88", "13.0.88")


@pytest.mark.parametrize("value", ["", "  "])
def test_an_empty_cuda_home_is_none(value: str) -> None:
    assert named_home({"CUDA_HOME": value}) is None


def test_a_wrong_cuda_home_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match=r"has no bin/nvcc[\s\S]*unset CUDA_HOME"):
        find_toolchain({"CUDA_HOME": str(tmp_path)})


def test_a_toolkit_that_tells_no_version_is_an_error(tmp_path: Path) -> None:
    home = make_toolkit(tmp_path / "cuda", release="unknown")
    with pytest.raises(ToolchainError, match="does not say a version"):
        find_toolchain({"CUDA_HOME": str(home)})


def test_without_any_toolkit_the_way_out_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(ToolchainError, match="nox -s build_wheels"):
        find_toolchain({})


def test_the_toolkit_of_pypi_gets_the_names_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make_toolkit(tmp_path / "nvidia" / "cu13")
    (home / "lib" / "libcudart.so.13").write_text("")
    (tmp_path / "nvidia_cuda_nvcc-13.0.88.dist-info").mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path)])  # where pip's isolated build has nvcc
    assert find_toolchain({}).home == home
    complete_links(home)  # repeating it changes nothing
    assert (home / "lib64").readlink().name == "lib"
    assert (home / "lib64" / "libcudart.so").resolve().name == "libcudart.so.13"


def test_a_kept_toolkit_is_copied_once_and_again_when_the_copy_was_cut_short(
    tmp_path: Path,
) -> None:
    home = make_toolkit(tmp_path / "temporary")
    kept = keep_toolkit(home, tmp_path / "build")
    assert kept == tmp_path / "build" / "cuda-13.0.88"
    (kept / "bin" / "nvcc").write_text("mine")
    assert keep_toolkit(home, tmp_path / "build") == kept
    assert (kept / "bin" / "nvcc").read_text() == "mine"
    (kept / "complete").unlink()
    keep_toolkit(home, tmp_path / "build")
    assert (kept / "bin" / "nvcc").read_text() != "mine"


def test_a_kept_toolkit_knows_the_versions_of_its_packages(tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    home = make_toolkit(site / "nvidia" / "cu13")
    old = keep_toolkit(home, tmp_path / "build")  # as kept by an earlier version
    assert not (old / "dist-info").exists()
    for name in ("nvidia_cuda_runtime-13.0.96", "nvidia_cuda_crt-13.0.88", "rich-15.0.0"):
        (site / f"{name}.dist-info").mkdir()
    kept = keep_toolkit(home, tmp_path / "build")
    assert (
        package_version(Toolchain(kept, "13.0.88", "13.0.88"), "nvidia-cuda-runtime") == "13.0.96"
    )
    assert not list(kept.glob("dist-info/rich*"))
    (kept / "mine").touch()
    keep_toolkit(home, tmp_path / "build")
    assert (kept / "mine").exists()


@pytest.mark.parametrize(
    ("text", "versions"),
    [
        (
            '{"cuda_cudart": {"version": "13.0.96"}, "cuda_nvcc": {"version": "13.0.88"}}',
            ("13.0.96", "13.0.88", "13.0.88"),
        ),
        ("[]", ("13.0", "13.0.88", "13.0.88")),
        ("", ("13.0", "13.0.88", "13.0.88")),
    ],
)
def test_a_toolkit_from_elsewhere_is_asked_for_its_versions(
    text: str, versions: tuple[str, ...], tmp_path: Path
) -> None:
    home = make_toolkit(tmp_path / "local" / "cuda")
    (home / "version.json").write_text(text)
    toolchain = Toolchain(home, "13.0.88", "13.0.88")
    assert tuple(package_version(toolchain, package) for package in CUDA_13) == versions
