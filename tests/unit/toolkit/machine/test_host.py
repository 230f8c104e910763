"""Describing the GPUs' host: planted root folders, and an NVML compiled for the test."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from flash_dist.toolkit.machine.host import (
    DEFAULT_LIMIT,
    ENOUGH_BYTES,
    Host,
    find_cache_problem,
    find_container,
    gather_host,
    read_jit_cache,
)
from flash_dist.toolkit.machine.loader_path import LoaderPath, find_loaded
from flash_dist.toolkit.machine.nvml import Nvml
from tests.unit.made.library_builder import make_cache

ELF = Path(sys.executable).read_bytes()[:64]  # an ELF header for this machine
FOLDER = "usr/lib/x86_64-linux-gnu"
MODULE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Release Build\n"


def write(root: Path, name: str, text: str = "") -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def plant_library(root: Path, folder: str, name: str, release: str) -> None:
    """Put a library and its link, as a driver's installer does."""
    write(root, f"{folder}/{name}.{release}").write_bytes(ELF)
    (root / folder / f"{name}.1").symlink_to(f"{name}.{release}")


def plant_driver(root: Path) -> None:
    """Plant the files of a driver on a machine with one GPU."""
    plant_library(root, FOLDER, "libcuda.so", "580.65.06")
    plant_library(root, FOLDER, "libnvidia-ptxjitcompiler.so", "580.65.06")
    write(root, "proc/driver/nvidia/version", MODULE)
    write(root, "proc/driver/nvidia/gpus/0000:01:00.0/information")
    for name in ("nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "null"):
        write(root, f"dev/{name}")


def look(root: Path, **environ: str) -> Host:
    return gather_host(environ, root=root, nvml=lambda: Nvml("ok"))


def test_a_driver_is_found_with_all_its_parts(tmp_path: Path) -> None:
    plant_driver(tmp_path)
    host = look(tmp_path)
    assert host.libcuda == f"/{FOLDER}/libcuda.so.580.65.06"
    assert (host.libcuda_kind, host.libcuda_release) == ("driver", "580.65.06")
    assert host.jit_compiler == f"/{FOLDER}/libnvidia-ptxjitcompiler.so.580.65.06"
    assert (host.module_release, host.module_gpus) == ("580.65.06", 1)
    assert [file.path for file in host.device_files] == [
        "/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidiactl",
    ]  # fmt: skip
    assert host.denied == ()
    assert (host.container, host.wsl, host.dxg) == ("", False, False)
    assert not host.lacks_jit_compiler


def test_an_empty_root_has_nothing(tmp_path: Path) -> None:
    host = look(tmp_path)
    assert (host.libcuda, host.libcuda_kind, host.module_release, host.device_files) == (
        "", "", "", (),
    )  # fmt: skip
    assert host.cache is not None
    assert host.cache.status == "homeless"
    assert json.loads(json.dumps(host.to_json()))["libcuda"] is None


def test_the_library_that_was_loaded_counts_not_the_one_on_the_path(tmp_path: Path) -> None:
    plant_driver(tmp_path)
    loaded = "/usr/local/cuda-12.8/compat/libcuda.so.570.86.10"
    line = f"7f00-7f01 r-xp 00000000 08:01 42                     {loaded}\n"
    write(tmp_path, "proc/self/maps", "7f00-7f01 rw-p 00000000 00:00 0\n" + line)
    host = look(tmp_path)
    assert (host.libcuda, host.libcuda_kind) == (loaded, "compat")
    assert host.libcuda_release == "570.86.10"


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("usr/local/cuda-12.8/compat", "compat"),
        ("opt/conda/cuda-compat", "compat"),
        ("usr/lib/wsl/lib", "wsl"),
        ("opt/driver", "driver"),
    ],
)
def test_the_folder_of_libcuda_tells_where_it_is_from(
    tmp_path: Path, folder: str, kind: str
) -> None:
    plant_driver(tmp_path)
    plant_library(tmp_path, folder, "libcuda.so", "570.86.10")
    host = look(tmp_path, LD_LIBRARY_PATH=f"relative::/nowhere:/{folder}")
    assert host.libcuda == f"/{folder}/libcuda.so.570.86.10"
    assert host.libcuda_kind == kind


def test_a_libcuda_that_the_loader_does_not_see_is_a_stray_one(tmp_path: Path) -> None:
    plant_library(tmp_path, "usr/lib/wsl/lib", "libcuda.so", "1.1")
    plant_library(tmp_path, "usr/local/cuda/compat", "libcuda.so", "570.86.10")
    host = look(tmp_path)
    assert (host.libcuda, host.stray_libcuda) == ("", "/usr/lib/wsl/lib/libcuda.so.1.1")
    write(tmp_path, "etc/ld.so.cache").write_bytes(
        make_cache(("libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1"))
    )
    host = look(tmp_path)
    assert (host.libcuda, host.stray_libcuda) == ("/usr/lib/wsl/lib/libcuda.so.1.1", "")


def test_wsl_is_known_and_its_jit_compiler_is_not_missed(tmp_path: Path) -> None:
    plant_library(tmp_path, "usr/lib/wsl/lib", "libcuda.so", "1.1")
    write(tmp_path, "proc/sys/kernel/osrelease", "5.15.153.1-microsoft-standard-WSL2\n")
    write(tmp_path, "dev/dxg")
    host = look(tmp_path, LD_LIBRARY_PATH="/usr/lib/wsl/lib")
    assert host.wsl
    assert host.dxg
    assert (host.jit_compiler, host.lacks_jit_compiler) == ("", False)
    drivers = "usr/lib/wsl/drivers/nv_dispi.inf_1"
    write(tmp_path, f"{drivers}/libnvidia-ptxjitcompiler.so.1").write_bytes(ELF)
    assert look(tmp_path).jit_compiler.startswith("/usr/lib/wsl/drivers/nv_dispi.inf_1/")


