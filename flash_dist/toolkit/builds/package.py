"""Folder of the installed package, and names of the files that a build adds to it."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Final

from .. import errors  # errors is in the toolkit, a folder of the package
from ..product import FOLDER, IMPORTED_AS, PROGRAM

_DEPTH: Final = 1 if IMPORTED_AS else 0  # 0: the toolkit is installed without a package around it
PACKAGE: Final = Path(errors.__file__).resolve().parents[_DEPTH]
FOUND: Final = Path(errors.__file__).absolute().parents[_DEPTH]  # links are not resolved
DATA: Final = resources.files(IMPORTED_AS or FOLDER)  # also inside a zip file

UNBUILT_HINT: Final = errors.hint_to_build(
    "leave the clone, whose sources hide an installed wheel: `cd ..`; "
    "`nox -s build_wheels` makes one",
    f"install a wheel: `{PROGRAM} select` says which",
)
