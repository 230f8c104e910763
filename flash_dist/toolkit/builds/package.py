"""The folder of the installed package, and the files that a build puts into it."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Final

from .. import errors  # of the toolkit, which is a folder of the package
from ..product import IMPORTED_AS

PACKAGE: Final = Path(errors.__file__).resolve().parents[1]
FOUND: Final = Path(errors.__file__).absolute().parents[1]  # by Python: links are not followed
DATA: Final = resources.files(IMPORTED_AS)  # the same also inside of a zip file
