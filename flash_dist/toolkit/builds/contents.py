"""Reads the contents of a built wheel into one frozen value, the input of the audit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..binaries.files import DAMAGED_HINT, unreadable
from ..binaries.symbols import SharedObject
from ..binaries.wheel import Wheel, open_wheel
from ..errors import AuditError, FatbinError, ManifestError
from ..gpucode.fatbin import open_fatbin
from ..product import NAME, PRODUCT, PROGRAM
from .manifest import FILE_NAME, Manifest
from .metadata import read_metadata

if TYPE_CHECKING:
    import os
    from collections.abc import Collection

    from ..gpucode.cubin import KernelInfo
    from ..gpucode.images import FatbinEntry


@dataclass(frozen=True)
class Naming:
    """Member names of a wheel that this toolkit built."""

    name: str  # name of the package

    @property
    def manifest(self) -> str:
        """Path of the build's manifest in the wheel."""
        return f"{self.name}/{FILE_NAME}"

    def members(self, manifest: Manifest) -> tuple[str, ...]:
        """Return the paths of the wheel's libraries, libraries with kernels first."""
        return tuple(f"{self.name}/{one}" for one in manifest.libraries)


OWN = Naming(NAME)
MANIFEST = OWN.manifest
LIBRARIES = tuple(f"{NAME}/{one}" for one in PRODUCT.libraries)
_MANIFEST = re.compile(rf"([a-z][a-z0-9_]*)/{re.escape(FILE_NAME)}")


def find_naming(names: Collection[str]) -> Naming | None:
    """Return the naming of this package, or of the package whose manifest the wheel holds.

    Return None if the wheel is of another package and holds no manifest, or several.
    """
    if any(name.startswith(f"{NAME}/") for name in names):
        return OWN
    found = {match[1] for name in names if (match := _MANIFEST.fullmatch(name))}
    return Naming(*found) if len(found) == 1 else None


@dataclass(frozen=True)
class Image:
    """One image of a fat binary and the kernels in it."""

    entry: FatbinEntry
    kernels: tuple[KernelInfo, ...]
    library: str = ""  # member of the wheel


@dataclass(frozen=True)
class Linked:
    """Dependencies and exports of one library, as the dynamic linker reads them."""

    needed: tuple[str, ...]
    search_path: tuple[str, ...]  # the folders of RPATH and RUNPATH
    exports: tuple[str, ...]


@dataclass(frozen=True)
class WheelContents:
    """The contents of a wheel."""

    path: str
    size: int  # bytes of the wheel
    libraries: tuple[str, ...]  # member names
    metadata_version: str  # the package's version in METADATA
    manifest: Manifest
    images: tuple[Image, ...]
    linkage: dict[str, Linked]  # by member name
    warnings: tuple[str, ...] = ()  # what the fat binary reader could not interpret

    @property
    def file_name(self) -> str:
        """The wheel's file name, which contains its version and tags."""
        return Path(self.path).name

    @property
    def kernels(self) -> tuple[KernelInfo, ...]:
        """All kernels of all images."""
        return tuple(kernel for image in self.images for kernel in image.kernels)


def read_contents(path: str | os.PathLike[str]) -> WheelContents:
    """Read everything that the audit checks.

    Raises:
        KernelsError: The wheel lacks a manifest or a library, or cannot be read.
    """
    with open_wheel(path) as wheel:
        naming = find_naming(wheel.names) or OWN
        _require_member(wheel, naming.manifest)
        manifest = read_manifest_in(wheel)
        members = naming.members(manifest)
        for name in members:
            _require_member(wheel, name)
        read = [_read_images(wheel, name) for name in members]
        images = tuple(image for found, _ in read for image in found)
        warnings = tuple(warning for _, found in read for warning in found)
        return WheelContents(
            path=wheel.path,
            size=Path(wheel.path).stat().st_size,
            libraries=tuple(name for name in wheel.names if ".so" in Path(name).name),
            metadata_version=read_metadata(wheel).version,
            manifest=manifest,
            images=images,
            linkage={name: _read_linked(wheel, name) for name in members},
            warnings=warnings,
        )


def _require_member(wheel: Wheel, name: str) -> None:
    if name not in wheel.names:
        message = f"`{wheel.path}` is no built wheel of this package: it holds no `{name}`"
        raise AuditError(message, hint=f"`{PROGRAM} inspect` reads any wheel")


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read only the manifest of a wheel.

    Raises:
        KernelsError: The file is not a wheel, or its manifest is absent or malformed.
    """
    with open_wheel(path) as wheel:
        return read_manifest_in(wheel)


def read_manifest_in(wheel: Wheel) -> Manifest:
    """Read the manifest of an open wheel. Raises as `read_manifest` does."""
    naming = find_naming(wheel.names) or OWN
    text = wheel.read(naming.manifest).decode("utf-8", "backslashreplace")
    try:
        manifest = Manifest.from_text(text, source=FILE_NAME)
    except ManifestError as error:
        message = f"cannot read `{naming.manifest}` in `{wheel.path}`: {error.message}"
        raise ManifestError(message, hint=error.hint or DAMAGED_HINT) from error
    if manifest.product != naming.name:
        named = f"`{naming.manifest}` in `{wheel.path}`"
        message = f"{named} is of another package, `{manifest.product:.60}`"
        raise ManifestError(message, hint=DAMAGED_HINT)
    return manifest


def _read_images(wheel: Wheel, name: str) -> tuple[tuple[Image, ...], tuple[str, ...]]:
    with (
        wheel.unpacked(name) as file,
        open_fatbin(name, file, archive=wheel.path, budget=wheel.budget) as fatbin,
    ):
        entries = fatbin.report.entries
        return tuple(Image(e, fatbin.kernels(e), name) for e in entries), fatbin.report.warnings


def read_linked(data: bytes) -> Linked:
    """Read the dynamic linking data of a library.

    Raises:
        FatbinError: The file is not an ELF library or is damaged.
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
