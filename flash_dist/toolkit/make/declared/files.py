"""Finds files and folders that a table names, and checks that they lie in the project."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from .keys import DeclarationError, spell

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

CUDA: Final = (".cu",)
CXX: Final = (".cpp", ".cc", ".cxx")
PYTHON: Final = (".py",)
MARKDOWN: Final = (".md",)
FOLDERS: Final = ()  # value of `suffixes` that selects folders

_INSIDE: Final = "files must lie in the folder of pyproject.toml: the sources are packed from it"
_WRITTEN: Final = frozenset({"build", "dist"})  # written by builds, at the top of a project
_NO_SOURCES: Final = frozenset({"__pycache__", "node_modules"})
_VENV: Final = "pyvenv.cfg"
_REFUSED: Final = re.compile(r'[\x00-\x1f\x7f;,\\"$`]')  # refused by CMake in lists, or by nvcc
_WILD: Final = re.compile(r"[*?\[]")
_MOST_NAMES: Final = 2000  # maximum number of existing names compared with a wrong name


def find_paths(
    patterns: Iterable[str], root: Path, where: str, suffixes: tuple[str, ...]
) -> tuple[Path, ...]:
    """Return the files that the names and patterns of a key match, each once.

    Patterns do not match hidden folders, `build/`, `dist/` and virtual environments.

    Args:
        patterns: Paths relative to the project, with `*` for several paths.
        root: The folder of the project.
        where: Name of the key in errors.
        suffixes: Allowed suffixes of the files; `FOLDERS` for folders.

    Raises:
        DeclarationError: A name or pattern matches nothing, or it matches a path that is of another
            kind, unreadable or outside of the project.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        for path in _expand(pattern, root, where):
            _require_fit(path, root, where, suffixes)
            found[path] = None
    return tuple(found)


def find_path(name: str, root: Path, where: str, suffixes: tuple[str, ...]) -> Path:
    """Return the single file that a key names."""
    if _WILD.search(name) and not (root / name).exists():
        message = f"{where} must name one file, got {spell(name)}"
        raise DeclarationError(message, hint="name it without `*`")
    (found,) = find_paths([name], root, where, suffixes)
    return found


