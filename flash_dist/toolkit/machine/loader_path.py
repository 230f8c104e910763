"""Searches for libraries as the dynamic loader does: LD_LIBRARY_PATH, cache, default folders.

Sources: ld.so(8); `dl-cache.h` of glibc for the cache, which `ldconfig` writes from the folders of
/etc/ld.so.conf. Nothing is loaded here.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Final, Literal

from ..binaries.files import read_if_possible
from ..binaries.segments import Platform, read_platform
from ..errors import FatbinError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

CACHE: Final = Path("/etc/ld.so.cache")
# Values of the loader's token $LIB on common systems.
LIB_FOLDERS: Final = ("lib64", "lib", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu")
FOLDERS: Final = tuple(Path(root, folder) for root in ("/", "/usr") for folder in LIB_FOLDERS)

_MAX_CACHE_BYTES = 64 << 20
_CACHE_MAGIC = b"glibc-ld.so.cache1.1"
_CACHE_HEADER = Struct("<20sII20s")
_CACHE_ENTRY = Struct("<iIIIQ")

_PATH_FIELD = 5  # index of the path in a line of /proc/self/maps


@dataclass(frozen=True)
class LoaderPath:
    """Inputs of the loader's search in this process. Tests use a root other than "/"."""

    root: Path
    platform: Platform | None  # of this process; None if the system does not use ELF
    named: tuple[Path, ...]  # folders in LD_LIBRARY_PATH
    cache: Mapping[str, tuple[Path, ...]]  # files by library name

    @classmethod
    def read(cls, environ: Mapping[str, str], root: Path) -> LoaderPath:
        """Read the loader's inputs."""
        try:
            platform = read_own_platform()
        except FatbinError:
            platform = None
        cache = read_cache(root / CACHE.relative_to("/"))
        return cls(root, platform, split_library_path(environ), cache)

    def find(self, name: str) -> str:
        """Return the file that the loader would load, with links resolved; empty if none exists."""
        named, default = ([one / name for one in these] for these in (self.named, FOLDERS))
        return self._first([*named, *self.cache.get(name, ()), *default])

    def find_in(self, folders: Iterable[str], name: str) -> str:
        """Return the first file of that name in these folders; empty if there is none."""
        return self._first(Path(folder, name) for folder in folders)

    def _first(self, paths: Iterable[Path]) -> str:
        for path in paths:
            place = self.root / path.relative_to(path.anchor)
            if not path.anchor or self.platform is None:
                continue
            if _read_platform_of(place) == self.platform:  # files for another machine are skipped
                real, root = (Path(os.path.realpath(one)) for one in (place, self.root))
                return f"/{real.relative_to(root)}" if real.is_relative_to(root) else str(real)
        return ""


def read_own_platform() -> Platform:
    """Return the platform of this interpreter.

    Raises:
        FatbinError: The interpreter cannot be read, or is not an ELF program.
    """
    program = Path(sys.executable).resolve()
    try:
        with program.open("rb") as file:
            return read_platform(file.read(64))
    except OSError as error:
        message = f"cannot read the interpreter `{program}`: {error.strerror}"
        raise FatbinError(message) from error


def split_library_path(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the folders of LD_LIBRARY_PATH; an empty name means the current folder."""
    named = environ.get("LD_LIBRARY_PATH", "").replace(";", ":")
    return tuple(Path(folder) for folder in named.split(":")) if named else ()


def ends_search(path: Path, platform: Platform) -> bool:
    """Tell if the search ends at a file: the loader loads it, or fails because it is not ELF."""
    return _read_platform_of(path) in {platform, "none"}


def _read_platform_of(path: Path) -> Platform | Literal["none"] | None:
    """Return a file's platform; "none" if the file is not ELF; None if the file is not readable."""
    try:
        if not path.is_file():  # a pipe would block
            return None
        with path.open("rb") as file:
            return read_platform(file.read(64))
    except FatbinError:
        return "none"
    except (OSError, ValueError):
        return None


def read_cache(path: Path) -> dict[str, tuple[Path, ...]]:
    """Return the files that `ldconfig` found, by library name; empty if there is no cache."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_CACHE_BYTES)
    except OSError:
        return {}
    start = data.find(_CACHE_MAGIC)  # an older table may come first
    if start < 0 or start + _CACHE_HEADER.size + 4 > len(data):
        return {}
    data = data[start:]
    first = _CACHE_HEADER.size
    count = min(_CACHE_HEADER.unpack_from(data)[1], (len(data) - first) // _CACHE_ENTRY.size)
    found: dict[str, tuple[Path, ...]] = {}
    for index in range(count):
        _, key, value, _, capability = _CACHE_ENTRY.unpack_from(
            data, first + index * _CACHE_ENTRY.size
        )
        name, file_name = _read_string(data, key), _read_string(data, value)
        if name and file_name and not capability:  # variants for newer CPUs have the same symbols
            found[name] = (*found.get(name, ()), Path(file_name))
    return found


def _read_string(data: bytes, offset: int) -> str:
    end = data.find(b"\0", offset, offset + 4096)
    return os.fsdecode(data[offset:end]) if end >= 0 else ""


def find_loaded(name: str, root: Path) -> str:
    """Return the first file mapped by this process whose name begins with `name`, or ""."""
    for line in read_if_possible(root / "proc/self/maps").splitlines():
        fields = line.split(maxsplit=_PATH_FIELD)
        if len(fields) > _PATH_FIELD and Path(fields[_PATH_FIELD]).name.startswith(name):
            return fields[_PATH_FIELD]
    return ""
