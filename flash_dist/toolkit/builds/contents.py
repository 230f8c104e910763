"""What a wheel of this package really holds, in one frozen value: the input of the audit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .. import product
from ..binaries.files import DAMAGED_HINT, unreadable
from ..binaries.symbols import SharedObject
from ..binaries.wheel import Wheel, open_wheel
from ..errors import AuditError, FatbinError, ManifestError
from ..gpucode.fatbin import FatbinEntry, KernelInfo, open_fatbin
from ..product import NAME, PROGRAM
from .manifest import FILE_NAME, Manifest
from .metadata import read_metadata

if TYPE_CHECKING:
    import os

KERNELS = f"{NAME}/{product.KERNELS}"
BINDING = f"{NAME}/{product.BINDING}"
MANIFEST = f"{NAME}/{FILE_NAME}"


@dataclass(frozen=True)
class Image:
    """One image of the fat binary and the kernels in it."""

    entry: FatbinEntry
    kernels: tuple[KernelInfo, ...]


@dataclass(frozen=True)
class Linked:
    """What one of the two libraries asks of the dynamic linker, and what it offers."""

    needed: tuple[str, ...]
    search_path: tuple[str, ...]  # the folders of RPATH and RUNPATH
    exports: tuple[str, ...]


@dataclass(frozen=True)
class WheelContents:
    """A wheel, read."""

    path: str
    size: int
    libraries: tuple[str, ...]
    metadata_version: str
    manifest: Manifest
    images: tuple[Image, ...]
    linkage: dict[str, Linked]  # by member name
    warnings: tuple[str, ...] = ()  # what the fat binary reader did not understand

    @property
    def file_name(self) -> str:
        """The wheel's name, which tells version and tags."""
        return Path(self.path).name

    @property
    def kernels(self) -> tuple[KernelInfo, ...]:
        """All kernels of all images."""
        return tuple(kernel for image in self.images for kernel in image.kernels)


def read_contents(path: str | os.PathLike[str]) -> WheelContents:
    """Read everything that the audit judges.

    Raises:
        FlashDistError: The file is no wheel of this package, or cannot be read.
    """
    with open_wheel(path) as wheel:
        for name in (MANIFEST, KERNELS, BINDING):
            if name not in wheel.names:
                message = f"`{path}` is no built wheel of this package: it holds no `{name}`"
                hint = f"`{PROGRAM} inspect` reads any wheel"
                raise AuditError(message, hint=hint)
        manifest = read_manifest_in(wheel)
        images, warnings = _read_images(wheel)
        return WheelContents(
            path=wheel.path,
            size=Path(wheel.path).stat().st_size,
            libraries=tuple(name for name in wheel.names if ".so" in Path(name).name),
            metadata_version=read_metadata(wheel).version,
            manifest=manifest,
            images=images,
            linkage={name: _read_linked(wheel, name) for name in (KERNELS, BINDING)},
            warnings=warnings,
        )


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read what a wheel declares, and nothing else of it.

    Raises:
        FlashDistError: The file is no wheel of this package, or cannot be read.
    """
    with open_wheel(path) as wheel:
        return read_manifest_in(wheel)


def read_manifest_in(wheel: Wheel) -> Manifest:
    """Read what an open wheel declares; raises as `read_manifest` does."""
    text = wheel.read(MANIFEST).decode("utf-8", "backslashreplace")
    try:
        return Manifest.from_text(text, source=FILE_NAME)
    except ManifestError as error:
        message = f"cannot read `{MANIFEST}` in `{wheel.path}`: {error.message}"
        raise ManifestError(message, hint=error.hint or DAMAGED_HINT) from error


def _read_images(wheel: Wheel) -> tuple[tuple[Image, ...], tuple[str, ...]]:
    with (
        wheel.unpacked(KERNELS) as file,
        open_fatbin(KERNELS, file, archive=wheel.path, budget=wheel.budget) as fatbin,
    ):
        entries = fatbin.report.entries
        return tuple(Image(e, fatbin.kernels(e)) for e in entries), fatbin.report.warnings


def read_linked(data: bytes) -> Linked:
    """Read what the dynamic linker reads of a library.

    Raises:
        FatbinError: The file is no ELF library or is damaged.
    """
    library = SharedObject(data)
    return Linked(library.needed, library.rpath + library.runpath, tuple(library.defined()))


def _read_linked(wheel: Wheel, name: str) -> Linked:
    with wheel.unpacked(name) as file:
        try:
            return read_linked(file.read())
        except FatbinError as error:
            hint = error.hint or DAMAGED_HINT
            raise unreadable(name, error.message, archive=wheel.path, hint=hint) from error
