"""Opens the libraries of a file, folder, package or process, one after the other.

The files that a running process has mapped are found in /proc.
"""

from __future__ import annotations

import difflib
import os
import stat
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..binaries.elf import ELF_MAGIC
from ..binaries.files import READ_HINT, open_file, unreadable
from ..errors import FatbinError
from .archives import (
    ARCHIVES,
    LIBRARY,
    PROGRAMS,
    Library,
    Unread,
    open_path,
    read_if_possible,
    read_magic,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    Wanted = Callable[[str, os.stat_result], bool]

__all__ = ["Library", "Unread", "open_libraries", "package_libraries", "process_libraries"]

MAX_FILES = 100_000

_PROC: Final = Path("/proc")
_DELETED: Final = " (deleted)"
_NO_FILES: Final = ("/memfd:", "/dev/", "/SYSV")  # mappings that look like deleted files


def open_libraries(path: str | os.PathLike[str]) -> Iterator[Library | Unread]:
    """Open the libraries of a file, archive or folder, one after the other.

    Raises:
        FatbinError: The path cannot be read, or it is an archive and none of its libraries can.
    """
    name = os.fspath(path)
    return _open_files(_walk_folder(name)) if Path(name).is_dir() else open_path(name)


def package_libraries(name: str) -> Iterator[Library | Unread]:
    """Open the libraries of an installed distribution.

    Raises:
        FatbinError: The distribution is not installed, or its files are not recorded.
    """
    try:
        # For an empty name, Python 3.10 would return some distribution.
        found = metadata.distribution(name) if name else None
    except (metadata.PackageNotFoundError, ValueError):
        found = None
    if found is None:
        message = f"package `{name}` is not installed for this Python"
        raise FatbinError(message, hint=_suggest_package(name))
    files = found.files
    if files is None:
        message = f"package `{name}` does not record its files"
        raise FatbinError(message, hint="pass the folder that it is in")
    return _open_files(str(file.locate()) for file in sorted(files))


def process_libraries(pid: int) -> Iterator[Library | Unread]:
    """Open the libraries that a running process has mapped.

    Raises:
        FatbinError: There is no such process or no /proc, or this user may not read it.
    """
    return _open_files(_find_mapped(pid, _read_maps(pid)), _is_elf)


def _is_candidate(path: str, status: os.stat_result) -> bool:
    """Tell if a file has the suffix of a library or archive, or the first bytes of a program.

    The first bytes count only if the file has no suffix or is executable.
    """
    if LIBRARY.fullmatch(Path(path).name) or Path(path).suffix in ARCHIVES:
        return True
    if not status.st_size or ("." in Path(path).name and not status.st_mode & 0o111):
        return False
    with open_file(path) as file:
        return read_magic(file).startswith(PROGRAMS)


def _is_elf(path: str, status: os.stat_result) -> bool:
    if not status.st_size:
        return False
    with open_file(path) as file:
        return read_magic(file).startswith(ELF_MAGIC)


def _open_files(
    paths: Iterable[str | Unread], is_wanted: Wanted = _is_candidate
) -> Iterator[Library | Unread]:
    """Open each wanted file once, even if it has several names; yield failures as `Unread`."""
    seen: set[tuple[int, int]] = set()
    for path in paths:
        if isinstance(path, Unread):
            yield path
            continue
        try:
            status = Path(path).stat()
        except OSError as error:
            if LIBRARY.fullmatch(Path(path).name):
                yield Unread(path, "", unreadable(path, error.strerror))
            continue
        identity = status.st_dev, status.st_ino
        if not stat.S_ISREG(status.st_mode) or identity in seen:
            continue
        opened = _open_wanted(path, status, is_wanted)
        for item in read_if_possible(path, "", opened, outermost=True):
            seen.add(identity)
            if len(seen) > MAX_FILES:
                reason = f"at most {MAX_FILES} libraries are read, the others are skipped"
                yield Unread(path, "", unreadable(path, reason))
                return
            yield item


def _open_wanted(
    path: str, status: os.stat_result, is_wanted: Wanted
) -> Iterator[Library | Unread]:
    if is_wanted(path, status):
        yield from open_path(path)


def _walk_folder(folder: str) -> Iterator[str | Unread]:
    """Yield the files of a folder and then of its subfolders; do not follow links to folders."""
    waiting = [folder]
    while waiting:
        place = waiting.pop()
        try:
            with os.scandir(place) as found:
                entries = sorted(found, key=lambda entry: entry.name)
            inner = {entry.path for entry in entries if entry.is_dir(follow_symlinks=False)}
        except OSError as error:
            refused = unreadable(place, error.strerror, hint=READ_HINT)
            if place == folder:
                raise refused from error
            yield Unread(place, "", refused)
            continue
        yield from (entry.path for entry in entries if entry.path not in inner)
        waiting.extend(sorted(inner, reverse=True))


def _suggest_package(name: str) -> str:
    installed = {one.name.lower(): one.name for one in metadata.distributions() if one.name}
    providers = metadata.packages_distributions().get(name, [])  # scikit-learn for `sklearn`
    close = difflib.get_close_matches(name.lower(), installed, n=3)
    names = dict.fromkeys([*providers, *(installed[one] for one in close)])
    if not names:
        return "`pip list` shows the installed packages"
    return f"did you mean {' or '.join(f'`{one}`' for one in names)}?"


def _find_mapped(pid: int, mapped: Mapping[str, bool]) -> Iterator[str | Unread]:
    """Yield the files that a process has mapped, in address order.

    A deleted file is yielded as `Unread` if it was mapped as executable, and skipped otherwise. For
    a process in a container, the paths lead through /proc, so that the caller can open them.
    """
    for name, runs in mapped.items():
        path = _locate(pid, name)
        if path is not None:
            yield path
        elif runs and not name.startswith(_NO_FILES):
            path = name.removesuffix(_DELETED)
            reason = "it was deleted or replaced after the process had loaded it"
            yield Unread(path, "", unreadable(path, reason, hint="restart the process"))


def _read_maps(pid: int) -> dict[str, bool]:
    """Return the paths of mapped files, each with True if the file is mapped as executable."""
    if not (_PROC / "self").exists():
        message = f"cannot list the files of process {pid}: this system has no /proc"
        raise FatbinError(message)
    mapped: dict[str, bool] = {}
    try:
        with (_PROC / str(pid) / "maps").open("rb") as lines:
            for line in lines:
                fields = os.fsdecode(line.rstrip(b"\n")).split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith("/"):  # noqa: PLR2004
                    path = fields[5].replace("\\012", "\n")
                    mapped[path] = mapped.get(path, False) or "x" in fields[1]
    except (FileNotFoundError, ProcessLookupError):
        message = f"there is no process {pid}"
        raise FatbinError(message, hint="`ps -e` lists the processes") from None
    except OSError as error:
        message = f"cannot read the files of process {pid}: {error.strerror}"
        raise FatbinError(message, hint="run as the user who started it, or as root") from error
    return mapped


def _locate(pid: int, name: str) -> str | None:
    """Return the path by which this process can open a mapped file; None if the file is gone."""
    inside = _PROC / str(pid) / "root" / name.lstrip("/")
    try:
        if Path(name).exists() and (not inside.exists() or inside.samefile(name)):
            return name
        return str(inside) if inside.exists() else None
    except OSError:
        return name
