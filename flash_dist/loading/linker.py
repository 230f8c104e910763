"""Where the dynamic linker finds the libraries that a library needs, told without loading any.

The folders that are searched for any library are in `machine/loader_path.py`.
Sources: ld.so(8), dlopen(3).
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..binaries.symbols import SharedObject, open_shared
from ..errors import FatbinError
from ..machine.loader_path import (
    CACHE,
    FOLDERS,
    LIB_FOLDERS,
    fits,
    read_cache,
    read_own_platform,
    split_library_path,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ..binaries.segments import Platform

LOADER_VARIABLES: Final = ("LD_LIBRARY_PATH", "LD_PRELOAD")

MAX_LIBRARIES = 500  # that one library brings with it; torch has about 40
MAX_FOLDERS = 200  # that one library has them looked for in


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
    folders: tuple[Path, ...] = FOLDERS
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
            return Path(name) if fits(Path(name), self.platform) else None
        candidates = chain(
            (path for path in self.preloaded if path.name == name),
            (folder / name for folder in self._search(by)),
            self.cache.get(name, ()),
            (folder / name for folder in self.folders),
        )
        return next((path for path in candidates if fits(path, self.platform)), None)

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


def _expand(folders: Iterable[str], path: Path | None) -> Iterator[Path]:
    """Yield the folders that $ORIGIN and $LIB stand for."""
    for folder in islice(folders, MAX_FOLDERS):
        place = folder.replace("${", "$").replace("}", "") if "${" in folder else folder
        if "$ORIGIN" in place:
            if path is None:
                continue
            place = place.replace("$ORIGIN", str(path.absolute().parent))
        if "$LIB" in place:
            yield from (Path(place.replace("$LIB", lib)) for lib in LIB_FOLDERS)
        elif "$" not in place:
            yield Path(place)


def read_linker(loaded: Iterable[Path] = (), environ: Mapping[str, str] = os.environ) -> Linker:
    """Describe the linker of this machine, for this interpreter.

    Raises:
        FatbinError: The interpreter is no ELF program: another system has another linker.
    """
    return Linker(
        read_own_platform(),
        Path(sys.executable).resolve(),
        tuple(loaded),
        split_library_path(environ),
        read_cache(CACHE),
        preloaded=tuple(Path(one) for one in environ.get("LD_PRELOAD", "").split() if "/" in one),
    )
