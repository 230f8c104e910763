"""What `pyproject.toml` says about the project itself, and where its tools write what."""

from __future__ import annotations

import ast
import os
import shutil
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import FlashDistError
from ..product import FILE_NAME, NAME, VARIABLES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

TOOLKIT = Path(__file__).resolve().parents[1]
PACKAGE = TOOLKIT.parent  # the folder of the sources that wheels hold
ROOT = PACKAGE.parent
NATIVE = TOOLKIT / "native"  # C++ of any kernel library
# Folders that build wheels; no wheel has them.
NOT_INSTALLED = tuple(path.relative_to(ROOT) for path in (TOOLKIT / "make", NATIVE))
MAKE = str(__package__)  # this folder, as Python names it
PYPROJECT = ROOT / "pyproject.toml"
README = ROOT / "README.md"
ARCHSETS = PACKAGE / "archsets.json"
PRODUCT_FILE = PACKAGE / FILE_NAME
SOURCES = ROOT / "csrc"  # C++ and CUDA of the package
TABLE = SOURCES / "kernels.toml"
INCLUDES = (SOURCES, TOOLKIT)  # where #include looks, beside the folder of generated headers
BUILD_FOLDER = f"{VARIABLES}BUILD_DIR"  # the variable that names where objects are kept
TEMPORARY = f"{NAME}-"  # what the names of temporary folders begin with


def build_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where objects are kept from one build to the next."""
    return Path(environ.get(BUILD_FOLDER) or ROOT / "build")


def find_installed(package: Path) -> list[Path]:
    """Return the modules and data of the package that a wheel has: all but what builds it."""
    left_out = {package / path.relative_to(TOOLKIT.parent.name) for path in NOT_INSTALLED}
    found = sorted(package.rglob("*"))
    return [
        path
        for path in found
        if path.suffix in {".json", ".py", ".typed"} and not left_out & set(path.parents)
    ]


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
        FlashDistError: The marks are not there, once and in order.
    """
    begin, end = marks
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
        message = f"the README needs one line `{begin.strip()}`, and `{end.strip()}` after it"
        raise FlashDistError(message)
    before, _, rest = text.partition(begin)
    return f"{before}{begin}{new}{end}{rest.partition(end)[2]}"


@dataclass(frozen=True)
class Project:
    """The table of the package below `[tool]`."""

    version: str
    torch_min: str
    torch_tested_max: str
    source_date_epoch: int
    dependencies: list[str]  # of every wheel

    def wheel_version(self, toolkit: str, label: str) -> str:
        """Return the version of one wheel: 0.1.0+cu130.hopper."""
        return f"{self.version}+cu{toolkit.replace('.', '')}.{label}"

    @property
    def epoch(self) -> str:
        """SOURCE_DATE_EPOCH of a build: the environment's, or the one of this version."""
        return os.environ.get("SOURCE_DATE_EPOCH", str(self.source_date_epoch))


def read_pyproject(path: Path = PYPROJECT) -> dict[str, Any]:
    """Read a whole `pyproject.toml`."""
    if sys.version_info >= (3, 11):
        import tomllib  # noqa: PLC0415
    else:
        import tomli as tomllib  # noqa: PLC0415 - absent while the build backend judges the machine
    found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    return found


def load_project(path: Path = PYPROJECT) -> Project:
    """Read the project's own table."""
    return Project(**read_pyproject(path)["tool"][NAME])


def load_requirements(group: str, path: Path = PYPROJECT) -> list[str]:
    """Read a dependency group that is a list of strings, one a line.

    TOML writes it as Python does, and Python 3.10 has no reader of TOML before one is installed.
    """
    text = path.read_text(encoding="utf-8")
    start = text.index(f"\n{group} = [") + len(f"\n{group} = ")
    found: list[str] = ast.literal_eval(text[start : text.index("\n]", start) + 2])
    return found


def report_path(label: str) -> Path:
    """Return where setup.py leaves its `N objects compiled, M reused` for the log's last lines."""
    return build_folder() / "reports" / f"{label}.txt"


def read_report(label: str, folder: Path | None = None) -> str:
    """Return what was left for a set, here or in the build folder of a container."""
    path = report_path(label) if folder is None else folder / "reports" / f"{label}.txt"
    return path.read_text(encoding="utf-8").strip()
