"""Describes the GPUs' host: driver libraries, kernel module, device files, container, JIT cache.

This module reads files and NVML, without torch and without a GPU. Sources: NVIDIA driver README,
"Installed Components" and "/proc interface" (libraries, device files, /proc/driver/nvidia); CUDA
Compatibility guide, "Forward Compatibility" (cuda-compat); CUDA on WSL guide (libraries of Windows'
driver in /usr/lib/wsl/lib, /dev/dxg instead of /dev/nvidia*); CUDA Programming Guide, "CUDA
Environment Variables" (CUDA_CACHE_PATH, by default `~/.nv/ComputeCache`; CUDA_CACHE_MAXSIZE, by
default 1 GiB, 256 MiB on embedded platforms and at most 4 GiB: larger code is not stored, newer
code replaces older).
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from ..binaries.files import read_if_possible
from ..findings.host import (
    JIT_CACHE_DISABLED,
    JIT_CACHE_FULL,
    JIT_CACHE_HOMELESS,
    JIT_CACHE_READ_ONLY,
    JIT_CACHE_SMALL,
)
from ..findings.result import Finding
from ..targets.compatibility import is_set
from ..targets.devices import DRIVER_CUDA
from ..targets.wording import read_whole
from .libcuda import parse_release
from .loader_path import LoaderPath, find_loaded
from .nvml import Nvml, read_nvml

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

WSL_FOLDER: Final = "/usr/lib/wsl"
DEFAULT_LIMIT: Final = 1 << 30  # bytes of the JIT cache

# A JIT cache with less room counts as too small: attention compiled from compute_80 took 51 MiB and
# more on an H200.
ENOUGH_BYTES: Final = 128 << 20

# Folders of libcuda that the loader of some systems does not search.
_OTHER_FOLDERS = (
    f"{WSL_FOLDER}/lib",
    "/usr/local/nvidia/lib64",
    "/run/opengl-driver/lib",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
)
_CONTAINER_FILES = (("/.dockerenv", "docker"), ("/run/.containerenv", "podman"))
_CGROUP = re.compile(r"docker|kubepods|containerd|libpod|lxc|cri-o|garden")


@dataclass(frozen=True)
class DeviceFile:
    """A device file of the driver, and whether this process may open it."""

    path: str
    allowed: bool


@dataclass(frozen=True)
class JitCache:
    """The folder of the JIT cache.

    Status `absent` means that the driver can create the folder, `homeless` that neither HOME nor
    CUDA_CACHE_PATH is set.
    """

    folder: str
    status: Literal["writable", "absent", "read-only", "homeless"]
    free_bytes: int | None = None  # free bytes on the disk; None: unknown
    limit_bytes: int = DEFAULT_LIMIT

    def to_json(self) -> dict[str, Any]:
        """Return the cache as plain data."""
        return {**vars(self), "folder": self.folder or None}


@dataclass(frozen=True)
class Host:
    """Facts about the GPUs' host. An empty path or name means that the host has none."""

    container: str = ""  # container runtime, such as "docker"
    wsl: bool = False
    libcuda: str = ""  # the file that is loaded, or would be loaded
    stray_libcuda: str = ""  # a libcuda outside the loader's path
    jit_compiler: str = ""
    module_release: str = ""  # release of the kernel module, from /proc
    module_gpus: int = 0  # GPUs of the kernel module, also if hidden from a container
    device_files: tuple[DeviceFile, ...] = ()
    dxg: bool = False  # whether WSL's device for GPUs exists
    cache: JitCache | None = None
    nvml: Nvml = field(default_factory=lambda: Nvml("absent", reason="not asked"))

    @property
    def libcuda_kind(self) -> Literal["", "driver", "compat", "wsl"]:
        """Origin of libcuda: driver, forward-compatibility package or Windows; empty if absent."""
        if not self.libcuda:
            return ""
        if self.libcuda.startswith(WSL_FOLDER):
            return "wsl"
        folders = Path(self.libcuda).parts[:-1]
        return "compat" if any("compat" in part.lower() for part in folders) else "driver"

    @property
    def libcuda_release(self) -> str:
        """The release in the name of the file, such as 580.65.06; empty if it has none."""
        match = re.search(r"libcuda\.so\.([0-9]{3,4}(?:\.[0-9]+)+)$", self.libcuda)
        return match[1] if match else ""

    @property
    def lacks_jit_compiler(self) -> bool:
        """Tell if the JIT compiler is missing.

        False unless the file name of libcuda contains a known release: only these drivers are known
        to have the compiler next to libcuda. On Jetson the name has no release; on WSL the compiler
        is in a folder of Windows.
        """
        branch = self.libcuda_release.partition(".")[0]
        known = branch.isdecimal() and int(branch) <= max(DRIVER_CUDA)
        return known and not self.jit_compiler and not self.wsl

    @property
    def denied(self) -> tuple[str, ...]:
        """The device files that this process may not open."""
        return tuple(file.path for file in self.device_files if not file.allowed)

    def to_json(self) -> dict[str, Any]:
        """Return the host as plain data."""
        return {
            "container": self.container or None,
            "wsl": self.wsl,
            "libcuda": self.libcuda or None,
            "libcuda_kind": self.libcuda_kind or None,
            "libcuda_release": self.libcuda_release or None,
            "stray_libcuda": self.stray_libcuda or None,
            "jit_compiler": self.jit_compiler or None,
            "module_release": self.module_release or None,
            "module_gpus": self.module_gpus,
            "device_files": [vars(file) for file in self.device_files],
            "dxg": self.dxg,
            "jit_cache": self.cache.to_json() if self.cache else None,
            "nvml": self.nvml.to_json(),
        }


