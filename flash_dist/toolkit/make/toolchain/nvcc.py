"""Finds nvcc: in CUDA_HOME if set, else in the `cuda-toolkit` package of this Python."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...errors import KernelsError
from ...product import VARIABLES
from ..project import made_mark, make_once

if TYPE_CHECKING:
    from collections.abc import Mapping


INFOS: Final = "dist-info"  # folder in a toolkit: pip's records of its packages


class ToolchainError(KernelsError):
    """A CUDA toolkit or another tool of the build is missing, or does not work."""


@dataclass(frozen=True)
class Toolchain:
    """A CUDA toolkit on disk."""

    home: Path
    nvcc: str  # full version: 13.0.88
    ptxas: str

    @property
    def cuda(self) -> str:
        """The toolkit's release: 13.0."""
        return release_of(self.nvcc)

    def tool(self, name: str) -> str:
        """Return the path of a program of the toolkit."""
        return str(self.home / "bin" / name)


def find_toolchain(environ: Mapping[str, str] = os.environ) -> Toolchain:
    """Return the toolkit in CUDA_HOME, else the toolkit installed from PyPI."""
    home = named_home(environ)
    if home is None:
        home = installed_home()
        if home is None:
            message = "no CUDA toolkit: CUDA_HOME is not set and this Python has no `cuda-toolkit`"
            hint = "`pip install .` with build isolation and `nox -s build_wheels` bring one"
            raise ToolchainError(message, hint=hint)
        complete_links(home)
    return Toolchain(home, tool_version(home, "nvcc"), tool_version(home, "ptxas"))


def wheels_of_toolkit(cuda: str) -> str:
    """Return the requirement that installs a toolkit with nvcc from PyPI."""
    return f"cuda-toolkit[nvcc,cccl]=={cuda}.*"


def installed_home() -> Path | None:
    """Return the folder of the toolkit from PyPI that this Python finds, else None.

    NOTE: an isolated build of pip has its packages on sys.path, not where sysconfig says.
    """
    try:
        nvcc = importlib.metadata.distribution("nvidia-cuda-nvcc")
    except importlib.metadata.PackageNotFoundError:
        return None
    home = Path(str(nvcc.locate_file("nvidia/cu13")))
    return home if (home / "bin" / "nvcc").is_file() else None


def named_home(environ: Mapping[str, str]) -> Path | None:
    """Return CUDA_HOME, which must contain nvcc; None if it is not set."""
    named = environ.get("CUDA_HOME", "").strip()
    if not named:
        return None
    home = Path(named).resolve()
    if not (home / "bin" / "nvcc").is_file():
        message = f"CUDA_HOME is `{named}`, which has no bin/nvcc"
        raise ToolchainError(message, hint="unset CUDA_HOME: the build then takes nvcc from PyPI")
    return home


def home_variable(cuda: str) -> str:
    """Return the variable that names the toolkit of one major CUDA version, such as 12 or 13."""
    return f"{VARIABLES}CUDA_{cuda.partition('.')[0]}_HOME"


def complete_links(home: Path) -> None:
    """Add the links lib64 and libcudart.so, which the wheels of 13.x lack and nvcc needs."""
    names = {home / "lib64": "lib", home / "lib" / "libcudart.so": "libcudart.so.13"}
    for link, target in names.items():
        if not link.exists():
            link.symlink_to(target)


def keep_toolkit(home: Path, folder: Path) -> Path:
    """Copy a toolkit from a temporary environment to a fixed path, and return that path.

    The records of its packages are copied, too: the bill of materials needs the runtime's version.
    """
    kept = folder / f"cuda-{tool_version(home, 'nvcc')}"
    infos = list(home.parents[1].glob("nvidia_*.dist-info"))
    if infos and not (kept / INFOS).is_dir():  # an old copy may lack the records
        made_mark(kept).unlink(missing_ok=True)
    with make_once(kept) as missing:
        if missing:
            shutil.copytree(home, kept, symlinks=True)
            for info in infos:
                shutil.copytree(info, kept / INFOS / info.name)
    return kept


def release_of(version: str) -> str:
    """Return the release of a version: 13.0 for 13.0.88."""
    return ".".join(version.split(".")[:2])


def tool_version(home: Path, tool: str) -> str:
    """Ask a tool of the toolkit for its version."""
    command = [str(home / "bin" / tool), "--version"]
    text = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout
    match = re.search(r"release [\d.]+, V([\d.]+)", text)
    if match is None:
        message = f"`{home / 'bin' / tool} --version` does not say a version"
        raise ToolchainError(message, hint="unset CUDA_HOME: the build then takes nvcc from PyPI")
    return match[1]


def gxx_version(environ: Mapping[str, str] = os.environ) -> str:
    """Return the host compiler's version."""
    command = [environ.get("CXX") or "g++", "-dumpfullversion", "-dumpversion"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.strip()


def glibc_version(environ: Mapping[str, str] = os.environ) -> str:
    """Return the version of the glibc in the host compiler's headers; empty without glibc."""
    command = [environ.get("CXX") or "g++", "-E", "-x", "c++", "-dM", "-include", "features.h"]
    done = subprocess.run(
        [*command, os.devnull], capture_output=True, text=True, check=False, timeout=30
    )
    found = dict(re.findall(r"#define (__GLIBC__|__GLIBC_MINOR__) ([0-9]+)", done.stdout))
    return ".".join(found[name] for name in ("__GLIBC__", "__GLIBC_MINOR__") if name in found)
