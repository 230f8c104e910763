"""Reads a conda package of this project as if it were a wheel, and checks its list of files.

A `.conda` file is a zip archive of two tar archives (conda.io, "Package specification"):
`info-*.tar.zst` holds index.json (for solvers) and paths.json (every file with its SHA-256),
`pkg-*.tar.zst` holds the files. The files of the wheel are in `site-packages/`.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from ..binaries import tar
from ..binaries.codecs import open_zstd
from ..binaries.files import DAMAGED_HINT, unreadable
from ..binaries.json_text import parse_json
from ..binaries.wheel import MAX_TEXT_BYTES, Wheel, open_wheel
from ..errors import FatbinError, hint_to_build
from ..product import NAME
from .metadata import parse_metadata, read_tags

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

SITE: Final = "site-packages/"
INDEX: Final = "info/index.json"
PATHS: Final = "info/paths.json"
_HINT: Final = hint_to_build("`nox -s conda` makes packages of our wheels", DAMAGED_HINT)


@dataclass(frozen=True)
class PackedFile:
    """The hash and size of one file, as paths.json lists it or as the archive holds it."""

    sha256: str
    size: int


@dataclass(frozen=True)
class CondaContents:
    """The contents of an open conda package."""

    index: dict[str, Any]  # info/index.json
    info: dict[str, bytes]  # all files of the archive `info`, by name
    listed: dict[str, PackedFile]  # entries of info/paths.json, by path
    files: dict[str, PackedFile]  # files of the archive `pkg`, by path
    wheel: Path  # a wheel with the same files; deleted when the package is closed


@contextmanager
def open_conda(path: str | os.PathLike[str]) -> Iterator[CondaContents]:
    """Read a conda package of this project without installing it.

    Raises:
        FatbinError: The file is not a conda package, or cannot be read.
    """
    with (
        tempfile.TemporaryDirectory(prefix=f"{NAME}-") as folder,
        open_wheel(path, kind="conda package") as opened,
    ):
        info = _read_info(opened)
        index, listed = _parse_info(opened.path, info)
        raw = Path(folder) / "files.zip"
        files, texts = _repack(opened, raw)
        wheel = raw.rename(raw.with_name(_name_wheel(opened.path, texts)))
        yield CondaContents(index, info, listed, files, wheel)


def read_index(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read index.json, the metadata for solvers, from any conda package.

    Raises:
        FatbinError: The file is not a conda package, or cannot be read.
    """
    return read_claims(path)[0]


def read_claims(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, PackedFile]]:
    """Read index.json and paths.json, the list of files, from any conda package.

    Raises:
        FatbinError: The file is not a conda package, or cannot be read.
    """
    with open_wheel(path, kind="conda package") as opened:
        return _parse_info(opened.path, _read_info(opened))


def find_path_damage(package: CondaContents) -> Iterator[str]:
    """Describe where the files and paths.json differ, and files outside of `site-packages/`."""
    for name in sorted(package.listed.keys() - package.files.keys()):
        yield f"paths.json lists {name}, which the package does not hold"
    for name, file in sorted(package.files.items()):
        listed = package.listed.get(name)
        if not name.startswith(SITE):
            yield f"{name} would be installed outside {SITE}"
        if listed is None:
            yield f"{name} is not in paths.json"
        elif listed != file:
            yield f"{name} has another SHA-256 or size than paths.json says"


def part_name(opened: Wheel, kind: str) -> str:
    """Return the file name of the inner archive `info-*.tar.zst` or `pkg-*.tar.zst`.

    Raises:
        FatbinError: The package has no such archive, or more than one.
    """
    names = [name for name in opened.names if re.fullmatch(rf"{kind}-[^/]+\.tar\.zst", name)]
    if len(names) != 1:
        reason = f"it holds {len(names)} files {kind}-*.tar.zst, not one"
        raise unreadable(opened.path, reason, hint="pass a conda package (.conda)")
    return names[0]


@contextmanager
def _members(opened: Wheel, kind: str) -> Iterator[Iterator[tar.Member]]:
    part = part_name(opened, kind)
    with opened.unpacked(part) as packed:
        try:
            with open_zstd(packed) as stream:
                yield tar.read_members(stream, opened.budget)
        except FatbinError as error:
            raise unreadable(part, error.message, archive=opened.path) from error


def _read_info(opened: Wheel) -> dict[str, bytes]:
    """Read the files in `info/`, which describe the package; reject large files."""
    info: dict[str, bytes] = {}
    with _members(opened, "info") as members:
        for member in members:
            if member.size > MAX_TEXT_BYTES:
                message = (
                    f"{member.name} has {member.size} bytes, at most {MAX_TEXT_BYTES} are allowed"
                )
                raise FatbinError(message)
            info[member.name] = b"".join(member.chunks())
    return info


def _parse_info(path: str, info: dict[str, bytes]) -> tuple[dict[str, Any], dict[str, PackedFile]]:
    try:
        index = parse_json(info[INDEX])
        listed = {
            str(one["_path"]): PackedFile(str(one["sha256"]), int(one["size_in_bytes"]))
            for one in parse_json(info[PATHS])["paths"]
        }
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        reason = f"index.json or paths.json is not understood: {type(error).__name__} {error}"
        raise unreadable(path, reason) from error
    if not isinstance(index, dict):
        raise unreadable(path, "index.json is not an object")
    return index, listed


def _repack(opened: Wheel, path: Path) -> tuple[dict[str, PackedFile], dict[str, bytes]]:
    """Write all files as a wheel.

    Return the hash and size of each file by path, and the first MiB of METADATA and WHEEL by name.
    """
    files: dict[str, PackedFile] = {}
    texts: dict[str, bytes] = {}
    with (
        _members(opened, "pkg") as members,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for member in members:
            if member.name in files:
                message = f"it holds {member.name} twice"
                raise FatbinError(message)
            place = zipfile.ZipInfo(member.name.removeprefix(SITE))
            place.compress_type = zipfile.ZIP_DEFLATED
            with archive.open(place, "w", force_zip64=True) as target:
                files[member.name], start = _copy(member, target)
            if place.filename.endswith((".dist-info/METADATA", ".dist-info/WHEEL")):
                texts[place.filename.rpartition("/")[2]] = start
    return files, texts


def _copy(member: tar.Member, target: IO[bytes]) -> tuple[PackedFile, bytes]:
    digest, start = hashlib.sha256(), b""
    for chunk in member.chunks():
        start = start or chunk
        digest.update(chunk)
        target.write(chunk)
    return PackedFile(digest.hexdigest(), member.size), start


def _name_wheel(path: str, texts: dict[str, bytes]) -> str:
    """Return the file name of the wheel that METADATA and WHEEL describe."""
    tags = read_tags(texts.get("WHEEL", b""))
    kinds = {tag.rpartition("-")[0] for tag in tags}
    if "METADATA" not in texts or len(kinds) != 1:
        reason = "METADATA and WHEEL do not say one version and tags of one kind"
        raise unreadable(path, reason, hint=_HINT)
    version = parse_metadata(texts["METADATA"], path).version
    platforms = ".".join(sorted(tag.rpartition("-")[2] for tag in tags))
    name = f"{NAME}-{version}-{kinds.pop()}-{platforms}.whl"
    if not re.fullmatch(r"[A-Za-z0-9_.+!-]+", name):
        raise unreadable(path, f"METADATA or WHEEL would name it `{name}`")
    return name
