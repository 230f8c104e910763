"""The project to build: its folder, its declaration, and the paths that its tools write.

The toolkit is a folder of the package that it builds, or is installed stand-alone and builds the
project in the current folder.
"""

from __future__ import annotations

import ast
import os
import shutil
import sys
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..errors import KernelsError
from ..product import FILE_NAME, FOLDER, IMPORTED_AS, NAME, PROJECT_FOLDER, VARIABLES, parse_toml
from .declaration import Project, read_declaration
from .declared.keys import read_toml_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ..builds.published import Source

TOOLKIT: Final = Path(__file__).resolve().parents[1]
EMBEDDED: Final = bool(IMPORTED_AS)  # the toolkit is a folder of the package
ROOT: Final = TOOLKIT.parents[1] if EMBEDDED else PROJECT_FOLDER or Path()


def _find_package() -> Path:
    """Return the folder of the Python package that wheels contain."""
    places = (ROOT / NAME, ROOT / "src" / NAME)
    return TOOLKIT.parent if EMBEDDED else next(filter(Path.is_dir, places), places[0])


PACKAGE: Final = _find_package()
NATIVE: Final = TOOLKIT / "native"  # C++ sources that all kernel libraries share
MAKE: Final = str(__package__)  # import name of the package of this file
# Files of the toolkit that build wheels or describe its distribution. No project's wheel has them.
NOT_INSTALLED: Final = tuple(
    TOOLKIT / name
    for name in (
        "make",
        "native",
        "__main__.py",
        "backend.py",
        "sessions.py",
        "pyproject.toml",
        "build",  # left behind by `pip install ./toolkit`
    )
)
PYPROJECT: Final = ROOT / "pyproject.toml"
GROUPS: Final = TOOLKIT / "pyproject.toml"  # has the dependency groups for building and publishing
README: Final = ROOT / "README.md"
# Every wheel contains these two files. They are source files only in a package with the toolkit;
# for any other package, the build writes them.
SETS_FILE: Final = PACKAGE / "archsets.json"
PRODUCT_FILE: Final = PACKAGE / FILE_NAME
BUILD_FOLDER: Final = f"{VARIABLES}BUILD_DIR"  # the variable that names the folder of objects
TEMPORARY: Final = f"{NAME}-"  # prefix of temporary folders


def build_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder that keeps objects between builds."""
    return Path(environ.get(BUILD_FOLDER) or ROOT / "build")


def find_installed(package: Path, toolkit: Path | None = None) -> list[Path]:
    """Return the Python and data files of a package, without the modules that build wheels.

    Args:
        package: The folder.
        toolkit: The toolkit in the folder; by default the toolkit of this package, if it has one.
    """
    toolkit = toolkit or package / TOOLKIT.name
    left_out = {toolkit / path.name for path in NOT_INSTALLED}
    found = sorted(package.rglob("*"))
    return [
        path
        for path in found
        if path.suffix in {".json", ".py", ".typed"} and not left_out & {path, *path.parents}
    ]


def list_below(*places: Path) -> Iterator[Path]:
    """Yield the files in `places`, and all files below the folders in `places`."""
    for place in places:
        yield from (path for path in (place, *place.rglob("*")) if path.is_file())


def stage_toolkit(folder: Path) -> Path:
    """Copy a stand-alone toolkit to a fixed path in the build folder, and return that path.

    Python imports the toolkit from there, without the packages that are installed next to it.

    Objects depend on the toolkit's path, and every isolated environment has another path. Unchanged
    files keep their modification time, so that compiled objects stay valid.
    """
    staged = folder / "toolkit" / FOLDER
    for path in sorted(TOOLKIT.rglob("*")):
        copy = staged / path.relative_to(TOOLKIT)
        if path.is_dir() or "__pycache__" in path.parts:
            continue
        if not copy.is_file() or copy.read_bytes() != path.read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    return staged


def made_mark(folder: Path) -> Path:
    """Return the file that marks a folder of `make_once` as complete."""
    return folder / "complete"


@contextmanager
def make_once(folder: Path) -> Iterator[bool]:
    """Yield True if a folder that is kept between builds has to be made.

    The folder counts as made when the block has ended without an error; an incomplete folder is
    deleted.
    """
    made = made_mark(folder)
    if made.is_file():
        yield False
        return
    shutil.rmtree(folder, ignore_errors=True)
    yield True
    made.touch()


def write_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(map(str.strip, cells))} |\n" for cells in (heads, *rows)]
    return "".join((lines[0], "|---" * len(heads), "|\n", *lines[1:]))


def replace_between(marks: tuple[str, str], text: str, new: str) -> str:
    """Return a page with its generated text, between two marker lines, replaced by `new`.

    Raises:
        KernelsError: A marker does not occur exactly once, or the end marker is first.
    """
    begin, end = marks
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
        message = f"the README needs one line `{begin.strip()}`, and `{end.strip()}` after it"
        raise KernelsError(message)
    before, _, rest = text.partition(begin)
    return f"{before}{begin}{new}{end}{rest.partition(end)[2]}"


def can_read_toml() -> bool:
    """Tell if this Python has a TOML parser: Python 3.10 gets one from the build requirements."""
    return sys.version_info >= (3, 11) or find_spec("tomli") is not None


def read_pyproject(path: Path = PYPROJECT) -> dict[str, Any]:
    """Read a whole `pyproject.toml`."""
    return parse_toml(path.read_text(encoding="utf-8"))


def load_groups(*, own: bool = True) -> dict[str, Any]:
    """Return the dependency groups of the toolkit, and with `own` those of the project."""
    files = (GROUPS, PYPROJECT) if own else (GROUPS,)
    found: dict[str, Any] = {}
    for path in files:
        found |= read_pyproject(path).get("dependency-groups", {})
    return found


@cache
def load_project(path: Path = PYPROJECT) -> Project:
    """Read the project's declaration.

    Raises:
        KernelsError: Nothing can be built from the declaration.
    """
    return read_declaration(read_toml_file(path, str(path)), path.parent)


def load_requirements(group: str, path: Path = GROUPS) -> list[str]:
    """Read a dependency group that is a list of strings, one per line.

    Such a list is also valid Python, so no TOML parser is needed: Python 3.10 has none.
    """
    text = path.read_text(encoding="utf-8")
    start = text.index(f"\n{group} = [") + len(f"\n{group} = ")
    found: list[str] = ast.literal_eval(text[start : text.index("\n]", start) + 2])
    return found


def report_path(label: str) -> Path:
    """Return the path of a build's report: a line of counts, which is printed after the build."""
    return build_folder() / "reports" / f"{label}.txt"


def read_report(label: str, folder: Path | None = None) -> str:
    """Read the report on a set, by its label; `folder` is the build folder, by default our own."""
    path = report_path(label) if folder is None else folder / "reports" / f"{label}.txt"
    return path.read_text(encoding="utf-8").strip()


ARCHSETS: Final[Source] = SETS_FILE if EMBEDDED else load_project().sets  # the project's arch sets
