"""Reads the GPU code of the installed torch from its libraries' headers."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..binaries.files import open_file
from ..binaries.view import FileView
from ..errors import KernelsError
from ..gpucode.fatbin import read_fatbin
from ..targets.archs import Arch
from .torch_install import find_torch_libraries

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ..gpucode.images import FatbinReport

# CUDA_ARCH_FLAGS in libtorch_python.so: `sm_75 sm_80 sm_86 compute_86`, the end of a C string.
_LONGEST = 4096  # bytes of such a text
_ARCH_LIST = re.compile(rb"\0((?:(?:sm|compute)_[0-9]{2,3}[af]?(?: |(?=\0)))+)(?=\0)")


@dataclass(frozen=True)
class TorchCode:
    """The GPU code of torch. No reports: it could not be read, reason says why."""

    reports: tuple[FatbinReport, ...] = ()
    arch_list: tuple[Arch, ...] = ()  # the result of torch.cuda.get_arch_list(); empty if unknown
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the state as plain data, without the single images."""
        return {
            "libraries": [
                {
                    "path": report.path,
                    "targets": [str(arch) for arch in report.archs],
                    "images": len(report.entries),
                }
                for report in self.reports
            ],
            "arch_list": [str(arch) for arch in self.arch_list],
            "reason": self.reason or None,
        }


def read_torch_code() -> TorchCode:
    """Read the headers of the installed torch's GPU code."""
    folder = find_torch_libraries()
    if folder is None:
        return TorchCode(reason="torch is not installed, or has no libraries")
    return read_torch_folder(folder)


def read_torch_folder(folder: Path) -> TorchCode:
    """Read the headers of GPU code in torch's folder of libraries."""
    try:
        reports = tuple(read_fatbin(path) for path in sorted(folder.glob("libtorch_cuda*.so")))
        arch_list = read_arch_list(folder / "libtorch_python.so")
    except KernelsError as error:
        return TorchCode(reason=error.message)
    reports = tuple(report for report in reports if report.entries)
    return TorchCode(reports, arch_list, "" if reports else f"no GPU code in {folder}")


def read_arch_list(library: Path) -> tuple[Arch, ...]:
    """Find the result of get_arch_list(); empty if torch has no such text."""
    if not library.is_file():
        return ()
    with open_file(library) as file, closing(FileView(file)) as data:
        words = max(_find_arch_lists(data), key=len, default=[])
    return tuple(Arch.parse(word) for word in words)


def _find_arch_lists(data: FileView) -> Iterator[list[str]]:
    """Yield texts of this form; `find` is faster than an expression with alternatives."""
    for start in (b"\0sm_", b"\0compute_"):
        place = data.find(start)
        while place >= 0:
            match = _ARCH_LIST.match(data[place : place + _LONGEST])
            if match:
                yield match[1].decode("ascii").split()
            place = data.find(start, place + 1)
