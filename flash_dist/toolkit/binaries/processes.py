"""Reads the files that a running process has mapped, from /proc."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from ..errors import FatbinError

_PROC = Path("/proc")
_DELETED = " (deleted)"
_NO_FILES = ("/memfd:", "/dev/", "/SYSV")  # memory that looks like a deleted file


class MappedFile(NamedTuple):
    """A file that a process uses."""

    path: str
    deleted: bool


def read_mapped_files(pid: int) -> tuple[MappedFile, ...]:
    """Return the files in address order, deleted ones only if code of them runs.

    Raises:
        FatbinError: There is no such process, or this user may not see it.
    """
    found: list[MappedFile] = []
    for name, runs in _read_maps(pid).items():
        path = _locate(pid, name)
        if path is not None:
            found.append(MappedFile(path, deleted=False))
        elif runs and not name.startswith(_NO_FILES):
            found.append(MappedFile(name.removesuffix(_DELETED), deleted=True))
    return tuple(found)


def _read_maps(pid: int) -> dict[str, bool]:
    """Return the files that a process has mapped, each with whether it is executable."""
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
    """Return the path of a file in this process's view; the other may be in a container."""
    inside = _PROC / str(pid) / "root" / name.lstrip("/")
    try:
        if Path(name).exists() and (not inside.exists() or inside.samefile(name)):
            return name
        return str(inside) if inside.exists() else None
    except OSError:
        return name
