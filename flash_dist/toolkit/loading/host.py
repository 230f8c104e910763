"""The environment that libraries are loaded in: dynamic linker, Python, C library, torch."""

from __future__ import annotations

import platform
import sys
import sysconfig
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING

from ..machine.torch_install import find_torch_libraries
from .linker import Linker, read_linker

if TYPE_CHECKING:
    from ..machine.torch_install import Torch


@dataclass(frozen=True)
class LoadHost:
    """The environment to judge libraries by."""

    linker: Linker
    torch: Torch
    libc: str  # "glibc 2.36"
    python: str  # "3.11", or "3.13t" without the GIL
    suffixes: tuple[str, ...]  # of extension modules for this Python
    torch_folder: Path | None = None  # of torch's libraries
    prefix: Path = Path(sys.prefix)

    def torch_extensions(self) -> tuple[Path, ...]:
        """Return torch's own extension modules, that of this Python first."""
        if self.torch_folder is None:
            return ()
        found = sorted(self.torch_folder.parent.glob("_C.*.so"))
        return tuple(sorted(found, key=lambda path: path.name[2:] not in self.suffixes))


def read_host(torch: Torch, libc: str) -> LoadHost:
    """Describe this machine and interpreter.

    Raises:
        FatbinError: The interpreter is not an ELF program: another loader is in use.
    """
    folder = find_torch_libraries()
    nvidia = (Path(entry or ".", "nvidia") for entry in sys.path)
    loaded = [folder] if folder is not None else []
    loaded += [lib for one in nvidia if one.is_dir() for lib in sorted(one.glob("*/lib"))]
    return LoadHost(
        read_linker(loaded),
        torch,
        libc,
        _name_python(),
        tuple(EXTENSION_SUFFIXES),
        folder,
    )


def _name_python() -> str:
    version = ".".join(platform.python_version_tuple()[:2])
    return f"{version}t" if sysconfig.get_config_var("Py_GIL_DISABLED") else version
