"""Assembles a CUDA 12.4 toolkit: PyPI has nvcc for CUDA 13 only.

nvcc, cicc and cudafe++ come from Debian's package nvidia-cuda-toolkit, unpacked and not installed;
headers, libdevice and libcudart.so.12 come from PyPI. ptxas is of CUDA 12.9: SASS of any 12.x runs
on every driver from 525 on, and the older ptxas spills registers in kernels where the newer ptxas
spills none. All of it is under NVIDIA's End User License Agreement.
"""

from __future__ import annotations

import io
import shutil
import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ...binaries.ar import read_members
from ...binaries.files import hash_file
from ...errors import FetchError
from ...indexes.fetch import open_url, save
from ...indexes.patience import Patience
from .nvcc import ToolchainError, tool_version

if TYPE_CHECKING:
    from pathlib import Path

CUDA: Final = "12.4"
LICENSE: Final = "https://docs.nvidia.com/cuda/eula/"


@dataclass(frozen=True)
class Download:
    """A file with the same bytes at each of its addresses."""

    urls: tuple[str, ...]
    sha256: str
    size: int  # in bytes


_FILE: Final = "nvidia-cuda-toolkit_12.4.131~12.4.1-2_amd64.deb"
_POOL: Final = f"pool/non-free/n/nvidia-cuda-toolkit/{_FILE}"
DEBIAN: Final = Download(
    (
        f"http://deb.debian.org/debian/{_POOL}",
        f"https://snapshot.debian.org/archive/debian/20251101T000000Z/{_POOL}",
    ),
    "cd5fe85aee38d108b315f408a688641478f2402622a10c677478eb7a6c4e5319",
    87240108,
)
# Folders below `parts`, with the dependency group of each: two versions of the same package.
PACKAGES: Final = {"12.4": "nvcc12", "12.9": "ptxas12"}
_LIBRARY: Final = "usr/lib/nvidia-cuda-toolkit"
# Source and destination of files of the Debian package.
PROGRAMS: Final = {
    f"{_LIBRARY}/bin/nvcc": "bin/nvcc",
    f"{_LIBRARY}/bin/cicc": "nvvm/bin/cicc",
    f"{_LIBRARY}/bin/crt/link.stub": "bin/crt/link.stub",
    f"{_LIBRARY}/bin/crt/prelink.stub": "bin/crt/prelink.stub",
    "usr/bin/cudafe++": "bin/cudafe++",
    "usr/bin/fatbinary": "bin/fatbinary",
    "usr/bin/nvlink": "bin/nvlink",
    "usr/bin/bin2c": "bin/bin2c",
}
PROFILE: Final = """\
TOP = $(_HERE_)/..
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH += $(TOP)/nvvm/bin:$(_HERE_):
INCLUDES += "-I$(TOP)/include"
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib64"
"""
EMPTY_ARCHIVE: Final = b"!<arch>\n"  # libcudadevrt.a: nvcc always links it, no kernel uses it


def assemble_toolkit(parts: Path, home: Path, package: Path) -> None:
    """Make a CUDA_HOME from packages installed from PyPI and Debian's package.

    Args:
        parts: Folder with the folders of PACKAGES, each with the packages of its group.
        home: The new folder.
        package: The file of Debian's package.
    """
    base, newer = (parts / name / "nvidia" for name in PACKAGES)
    shutil.rmtree(home, ignore_errors=True)
    _unpack(package, home)
    for folder in ("cuda_cccl", "cuda_nvcc", "cuda_runtime"):
        shutil.copytree(base / folder / "include", home / "include", dirs_exist_ok=True)
    shutil.copytree(base / "cuda_nvcc" / "nvvm" / "libdevice", home / "nvvm" / "libdevice")
    shutil.copy2(newer / "cuda_nvcc" / "bin" / "ptxas", home / "bin" / "ptxas")
    (home / "bin" / "ptxas").chmod(0o755)
    (home / "bin" / "nvcc.profile").write_text(PROFILE, encoding="utf-8")
    library = home / "lib64"
    library.mkdir()
    shutil.copy2(base / "cuda_runtime" / "lib" / "libcudart.so.12", library)
    (library / "libcudart.so").symlink_to("libcudart.so.12")
    (library / "libcudadevrt.a").write_bytes(EMPTY_ARCHIVE)
    for info in (parts / CUDA).glob("nvidia_*.dist-info"):
        shutil.copytree(info, home / "dist-info" / info.name)


def _unpack(package: Path, home: Path) -> None:
    """Extract the programs from a .deb: an ar archive that contains a tar archive."""
    missing = dict(PROGRAMS)
    with package.open("rb") as file:
        member = next(one for one in read_members(file) if one.name.startswith("data.tar"))
        file.seek(member.offset)
        data = io.BytesIO(file.read(member.size))
    with tarfile.open(fileobj=data) as archive:
        for entry in archive:
            target = missing.pop(entry.name.removeprefix("./"), None)
            content = archive.extractfile(entry) if target else None
            if target and content:
                path = home / target
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as program:
                    shutil.copyfileobj(content, program)
                path.chmod(0o755)
    if missing:
        message = f"`{package.name}` lacks {', '.join(sorted(missing))}"
        raise ToolchainError(message)


def fetch_package(download: Download, folder: Path) -> Path:
    """Fetch a file into a folder unless it is there, check its bytes, and return its path."""
    path = folder / download.urls[0].rpartition("/")[2]
    folder.mkdir(parents=True, exist_ok=True)
    if not path.is_file():
        _download(download, path)
    with path.open("rb") as file:
        found = hash_file(file).hex()
    if found != download.sha256:
        path.unlink()
        message = f"`{path.name}` has SHA-256 {found}, expected {download.sha256}"
        raise ToolchainError(message, hint="a mirror gave another file: try again")
    return path


def _download(download: Download, path: Path) -> None:
    """Download a file from the first of its addresses that works."""
    part, reasons = path.with_name(f"{path.name}.part"), []
    for url in download.urls:
        reason = _try_download(url, part)
        if not reason:
            part.replace(path)
            return
        reasons.append(reason)
    message = f"`{path.name}`, with nvcc for CUDA {CUDA}, cannot be fetched: {'; '.join(reasons)}"
    raise ToolchainError(message, hint=f"put the file into `{path.parent}` by hand")


def _try_download(url: str, path: Path) -> str:
    """Download a URL to a file; return the error, empty on success."""
    patience = Patience.of_file()
    try:
        with open_url(url, patience=patience) as response, path.open("wb") as file:
            save(response, file, progress=lambda *_: None, patience=patience)
    except FetchError as error:
        return error.message
    return ""


def bring_toolkit(parts: Path, home: Path) -> str:
    """Fetch Debian's package and make a CUDA_HOME; return a line with its versions and licence.

    Args:
        parts: See `assemble_toolkit`; Debian's package is kept in this folder.
        home: The new folder.

    Raises:
        KernelsError: A file cannot be fetched, or has wrong bytes.
    """
    assemble_toolkit(parts, home, fetch_package(DEBIAN, parts / "debian"))
    version, ptxas = tool_version(home, "nvcc"), tool_version(home, "ptxas")
    return f"CUDA {CUDA}: nvcc {version}, ptxas {ptxas}; NVIDIA's licence: {LICENSE}"
