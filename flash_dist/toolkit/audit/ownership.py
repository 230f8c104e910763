"""Finds the project of a wheel or conda package.

`verify` judges only packages that a toolkit like this one built.
"""

from __future__ import annotations

from email.parser import BytesHeaderParser
from typing import TYPE_CHECKING, Final

from packaging.utils import canonicalize_name

from ..binaries.wheel import open_wheel
from ..builds.conda_package import SITE, read_claims
from ..builds.contents import find_naming
from ..errors import KernelsError
from ..product import NAME

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

PROJECT: Final = canonicalize_name(NAME)
_FOLDERS: Final = (f"{NAME}/", f"{NAME}-")


def name_other_project(path: Path) -> str:
    """Return the project of a wheel or conda package that holds no record of its build.

    Return an empty text if the package has such a record, claims any of this package's names, or
    cannot be read.
    """
    try:
        name = _name_conda(path) if path.suffix == ".conda" else _name_wheel(path)
    except KernelsError:
        return ""
    names = (name, path.name.partition("-")[0], path.name[: len(PROJECT)])
    return "" if PROJECT in map(canonicalize_name, names) else name


def _is_ours(names: Iterable[str]) -> bool:
    listed = list(names)
    own = any(name.lower().startswith(_FOLDERS) for name in listed)
    return own or find_naming(listed) is not None


def _name_conda(path: Path) -> str:
    index, files = read_claims(path)
    ours = _is_ours(name.removeprefix(SITE) for name in files)
    return "" if ours else str(index.get("name", ""))


def _name_wheel(path: Path) -> str:
    with open_wheel(path) as wheel:
        if _is_ours(wheel.names):
            return ""
        told = [name for name in wheel.names if name.endswith(".dist-info/METADATA")]
        if len(told) != 1:
            return ""
        return str(BytesHeaderParser().parsebytes(wheel.read(told[0])).get("Name", ""))