def _expand(pattern: str, root: Path, where: str) -> list[Path]:
    """Return the matches of a pattern that are not excluded; raise if there is none."""
    parts = Path(pattern).parts
    if Path(pattern).is_absolute() or ".." in parts:
        message = f"{where} must name files by paths in the project, got {spell(pattern)}"
        raise DeclarationError(message, hint=_INSIDE)
    if not parts:
        message = f"{where} names {spell(pattern)}, the whole project"
        raise DeclarationError(message, hint="name a folder in it, such as `csrc`")
    if any("**" in part and part != "**" for part in parts) or parts[-1] == "**":
        message = f"{where} has the pattern {spell(pattern)}, where `**` stands for no folders"
        raise DeclarationError(message, hint="`csrc/**/*.cu` names the files of all folders")
    try:
        there = (root / pattern).exists()
        found = [root / pattern] if there else sorted(root.glob(pattern))
    except (OSError, ValueError, NotImplementedError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        message = f"{where} cannot name {spell(pattern)}: {reason}"
        raise DeclarationError(message, hint="name files as in `csrc/*.cu`") from error
    kept = [path for path in found if not _leave_out(path, root)]
    if there and not kept:
        message = f"{where} names {spell(pattern)}, which is hidden or written by builds"
        raise DeclarationError(message, hint="put sources into another folder, such as `csrc`")
    if not kept:
        message = f"{where} names {spell(pattern)}, and there is no such file in {root}"
        raise DeclarationError(message, hint=_near(pattern, root))
    return kept


def _leave_out(path: Path, root: Path) -> bool:
    parts = path.relative_to(root).parts
    folders = [root.joinpath(*parts[: end + 1]) for end in range(len(parts))]
    return (
        parts[0] in _WRITTEN
        or any(part.startswith(".") or part in _NO_SOURCES for part in parts)
        or any(part.endswith(".egg-info") for part in parts)
        or any(map(_is_environment, folders))
    )


def _is_environment(folder: Path) -> bool:
    try:
        return (folder / _VENV).is_file()
    except OSError:  # the folder may not be readable
        return False


def list_files(root: Path) -> Iterator[Path]:
    """Yield the files of a project, except those that patterns never match."""
    return (path for path in _walk(root) if not path.is_dir())


def _walk(root: Path) -> Iterator[Path]:
    """Yield the folders and files of a project, except those that patterns never match."""
    for place, folders, files in os.walk(root):
        here = Path(place)
        folders[:] = sorted(one for one in folders if not _leave_out(here / one, root))
        paths = (here / one for one in (*folders, *sorted(files)))
        yield from (path for path in paths if not _leave_out(path, root))


def _near(pattern: str, root: Path) -> str:
    """Return a hint: the path most like a wrong pattern, or the folder of relative paths."""
    suffix = Path(pattern).suffix
    paths = (path.relative_to(root).as_posix() for path in islice(_walk(root), _MOST_NAMES))
    names = [name for name in paths if not suffix or name.endswith(suffix)]
    near = get_close_matches(pattern, names, 1, cutoff=0.5)
    return f"did you mean `{near[0]}`?" if near else f"paths are relative to {root}"


def _require_fit(path: Path, root: Path, where: str, suffixes: tuple[str, ...]) -> None:
    """Check the name and kind of a file or folder, and that it is readable and in the project."""
    name = path.relative_to(root).as_posix()
    refused = _REFUSED.search(str(path))
    if refused:
        message = (
            f"{where} names {spell(str(path))}, and CMake and nvcc take no {spell(refused[0])}"
        )
        raise DeclarationError(message, hint="rename the file, or the folder of the project")
    if suffixes == FOLDERS:
        _require_folder(path, root, where)
    elif not path.is_file():
        kind = "a folder" if path.is_dir() else "no file"
        message = f"{where} must name files, got `{name}`, which is {kind}"
        inside = f"`{name}/*{suffixes[0]}` names the files in it"
        raise DeclarationError(message, hint=inside if path.is_dir() else "name a regular file")
    elif path.suffix not in suffixes:
        message = f"{where} must name files in {' or '.join(suffixes)}, got `{name}`"
        raise DeclarationError(message, hint=f"for example `csrc/*{suffixes[0]}`")
    _require_readable(path, root, where)
    for link in _find_leaving(path, root):
        told = link.relative_to(root).as_posix()
        message = f"{where} names `{name}`, and the link `{told}` leaves the project"
        raise DeclarationError(message, hint=_INSIDE)


def _require_folder(path: Path, root: Path, where: str) -> None:
    name = path.relative_to(root).as_posix()
    if not path.is_dir():
        message = f"{where} must name folders, got `{name}`, which is a file"
        parent = path.relative_to(root).parent.as_posix()
        raise DeclarationError(message, hint=f"its folder is `{parent}`")
    _require_readable(path, root, where)
    if not any(path.iterdir()):
        message = f"{where} names `{name}`, an empty folder"
        raise DeclarationError(message, hint="`git submodule update --init` fills submodules")


def _require_readable(path: Path, root: Path, where: str) -> None:
    if not os.access(path, os.R_OK):
        name = path.relative_to(root).as_posix()
        message = f"{where} names `{name}`, which this user may not read"
        raise DeclarationError(message, hint=f"`chmod u+r {name}`")


def _find_leaving(path: Path, root: Path) -> Iterator[Path]:
    """Yield the paths that lead out of the project by a link: the path itself, and any below it."""
    real = root.resolve()
    if not path.resolve().is_relative_to(real):
        yield path
    for place, folders, files in os.walk(path):
        for inside in (Path(place) / one for one in (*folders, *files)):
            if inside.is_symlink() and not inside.resolve().is_relative_to(real):
                yield inside
