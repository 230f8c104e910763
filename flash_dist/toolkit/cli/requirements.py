"""Explains why a subcommand cannot be imported: a package is absent, unreadable or damaged."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from ..builds.linkage import REQUIREMENTS
from ..builds.package import PACKAGE
from ..errors import ExtensionError, KernelsError
from ..machine.shadows import find_shadow
from ..product import NAME
from ..targets.wording import list_few

_SHOWN = 4


def explain_import(error: ImportError) -> KernelsError | None:
    """Return an error that names the missing packages, or says why a package cannot be imported.

    Return None if the error is about a package that is neither required nor this one.
    """
    name = (error.name or "").partition(".")[0]
    if name == PACKAGE.name:
        return _explain_own(error)
    names = _required()
    if name not in {one.partition(".")[0] for one in names}:
        return None
    missing = [one for one in names if not _is_here(one)]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        message = f"{NAME} needs {list_few(missing, _SHOWN)}, which {verb} not installed here"
        return ExtensionError(message, hint=f"`python -m pip install {' '.join(missing)}`")
    spec = find_spec(name)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        denied = _find_denied(Path(folder))
        if denied is not None:
            return _deny(denied, Path(folder))
    shadow = find_shadow(name)
    if shadow is not None:
        return ExtensionError(shadow.sentence, hint=shadow.fix)
    hint = f"`python -m pip install --force-reinstall {name}`"
    return ExtensionError(f"{name} is installed and cannot be imported: {error}", hint=hint)


def _required() -> list[str]:
    """Return the packages required on this Python; those with a marker are for Python < 3.14."""
    names = (one.partition("; ") for one in REQUIREMENTS)
    return [name for name, _, marker in names if not marker or sys.version_info < (3, 14)]


def _is_here(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # the package of a submodule is absent
        return False


def _explain_own(error: ImportError) -> KernelsError:
    denied = _find_denied(PACKAGE)
    if denied is not None:
        return _deny(denied, PACKAGE)
    message = f"{NAME} in {PACKAGE.parent} is incomplete: {error}"
    return ExtensionError(message, hint="`pip install --force-reinstall --no-deps` the wheel again")


def _deny(denied: Path, package: Path) -> KernelsError:
    hint = f"as its owner: `chmod -R a+rX '{package}'*`"
    return ExtensionError(f"this user cannot read `{denied}`", hint=hint)


def _find_denied(package: Path) -> Path | None:
    """Return a folder or module of a package that this user cannot read; None if there is none."""
    modules = (path for path in package.rglob("*") if path.is_dir() or path.suffix == ".py")
    return next((path for path in (package, *modules) if not _may_read(path)), None)


def _may_read(path: Path) -> bool:
    return os.access(path, os.R_OK | os.X_OK if path.is_dir() else os.R_OK)
