"""Finds the installed torch without importing it, and reads its GPU code from its libraries."""

from __future__ import annotations

import importlib.metadata
import re
from contextlib import closing
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from ..binaries.files import open_file
from ..binaries.view import FileView
from ..errors import KernelsError
from ..findings.install import TORCH_ABSENT, TORCH_BROKEN, TORCH_SHADOWED
from ..gpucode.fatbin import read_fatbin
from ..targets.advice import torch_fix
from ..targets.archs import Arch
from .shadows import find_shadow, leave_fix

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..gpucode.images import FatbinReport

# Findings for an unusable torch, by its status.
TORCH_PROBLEMS: Final = {"absent": TORCH_ABSENT, "broken": TORCH_BROKEN, "shadowed": TORCH_SHADOWED}

_INDEX = "https://download.pytorch.org/whl"
_IMPORTED = ("torch", "numpy", "typing_extensions")  # packages that `import torch` imports

# CUDA_ARCH_FLAGS in libtorch_python.so: its maximum bytes, and the pattern of a C string such as
# `sm_75 sm_80 sm_86 compute_86`.
_LONGEST = 4096
_ARCH_LIST = re.compile(rb"\0((?:(?:sm|compute)_[0-9]{2,3}[af]?(?: |(?=\0)))+)(?=\0)")


@dataclass(frozen=True)
class TorchCopy:
    """One of several installed copies of torch that Python could find."""

    version: str
    cuda: str  # "13.0"; empty for a CPU build
    folder: str

    def __str__(self) -> str:
        kind = f"CUDA {self.cuda}" if self.cuda else "CPU build"
        return f"torch {self.version} ({kind}) in {self.folder}"


@dataclass(frozen=True)
class Torch:
    """The installed torch, according to its metadata and `version.py`; it is not imported."""

    status: Literal["ok", "absent", "broken", "shadowed"]
    version: str = ""
    cuda: str = ""  # "13.0"; empty for a CPU build
    reason: str = ""
    fix: str = ""  # the step that helps, if installing another torch would not
    copies: tuple[TorchCopy, ...] = ()  # in Python's search order; () if there is only one
    step: str = ""  # step after which Python finds the next copy

    def advise(self, oldest: str = "") -> str:
        """Return the step that leads to a usable torch.

        Args:
            oldest: The oldest torch version that the build supports; empty if unknown.
        """
        return self.fix or torch_fix(oldest)

    def to_json(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return {
            "status": self.status,
            "version": self.version or None,
            "cuda": self.cuda or None,
            "reason": self.reason or None,
            "copies": [vars(one) for one in self.copies],
        }


def read_torch() -> Torch:
    """Find the installed torch without importing it."""
    version = ""
    try:
        distribution = importlib.metadata.distribution("torch")
        version = distribution.version
        path = Path(str(distribution.locate_file("torch/version.py")))
        text = path.read_text(encoding="utf-8")
    except importlib.metadata.PackageNotFoundError:
        return Torch("absent", reason="torch is not installed")
    except (OSError, UnicodeDecodeError, KeyError) as error:
        cause = f"`{error.filename}`: {error.strerror}" if isinstance(error, OSError) else error
        reason = f"torch is installed but cannot be read: {cause}"
        return Torch("broken", reason=reason, fix=_again(version))
    if not version:
        reason = "torch is installed but its metadata has no version"
        return Torch("broken", reason=reason, fix=_again(""))
    shadow = next(filter(None, map(find_shadow, _IMPORTED)), None)
    if shadow is not None:
        return Torch("shadowed", version, parse_torch_cuda(text), shadow.sentence, shadow.fix)
    copies = tuple(_find_copies())
    if len(copies) < 2:  # noqa: PLR2004 - at least two
        return Torch("ok", version, parse_torch_cuda(text))
    step = leave_fix(Path(copies[0].folder))
    return Torch("ok", version, parse_torch_cuda(text), copies=copies, step=step)


def _find_copies() -> Iterator[TorchCopy]:
    """Yield every installed torch in Python's search path, each once."""
    known = set[Path]()
    for one in importlib.metadata.distributions(name="torch"):
        path = Path(str(one.locate_file("torch/version.py")))
        try:
            text = path.read_text(encoding="utf-8")
            version = one.version
        except (OSError, UnicodeDecodeError, KeyError):
            continue
        if path.resolve() not in known:
            known.add(path.resolve())
            yield TorchCopy(version, parse_torch_cuda(text), str(path.parents[1]))


def _again(version: str) -> str:
    """Return the step that reinstalls the same torch and changes nothing else."""
    local = version.partition("+")[2]
    if not re.fullmatch(r"(?:cu[0-9]+|cpu)?", local):  # a build by a vendor or user
        return f"install torch {version} again, from the same index"
    pin = f"=={version}" if version else ""
    index = f" --index-url {_INDEX}/{local}" if local else ""
    # Without `--force-reinstall` pip does nothing while the metadata exists.
    return f"`pip install --force-reinstall --no-deps torch{pin}{index}`"


def find_torch_libraries() -> Path | None:
    """Return the folder of torch's libraries, without importing torch; None if there is none."""
    try:
        spec = find_spec("torch")
    except (ImportError, ValueError):
        return None
    places = spec.submodule_search_locations if spec is not None else None
    folders = (Path(place, "lib") for place in places or ())
    return next((folder for folder in folders if folder.is_dir()), None)


def parse_torch_cuda(text: str) -> str:
    """Find the CUDA version in `torch/version.py`; empty for a CPU build."""
    match = re.search(r"""^cuda\b[^=\n]*=\s*['"]([0-9.]+)['"]""", text, re.MULTILINE)
    return match[1] if match else ""


@dataclass(frozen=True)
class TorchCode:
    """The GPU code of torch. `reports` is empty if the code cannot be read; `reason` says why."""

    reports: tuple[FatbinReport, ...] = ()
    arch_list: tuple[Arch, ...] = ()  # the result of torch.cuda.get_arch_list(); empty if unknown
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the state as plain data, with the number of images instead of a list."""
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


def read_torch_code(folder: Path | None = None) -> TorchCode:
    """Read the headers of GPU code in `libtorch_cuda*.so`, and torch's own list of targets."""
    folder = folder or find_torch_libraries()
    if folder is None:
        return TorchCode(reason="torch is not installed, or has no libraries")
    try:
        reports = tuple(read_fatbin(path) for path in sorted(folder.glob("libtorch_cuda*.so")))
        arch_list = read_arch_list(folder / "libtorch_python.so")
    except KernelsError as error:
        return TorchCode(reason=error.message)
    reports = tuple(report for report in reports if report.entries)
    return TorchCode(reports, arch_list, "" if reports else f"no GPU code in {folder}")


def read_arch_list(library: Path) -> tuple[Arch, ...]:
    """Find the result of torch.cuda.get_arch_list() in a library; empty if it is not there."""
    if not library.is_file():
        return ()
    with open_file(library) as file, closing(FileView(file)) as data:
        words = max(_find_arch_lists(data), key=len, default=[])
    return tuple(Arch.parse(word) for word in words)


def _find_arch_lists(data: FileView) -> Iterator[list[str]]:
    """Yield the targets in each list. Two searches for a prefix are faster than one pattern."""
    for start in (b"\0sm_", b"\0compute_"):
        place = data.find(start)
        while place >= 0:
            match = _ARCH_LIST.match(data[place : place + _LONGEST])
            if match:
                yield match[1].decode("ascii").split()
            place = data.find(start, place + 1)