def test_a_missing_jit_compiler_is_reported_if_the_driver_should_have_one(tmp_path: Path) -> None:
    plant_library(tmp_path, FOLDER, "libcuda.so", "580.65.06")
    assert look(tmp_path).lacks_jit_compiler
    newer = Host(libcuda=f"/{FOLDER}/libcuda.so.999.10")  # a driver with unknown parts
    jetson = Host(libcuda="/usr/lib/aarch64-linux-gnu/nvidia/libcuda.so.1.1")
    assert not newer.lacks_jit_compiler
    assert not jetson.lacks_jit_compiler


def test_device_files_that_may_not_be_opened_are_listed(tmp_path: Path) -> None:
    plant_driver(tmp_path)

    def may_use(path: Path, mode: int) -> bool:
        assert mode & (os.R_OK | os.W_OK)
        return path.name != "nvidia0"

    host = gather_host({}, root=tmp_path, may_use=may_use, nvml=lambda: Nvml("ok"))
    assert host.denied == ("/dev/nvidia0",)


@pytest.mark.parametrize(
    ("name", "text", "environ", "kind"),
    [
        (".dockerenv", "", {}, "docker"),
        ("run/.containerenv", "", {}, "podman"),
        ("proc/1/cgroup", "0::/kubepods/besteffort/pod1\n", {}, "kubepods"),
        ("proc/1/cgroup", "0::/init.scope\n", {}, ""),
        ("proc/1/cgroup", "0::/\n", {"container": "lxc"}, "lxc"),
        (".dockerenv", "", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
    ],
)
def test_a_container_is_known_by_what_its_maker_left(
    tmp_path: Path, name: str, text: str, environ: dict[str, str], kind: str
) -> None:
    write(tmp_path, name, text)
    assert find_container(environ, tmp_path) == kind


def test_a_libcuda_of_another_machine_is_passed_over(tmp_path: Path) -> None:
    plant_driver(tmp_path)
    folder = "usr/lib/i386-linux-gnu"
    write(tmp_path, f"{folder}/libcuda.so.1").write_bytes(b"\x7fELF\x01\x01\x01" + ELF[7:])
    named = tuple(f"/{one}/libcuda.so.1" for one in (folder, FOLDER))
    cache = make_cache(*(("libcuda.so.1", name) for name in named))
    write(tmp_path, "etc/ld.so.cache").write_bytes(cache)
    assert look(tmp_path).libcuda == f"/{FOLDER}/libcuda.so.580.65.06"


def test_a_library_that_is_nowhere_is_an_empty_name(tmp_path: Path) -> None:
    path = LoaderPath.read({"LD_LIBRARY_PATH": "/a:/b"}, tmp_path)
    assert path.find("libcuda.so.1") == path.find_in(("/a", "/c"), "libcuda.so.1") == ""
    assert find_loaded("libcuda.so", tmp_path) == ""


def test_this_process_knows_what_it_loaded() -> None:
    assert Path(find_loaded("libc.so", Path("/")) or "/lib/libc.so").name.startswith("libc.so")


# --- the JIT cache --------------------------------------------------------------------------------


def test_the_jit_cache_lies_in_the_home_folder_unless_told(tmp_path: Path) -> None:
    (tmp_path / "home/me").mkdir(parents=True)
    cache = read_jit_cache({"HOME": "/home/me"}, tmp_path)
    assert (cache.folder, cache.status) == ("/home/me/.nv/ComputeCache", "absent")
    assert cache.limit_bytes == DEFAULT_LIMIT
    assert cache.free_bytes
    (tmp_path / "fast").mkdir()
    told = {"HOME": "/home/me", "CUDA_CACHE_PATH": "/fast", "CUDA_CACHE_MAXSIZE": "4096"}
    cache = read_jit_cache(told, tmp_path)
    assert (cache.folder, cache.status, cache.limit_bytes) == ("/fast", "writable", 4096)


def test_a_jit_cache_below_a_file_or_a_closed_folder_is_read_only(tmp_path: Path) -> None:
    write(tmp_path, "file")
    assert read_jit_cache({"CUDA_CACHE_PATH": "/file/x"}, tmp_path).status == "read-only"
    closed = read_jit_cache({"CUDA_CACHE_PATH": "/x"}, tmp_path, lambda *_: False)
    assert closed.status == "read-only"
    assert read_jit_cache({}, tmp_path).status == "homeless"


@pytest.mark.parametrize("text", ["", "1e9", "-1", "much"])
def test_a_limit_that_is_no_number_is_the_default(text: str, tmp_path: Path) -> None:
    assert read_jit_cache({"CUDA_CACHE_MAXSIZE": text}, tmp_path).limit_bytes == DEFAULT_LIMIT


def test_a_cache_that_nobody_looked_at_is_judged_by_the_variables() -> None:
    assert find_cache_problem({}, None) is None
    small = find_cache_problem({"CUDA_CACHE_MAXSIZE": str(ENOUGH_BYTES - 1)}, None)
    assert small is not None
    assert small.id == "jit-cache-small"
    assert find_cache_problem({"CUDA_CACHE_MAXSIZE": str(ENOUGH_BYTES)}, None) is None
    assert find_cache_problem({"CUDA_CACHE_DISABLE": "0"}, None) is None
