"""Writes images to files for NVIDIA's tools: cubins and PTX, unpacked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from ..errors import FatbinError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ..targets.archs import Arch
    from .fatbin import Fatbin
    from .images import FatbinEntry
    from .inspection import Choice

_SUFFIXES: Final = {"sass": "cubin", "ptx": "ptx"}
_ODD: Final = re.compile(r"[^A-Za-z0-9._+-]+")
_LONGEST: Final = 80  # maximum characters of a library's name


@dataclass(frozen=True)
class Extracted:
    """A written image."""

    path: Path
    library: str
    arch: Arch
    size: int


def extract_images(
    fatbin: Fatbin, library: str, choice: Choice, folder: Path
) -> Iterator[Extracted]:
    """Write the selected images, each under a new file name.

    Args:
        fatbin: The open library.
        library: Its name, the prefix of the file names.
        choice: Targets, and kernels that an image must have.
        folder: The output folder, which is created.

    Raises:
        FatbinError: An image cannot be read, or a file cannot be written.
    """
    stem = _ODD.sub("_", library.rpartition("/")[2]).lstrip(".")[-_LONGEST:] or "library"
    for number, entry in enumerate(fatbin.report.entries):
        if entry.arch is None or not choice.takes(entry.arch) or entry.kind not in _SUFFIXES:
            continue
        data = fatbin.payload(entry)
        kernels = fatbin.kernels(entry, partial(bytes, data)) if choice.kernel else ()
        if choice.kernel and not any(choice.keeps(kernel.name) for kernel in kernels):
            continue
        name = f"{stem}.{number}.{entry.arch}.{_SUFFIXES[entry.kind]}"
        yield Extracted(_write(folder / name, entry, data), library, entry.arch, len(data))


def _write(path: Path, entry: FatbinEntry, data: bytes) -> Path:
    """Write a new file; remove the zeros after PTX."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            file.write(data.rstrip(b"\0") if entry.kind == "ptx" else data)
    except OSError as error:
        message = f"cannot write `{path}`: {error.strerror}"
        raise FatbinError(message, hint="choose another folder with `--to FOLDER`") from error
    return path