def gather_host(
    environ: Mapping[str, str],
    *,
    root: Path = Path("/"),
    may_use: Callable[[Path, int], bool] = os.access,
    nvml: Callable[[], Nvml] = read_nvml,
) -> Host:
    """Describe the host. Call this after `read_cuda`, to report the loaded file of libcuda.

    Args:
        environ: Environment variables of this process.
        root: The root directory; another directory in tests.
        may_use: Function like `os.access`.
        nvml: Function that asks NVML.
    """
    path = LoaderPath.read(environ, root)
    libcuda = find_loaded("libcuda.so", root) or path.find("libcuda.so.1")
    drivers = f"{WSL_FOLDER}/drivers"  # folder of the Windows driver
    others = (*_OTHER_FOLDERS, *(f"{drivers}/{name}" for name in _list(root / drivers[1:])))
    beside, jit = (str(Path(libcuda).parent),) if libcuda else (), "libnvidia-ptxjitcompiler.so.1"
    return Host(
        container=find_container(environ, root),
        wsl="microsoft" in read_if_possible(root / "proc/sys/kernel/osrelease").lower(),
        libcuda=libcuda,
        stray_libcuda="" if libcuda else path.find_in(others, "libcuda.so.1"),
        jit_compiler=path.find_in(beside, jit) or path.find(jit) or path.find_in(others, jit),
        module_release=parse_release(read_if_possible(root / "proc/driver/nvidia/version")),
        module_gpus=len(_list(root / "proc/driver/nvidia/gpus")),
        device_files=tuple(_read_device_files(root, may_use)),
        dxg=(root / "dev/dxg").exists(),
        cache=read_jit_cache(environ, root, may_use),
        nvml=nvml(),
    )


def find_container(environ: Mapping[str, str], root: Path) -> str:
    """Return the container runtime of this process; empty outside of a container."""
    if "KUBERNETES_SERVICE_HOST" in environ:
        return "kubernetes"
    for path, kind in _CONTAINER_FILES:
        if (root / path.lstrip("/")).exists():
            return kind
    match = _CGROUP.search(read_if_possible(root / "proc/1/cgroup"))
    return match[0] if match else environ.get("container", "")


