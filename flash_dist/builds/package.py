"""The folder of the installed package, and the files that a build puts into it."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Final

from .. import errors  # a module of the top folder: that is where they lie

PACKAGE: Final = Path(errors.__file__).resolve().parent
FOUND: Final = Path(errors.__file__).absolute().parent  # by Python: links are not followed
DATA: Final = resources.files(errors.__package__)  # the same also inside of a zip file

KERNELS: Final = "libflash_dist_kernels.so"
BINDING: Final = "_C.abi3.so"
