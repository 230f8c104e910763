"""Where the project is that is built, what it declares, and where its tools write what.

The toolkit is a folder of the package that it builds, or is installed by itself and builds the
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
    """Return the folder of the sources that wheels hold."""
    places = (ROOT / NAME, ROOT / "src" / NAME)
    return TOOLKIT.parent if EMBEDDED else next(filter(Path.is_dir, places), places[0])


PACKAGE: Final = _find_package()
NATIVE: Final = TOOLKIT / "native"  # C++ of any kernel library
MAKE: Final = str(__package__)  # this folder, as Python names it
# What of the toolkit builds wheels, and is its own distribution; no wheel of a package has it.
NOT_INSTALLED: Final = tuple(
    TOOLKIT / name
    for name in (
        "make",
        "native",
        "__main__.py",
        "backend.py",
        "sessions.py",
        "pyproject.toml",
        "build",  # which `pip install ./toolkit` leaves there
    )
)
PYPROJECT: Final = ROOT / "pyproject.toml"
GROUPS: Final = TOOLKIT / "pyproject.toml"  # has the requirements of what builds and publishes
README: Final = ROOT / "README.md"
SETS_FILE: Final = (
    PACKAGE / "archsets.json"
)  # in every wheel; of a package with its own toolkit, a source
PRODUCT_FILE: Final = PACKAGE / FILE_NAME
BUILD_FOLDER: Final = f"{VARIABLES}BUILD_DIR"  # the variable that names where objects are kept
TEMPORARY: Final = f"{NAME}-"  # what the names of temporary folders begin with


def build_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where objects are kept from one build to the next."""
    return Path(environ.get(BUILD_FOLDER) or ROOT / "build")


def find_installed(package: Path, toolkit: Path | None = None) -> list[Path]:
    """Return the modules and data of a folder that a wheel has: all but what builds it.

    Args:
        package: The folder.
        toolkit: The toolkit in it; by default that of this package, where it has one.
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
    """Yield the files that places are, or that are below them."""
    for place in places:
        yield from (path for path in (place, *place.rglob("*")) if path.is_file())


def stage_toolkit(folder: Path) -> Path:
    """Copy a toolkit that is installed by itself to where the next build finds it again.

    Python finds it there, too, without what is installed beside the original.

    An isolated environment lies in another folder each time, and objects are those of one path.
    Files that are equal keep their time: what was compiled from them stays.
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
    """Return the file that says of such a folder that it is whole."""
    return folder / "complete"


@contextmanager
def make_once(folder: Path) -> Iterator[bool]:
    """Say whether a folder has to be made, which is kept from one build to the next.

    It counts as made when the block has ended without an error; what is there without that goes.
    """
    made = made_mark(folder)
    if made.is_file():
        yield False
        return
    shutil.rmtree(folder, ignore_errors=True)
    yield True
    made.touch()


def write_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table in Markdown."""
    lines = [f"| {' | '.join(map(str.strip, cells))} |\n" for cells in (heads, *rows)]
    return "".join((lines[0], "|---" * len(heads), "|\n", *lines[1:]))


def replace_between(marks: tuple[str, str], text: str, new: str) -> str:
    """Put a part that a tool makes between two lines that mark its place in the README.

    Raises:
        KernelsError: The marks are not there, once and in order.
    """
    begin, end = marks
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
        message = f"the README needs one line `{begin.strip()}`, and `{end.strip()}` after it"
        raise KernelsError(message)
    before, _, rest = text.partition(begin)
    return f"{before}{begin}{new}{end}{rest.partition(end)[2]}"


def can_read_toml() -> bool:
    """Whether this Python has a reader of TOML: 3.10 gets one with the requirements of a build."""
    return sys.version_info >= (3, 11) or find_spec("tomli") is not None


def read_pyproject(path: Path = PYPROJECT) -> dict[str, Any]:
    """Read a whole `pyproject.toml`."""
    return parse_toml(path.read_text(encoding="utf-8"))


def load_groups(*, own: bool = True) -> dict[str, Any]:
    """Return the dependency groups of the toolkit, and `own` ones of the project."""
    files = (GROUPS, PYPROJECT) if own else (GROUPS,)
    found: dict[str, Any] = {}
    for path in files:
        found |= read_pyproject(path).get("dependency-groups", {})
    return found


def load_project(path: Path = PYPROJECT) -> Project:
    """Read what the project declares.

    Raises:
        KernelsError: Nothing can be built from it.
    """
    return _load_project(path)


@cache
def _load_project(path: Path) -> Project:
    return read_declaration(read_toml_file(path, str(path)), path.parent)


def load_requirements(group: str, path: Path = GROUPS) -> list[str]:
    """Read a dependency group that is a list of strings, one a line.

    TOML writes it as Python does, and Python 3.10 has no reader of TOML before one is installed.
    """
    text = path.read_text(encoding="utf-8")
    start = text.index(f"\n{group} = [") + len(f"\n{group} = ")
    found: list[str] = ast.literal_eval(text[start : text.index("\n]", start) + 2])
    return found


def report_path(label: str) -> Path:
    """Return where setup.py counts kernels and objects, for the log's last lines."""
    return build_folder() / "reports" / f"{label}.txt"


def read_report(label: str, folder: Path | None = None) -> str:
    """Return what was left for a set, here or in the build folder of a container."""
    path = report_path(label) if folder is None else folder / "reports" / f"{label}.txt"
    return path.read_text(encoding="utf-8").strip()


ARCHSETS: Final[Source] = SETS_FILE if EMBEDDED else load_project().sets  # of the project