def _read_device_files(root: Path, may_use: Callable[[Path, int], bool]) -> Iterable[DeviceFile]:
    for name in _list(root / "dev"):
        if re.fullmatch(r"nvidia([0-9]+|ctl|-uvm)", name):
            yield DeviceFile(f"/dev/{name}", may_use(root / "dev" / name, os.R_OK | os.W_OK))


def _list(folder: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(os.listdir(folder)))  # noqa: PTH208 - names only
    except OSError:
        return ()


def read_jit_cache(
    environ: Mapping[str, str],
    root: Path = Path("/"),
    may_use: Callable[[Path, int], bool] = os.access,
) -> JitCache:
    """Examine the folder of the JIT cache without creating it."""
    limit = read_limit(environ.get("CUDA_CACHE_MAXSIZE", ""))
    folder = environ.get("CUDA_CACHE_PATH", "")
    if not folder and environ.get("HOME"):
        folder = f"{environ['HOME']}/.nv/ComputeCache"
    if not folder:
        return JitCache("", "homeless", limit_bytes=limit)
    place = root / Path(folder).absolute().relative_to("/")
    nearest = next((path for path in (place, *place.parents) if _exists(path)), root)
    if not nearest.is_dir() or not may_use(nearest, os.R_OK | os.W_OK | os.X_OK):
        return JitCache(folder, "read-only", limit_bytes=limit)
    status: Literal["writable", "absent"] = "writable" if nearest == place else "absent"
    return JitCache(folder, status, _read_free(nearest), limit)


def find_cache_problem(variables: Mapping[str, str], cache: JitCache | None) -> Finding | None:
    """Return what prevents caching, or None. If `cache` is None, only check the variables."""
    if is_set(variables, "CUDA_CACHE_DISABLE"):
        fix = "`unset CUDA_CACHE_DISABLE`"
        return Finding(JIT_CACHE_DISABLED, "CUDA_CACHE_DISABLE is set", fix=fix)
    limit = read_limit(variables.get("CUDA_CACHE_MAXSIZE", ""))
    if limit < ENOUGH_BYTES:
        reason = f"CUDA_CACHE_MAXSIZE={limit} is too small a cache for the compiled kernels"
        fix = f"`unset CUDA_CACHE_MAXSIZE`, or set it to {ENOUGH_BYTES} or more"
        return Finding(JIT_CACHE_SMALL, reason, fix=fix)
    return None if cache is None else _find_folder_problem(cache)


def _find_folder_problem(cache: JitCache) -> Finding | None:
    fix = "`export CUDA_CACHE_PATH=/path/to/folder` sets a writable folder with free space"
    if cache.status == "homeless":
        reason = "the JIT cache has no folder, as neither HOME nor CUDA_CACHE_PATH is set"
        return Finding(JIT_CACHE_HOMELESS, reason, fix=fix)
    if cache.status == "read-only":
        reason = f"the JIT cache {cache.folder} is not writable"
        return Finding(JIT_CACHE_READ_ONLY, reason, fix=fix)
    if cache.free_bytes is not None and cache.free_bytes < ENOUGH_BYTES:
        free = f"{cache.free_bytes >> 20} MiB free"
        reason = f"the JIT cache {cache.folder} is on a full disk ({free})"
        return Finding(JIT_CACHE_FULL, reason, fix=fix)
    return None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a parent folder may be unreadable
        return False


def _read_free(folder: Path) -> int | None:
    """Return the free bytes; None if the file system does not report them."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return usage.free if usage.total else None


def read_limit(text: str) -> int:
    """Read the limit of the JIT cache in bytes; return DEFAULT_LIMIT for malformed text."""
    number = read_whole(text.strip())
    return DEFAULT_LIMIT if number is None else number
