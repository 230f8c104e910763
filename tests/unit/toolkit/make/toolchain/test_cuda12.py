"""A CUDA 12.4 toolkit is assembled from Debian's package and PyPI's."""

from __future__ import annotations

import hashlib
import io
import tarfile
from typing import TYPE_CHECKING

import pytest

from ci.install_tests.clients import serve
from flash_dist.toolkit.make.project import load_requirements
from flash_dist.toolkit.make.toolchain.cuda12 import (
    DEBIAN,
    PACKAGES,
    PROGRAMS,
    Download,
    assemble_toolkit,
    fetch_package,
)
from flash_dist.toolkit.make.toolchain.nvcc import ToolchainError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def write_deb(path: Path, names: Iterable[str]) -> Path:
    """Write a Debian package whose files hold their own names."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as archive:
        for name in names:
            entry = tarfile.TarInfo(f"./{name}")
            entry.size = len(name)
            archive.addfile(entry, io.BytesIO(name.encode()))
    members = {"debian-binary": b"2.0\n", "control.tar.xz": b"", "data.tar.xz": data.getvalue()}
    with path.open("wb") as file:
        file.write(b"!<arch>\n")
        for name, content in members.items():
            file.write(f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode())
            file.write(content + b"\n" * (len(content) % 2))
    return path


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """Install the used files of PyPI's packages."""
    files = {
        "12.4/nvidia/cuda_cccl/include/nv/target": "",
        "12.4/nvidia/cuda_nvcc/include/crt/host_config.h": "",
        "12.4/nvidia/cuda_nvcc/nvvm/libdevice/libdevice.10.bc": "",
        "12.4/nvidia/cuda_nvcc/bin/ptxas": "12.4",
        "12.4/nvidia/cuda_runtime/include/cuda.h": "",
        "12.4/nvidia/cuda_runtime/lib/libcudart.so.12": "runtime",
        "12.4/nvidia_cuda_runtime_cu12-12.4.127.dist-info/METADATA": "",
        "12.9/nvidia/cuda_nvcc/bin/ptxas": "12.9",
        "12.9/nvidia_cuda_nvcc_cu12-12.9.86.dist-info/METADATA": "",
    }
    for name, text in files.items():
        path = tmp_path / "parts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "parts"


def test_every_program_comes_to_its_place(parts: Path, tmp_path: Path) -> None:
    deb = write_deb(tmp_path / "toolkit.deb", [*PROGRAMS, "usr/share/doc/licence"])
    home = tmp_path / "home"
    assemble_toolkit(parts, home, deb)
    for name, target in PROGRAMS.items():
        assert (home / target).read_text() == name
        assert (home / target).stat().st_mode & 0o111
    assert (home / "bin" / "ptxas").read_text() == "12.9"  # the version that spills less
    assert (home / "lib64" / "libcudart.so").read_text() == "runtime"
    for name in ("nv/target", "crt/host_config.h", "cuda.h"):
        assert (home / "include" / name).is_file()
    assert [path.name for path in (home / "dist-info").iterdir()] == [
        "nvidia_cuda_runtime_cu12-12.4.127.dist-info"
    ]
    assert not list(home.rglob("licence"))


def test_a_package_without_a_program_is_refused(parts: Path, tmp_path: Path) -> None:
    lacking = write_deb(tmp_path / "toolkit.deb", [one for one in PROGRAMS if "cicc" not in one])
    with pytest.raises(ToolchainError, match=r"`toolkit\.deb` lacks .*bin/cicc"):
        assemble_toolkit(parts, tmp_path / "home", lacking)


def make_download(*urls: str, content: bytes = b"package") -> Download:
    return Download(urls, hashlib.sha256(content).hexdigest(), len(content))


def test_the_next_address_is_tried_and_the_file_kept(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "x.deb").write_bytes(b"package")
    with serve(site) as url:
        download = make_download(f"{url}gone/x.deb", f"{url}x.deb")
        path = fetch_package(download, tmp_path / "kept")
    assert path.read_bytes() == b"package"
    assert fetch_package(download, tmp_path / "kept") == path  # without the server
    assert [one.name for one in path.parent.iterdir()] == ["x.deb"]


def test_another_file_than_the_pinned_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.deb").write_bytes(b"packagf")
    with pytest.raises(ToolchainError, match=r"`x\.deb` has SHA-256 .*, expected"):
        fetch_package(make_download("http://127.0.0.1:9/x.deb"), tmp_path)
    assert not (tmp_path / "x.deb").exists()


def test_without_a_network_there_is_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match=r"cannot be fetched[\s\S]*put the file into") as error:
        fetch_package(make_download("http://127.0.0.1:9/x.deb"), tmp_path)
    assert "127.0.0.1" in error.value.message


def test_every_part_is_pinned() -> None:
    packages = [one for group in PACKAGES.values() for one in load_requirements(group)]
    assert all("==" in one for one in packages)
    assert any("==12.4." in one for one in packages)
    assert len(DEBIAN.sha256) == 64
    assert len({url.rpartition("/")[2] for url in DEBIAN.urls}) == 1
