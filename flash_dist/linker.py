"""Where the dynamic linker finds the libraries that a library needs, told without loading any.

Sources: ld.so(8), dlopen(3); `dl-cache.h` of glibc for the cache that `ldconfig` writes.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING

from .errors import FatbinError
from .segments import Platform, read_platform
from .symbols import SharedObject, open_shared

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

CACHE = Path("/etc/ld.so.cache")
MAX_CACHE_BYTES = 64 << 20
MAX_LIBRARIES = 500  # that one library brings with it; torch has about 40
MAX_FOLDERS = 200  # that one library has them looked for in

_LIB_FOLDERS = ("lib64", "lib", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu")  # of $LIB
_FOLDERS = tuple(Path(root, folder) for root in ("/", "/usr") for folder in _LIB_FOLDERS)
_CACHE_MAGIC = b"glibc-ld.so.cache1.1"
_CACHE_HEADER = Struct("<20sII20s")
_CACHE_ENTRY = Struct("<iIIIQ")


@dataclass(frozen=True)
class Loaded:
    """A library as the linker would load it: the file, and what asked for it."""

    shared: SharedObject
    path: Path | None = None  # None for a member of an archive
    loader: Loaded | None = None


@dataclass(frozen=True)
class Missing:
    """A library that is needed and that nothing provides."""

    name: str
    needed_by: str  # a file name; empty for the root


@dataclass(frozen=True)
class Closure:
    """A library and everything that is loaded with it, in the linker's order."""

    libraries: Mapping[str, Loaded]  # by the name that needs them; the root by ""
    missing: tuple[Missing, ...] = ()
    unread: tuple[str, ...] = ()  # what is there and was not looked into


@dataclass(frozen=True)
class Linker:
    """What the linker of a process knows before the process loads anything."""

    platform: Platform
    program: Path | None = None  # the interpreter
    loaded: tuple[Path, ...] = ()  # folders whose libraries are in the process by then: torch's
    library_path: tuple[Path, ...] = ()  # LD_LIBRARY_PATH
    cache: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    folders: tuple[Path, ...] = _FOLDERS
    preloaded: tuple[Path, ...] = ()  # LD_PRELOAD
    _opened: dict[Path, SharedObject | None] = field(default_factory=dict, repr=False)

    def close(self, root: Loaded, siblings: Iterable[str] = ()) -> Closure:
        """Find everything that is loaded with a library, breadth first.

        Args:
            root: The library.
            siblings: Names of files that come with it, which code may load before.
        """
        beside = frozenset(siblings)
        libraries = {"": root}
        missing: dict[str, Missing] = {}
        unread: dict[str, None] = {}
        waiting = [root]
        for one in waiting:  # grows
            for name in one.shared.needed:
                if name in libraries or name in missing or name in unread:
                    continue
                if len(libraries) + len(missing) + len(unread) > MAX_LIBRARIES:
                    break
                known = root.path is not None or name not in beside
                path = self.find(name, one) if known else None
                shared = self.open(path) if path is not None else None
                if path is None and name not in beside:
                    missing[name] = Missing(name, one.path.name if one.path and one.loader else "")
                elif shared is None:
                    unread[name] = None
                else:
                    libraries[name] = Loaded(shared, path, one)
                    waiting.append(libraries[name])
        return Closure(libraries, tuple(missing.values()), tuple(unread))

    def open(self, path: Path) -> SharedObject | None:
        """Open a library once; None if it cannot be read."""
        if path not in self._opened:
            try:
                self._opened[path] = open_shared(path)
            except FatbinError:
                self._opened[path] = None
        return self._opened[path]

    def find(self, name: str, by: Loaded) -> Path | None:
        """Return the file that a needed name stands for; None if there is none."""
        if "/" in name:
            return Path(name) if self._fits(Path(name)) else None
        candidates = chain(
            (path for path in self.preloaded if path.name == name),
            (folder / name for folder in self._search(by)),
            self.cache.get(name, ()),
            (folder / name for folder in self.folders),
        )
        return next((path for path in candidates if self._fits(path)), None)

    def _search(self, by: Loaded) -> Iterator[Path]:
        """Yield the folders before the cache, in the linker's order."""
        yield from self.loaded
        if not by.shared.runpath:
            one: Loaded | None = by
            while one is not None:
                if not one.shared.runpath:
                    yield from _expand(one.shared.rpath, one.path)
                one = one.loader
            if self.program is not None and (shared := self.open(self.program)) is not None:
                yield from _expand(shared.rpath, self.program)
        yield from self.library_path
        yield from _expand(by.shared.runpath, by.path)

    def _fits(self, path: Path) -> bool:
        """Whether the linker would take a file: one for another machine is passed over."""
        try:
            if not path.is_file():  # a pipe would block
                return False
            with path.open("rb") as file:
                return read_platform(file.read(64)) == self.platform
        except (OSError, ValueError):
            return False


def _expand(folders: Iterable[str], path: Path | None) -> Iterator[Path]:
    """Yield the folders that $ORIGIN and $LIB stand for."""
    for folder in islice(folders, MAX_FOLDERS):
        place = folder.replace("${", "$").replace("}", "") if "${" in folder else folder
        if "$ORIGIN" in place:
            if path is None:
                continue
            place = place.replace("$ORIGIN", str(path.absolute().parent))
        if "$LIB" in place:
            yield from (Path(place.replace("$LIB", lib)) for lib in _LIB_FOLDERS)
        elif "$" not in place:
            yield Path(place)


def read_linker(loaded: Iterable[Path] = (), environ: Mapping[str, str] = os.environ) -> Linker:
    """Describe the linker of this machine, for this interpreter.

    Raises:
        FatbinError: The interpreter is no ELF program: another system has another linker.
    """
    program = Path(sys.executable).resolve()
    try:
        with program.open("rb") as file:
            platform = read_platform(file.read(64))
    except OSError as error:
        message = f"cannot read the interpreter `{program}`: {error.strerror}"
        raise FatbinError(message) from error
    named = environ.get("LD_LIBRARY_PATH", "").replace(";", ":")
    return Linker(
        platform,
        program,
        tuple(loaded),
        tuple(Path(folder) for folder in named.split(":") if folder),
        read_cache(CACHE),
        preloaded=tuple(Path(one) for one in environ.get("LD_PRELOAD", "").split() if "/" in one),
    )


def read_cache(path: Path) -> dict[str, tuple[Path, ...]]:
    """Read which file `ldconfig` found for each name; nothing where there is no cache."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_CACHE_BYTES)
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
        if name and file_name and not capability:  # a variant for newer CPUs has the same symbols
            found[name] = (*found.get(name, ()), Path(file_name))
    return found


def _read_string(data: bytes, offset: int) -> str:
    end = data.find(b"\0", offset, offset + 4096)
    return os.fsdecode(data[offset:end]) if end >= 0 else ""
