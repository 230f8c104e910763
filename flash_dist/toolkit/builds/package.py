"""The folder of the installed package, and the files that a build puts into it."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Final

from .. import errors  # of the toolkit, which is a folder of the package
from ..product import FOLDER, IMPORTED_AS

_DEPTH: Final = 1 if IMPORTED_AS else 0  # a toolkit that is installed by itself is all there is
PACKAGE: Final = Path(errors.__file__).resolve().parents[_DEPTH]
FOUND: Final = Path(errors.__file__).absolute().parents[_DEPTH]  # by Python: links are not followed
DATA: Final = resources.files(IMPORTED_AS or FOLDER)  # the same also inside of a zip file
