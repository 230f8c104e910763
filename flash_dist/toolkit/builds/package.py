"""Folders of the installed package, and the hint for a package that was not built."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Final

from .. import errors  # locates the toolkit's folder
from ..product import FOLDER, IMPORTED_AS, PROGRAM

_DEPTH: Final = 1 if IMPORTED_AS else 0  # 0: a toolkit without a package around it
PACKAGE: Final = Path(errors.__file__).resolve().parents[_DEPTH]
FOUND: Final = Path(errors.__file__).absolute().parents[_DEPTH]  # symbolic links not resolved
DATA: Final = resources.files(IMPORTED_AS or FOLDER)  # works inside a zip file, too

UNBUILT_HINT: Final = errors.hint_to_build(
    "leave the clone, whose sources hide an installed wheel: `cd ..`; "
    "`nox -s build_wheels` makes one",
    f"install a wheel: `{PROGRAM} select` says which",
)
