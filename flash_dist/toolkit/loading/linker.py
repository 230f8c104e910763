"""Finds the files that the dynamic linker would load for a library, without loading any.

`machine/loader_path.py` finds the folders that are searched for every library. Libraries are judged
for an environment: the linker, Python, the C library and torch. Sources: ld.so(8), dlopen(3).
"""

from __future__ import annotations

import os
import platform
import sys
import sysconfig
from dataclasses import dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from ..binaries.symbols import SharedObject, open_shared
from ..errors import AccessError, FatbinError
from ..machine.loader_path import (
    CACHE,
    FOLDERS,
    LIB_FOLDERS,
    ends_search,
    read_cache,
    read_own_platform,
    split_library_path,
)
from ..machine.torch_install import Torch, find_torch_libraries

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ..binaries.segments import Platform

LOADER_VARIABLES: Final = ("LD_LIBRARY_PATH", "LD_PRELOAD")

MAX_LIBRARIES = 500  # most libraries that one library may need; torch needs about 40
MAX_FOLDERS = 200  # most folders that one library may add to the search


@dataclass(frozen=True)
class Loaded:
    """A library as the linker would load it: the file, and the library that needs it."""

    shared: SharedObject
    path: Path | None = None  # None for a member of an archive
    loader: Loaded | None = None


@dataclass(frozen=True)
class Missing:
    """A needed library that is not found."""

    name: str
    needed_by: str  # file name of the library that needs it; empty if that is the root


class Found(NamedTuple):
    """A file that the linker would load, with the reason."""

    path: str
    variable: str = ""  # the variable that names the file or its folder
    fix: str = ""  # the step that makes the linker skip the file

    def __str__(self) -> str:
        return f"{self.path} (from {self.variable})" if self.variable else self.path


@dataclass(frozen=True)
class Broken:
    """A library that the linker finds but cannot load."""

    name: str
    path: Path
    reason: str


@dataclass(frozen=True)
class Closure:
    """A library and everything that is loaded with it, in the linker's order."""

    libraries: Mapping[str, Loaded]  # by the name under which a file needs them; "" is the root
    missing: tuple[Missing, ...] = ()
    unread: tuple[str, ...] = ()  # names of libraries that exist, but that were not read
    broken: tuple[Broken, ...] = ()


@dataclass(frozen=True)
class Linker:
    """The inputs of the dynamic linker's search: folders, cache and variables."""

    platform: Platform
    program: Path | None = None  # the interpreter
    loaded: tuple[Path, ...] = ()  # folders of libraries that are loaded already: torch's, NVIDIA's
    library_path: tuple[Path, ...] = ()  # LD_LIBRARY_PATH
    cache: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    folders: tuple[Path, ...] = FOLDERS
    preloaded: tuple[Path, ...] = ()  # LD_PRELOAD
    _opened: dict[Path, SharedObject | FatbinError] = field(default_factory=dict, repr=False)

    def close(self, root: Loaded, siblings: Iterable[str] = ()) -> Closure:
        """Find everything that is loaded with a library, breadth first.

        Args:
            root: The library.
            siblings: Names of the files in the library's package, which may load them first.
        """
        beside = frozenset(siblings)
        libraries = {"": root}
        missing: dict[str, Missing] = {}
        unread: dict[str, Broken | None] = {}
        waiting = [root]
        for one in waiting:  # the list grows in the loop
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
                    unread[name] = self._find_damage(name, path)
                else:
                    libraries[name] = Loaded(shared, path, one)
                    waiting.append(libraries[name])
        broken = tuple(one for one in unread.values() if one is not None)
        return Closure(libraries, tuple(missing.values()), tuple(unread), broken)

    def open(self, path: Path) -> SharedObject | None:
        """Open a library once; None if it cannot be read."""
        if path not in self._opened:
            try:
                self._opened[path] = open_shared(path)
            except FatbinError as error:
                self._opened[path] = error
        found = self._opened[path]
        return None if isinstance(found, FatbinError) else found

    def _find_damage(self, name: str, path: Path | None) -> Broken | None:
        """Describe the damage of a file that could not be opened; None if it may be sound."""
        error = self._opened.get(path) if path is not None else None
        if path is None or not isinstance(error, FatbinError) or isinstance(error, AccessError):
            return None
        return Broken(name, path, error.message.removeprefix(f"cannot read `{path}`: "))

    def find(self, name: str, by: Loaded) -> Path | None:
        """Return the file that the linker would load for a needed name; None if it finds none."""
        if "/" in name:
            return Path(name) if ends_search(Path(name), self.platform) else None
        candidates = chain(
            (path for path in self.preloaded if path.name == name),
            (folder / name for folder in self._search(by)),
            self.cache.get(name, ()),
            (folder / name for folder in self.folders),
        )
        return next((path for path in candidates if ends_search(path, self.platform)), None)

    def explain(self, path: Path) -> Found:
        """Say which variable made the linker choose a file, and how to avoid that."""
        if path in self.preloaded:
            name, named, what = "LD_PRELOAD", self.preloaded, path
        elif path.parent in self.library_path:
            name, named, what = "LD_LIBRARY_PATH", self.library_path, path.parent
        else:
            return Found(str(path))
        others = ":".join(str(one) for one in named if one != what)
        command = f"export {name}={others}" if others else f"unset {name}"
        return Found(str(path), name, f"`{command}`: it names {what}")

    def _search(self, by: Loaded) -> Iterator[Path]:
        """Yield the folders that the linker searches before its cache, in search order."""
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
    """Yield the folders with $ORIGIN and $LIB replaced; skip a folder with an unknown variable."""
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


@dataclass(frozen=True)
class LoadHost:
    """The environment for which libraries are judged."""

    linker: Linker
    torch: Torch
    libc: str  # "glibc 2.36"
    python: str  # "3.11", or "3.13t" without the GIL
    suffixes: tuple[str, ...]  # suffixes of extension modules for this Python
    torch_folder: Path | None = None  # folder of torch's libraries
    prefix: Path = Path(sys.prefix)

    def torch_extensions(self) -> tuple[Path, ...]:
        """Return torch's own extension modules, the one for this Python first."""
        if self.torch_folder is None:
            return ()
        found = sorted(self.torch_folder.parent.glob("_C.*.so"))
        return tuple(sorted(found, key=lambda path: path.name[2:] not in self.suffixes))


def read_host(torch: Torch, libc: str) -> LoadHost:
    """Describe this machine and interpreter.

    Raises:
        FatbinError: The interpreter is not an ELF program: another loader is in use.
    """
    folder = find_torch_libraries()
    nvidia = (Path(entry or ".", "nvidia") for entry in sys.path)
    loaded = [folder] if folder is not None else []
    loaded += [lib for one in nvidia if one.is_dir() for lib in sorted(one.glob("*/lib"))]
    python = ".".join(platform.python_version_tuple()[:2])
    python += "t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
    own, program = read_own_platform(), Path(sys.executable).resolve()
    named, cache = split_library_path(os.environ), read_cache(CACHE)
    preloaded = tuple(Path(one) for one in os.environ.get("LD_PRELOAD", "").split() if "/" in one)
    linker = Linker(own, program, tuple(loaded), named, cache, preloaded=preloaded)
    return LoadHost(linker, torch, libc, python, tuple(EXTENSION_SUFFIXES), folder)
