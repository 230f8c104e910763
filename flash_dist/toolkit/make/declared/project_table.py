"""Reads the parts of `[project]` that wheels depend on; setuptools checks the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ...builds.metadata import PYTHON
from .keys import PLACE, DeclarationError, spell

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_DYNAMIC: Final = ("version", "dependencies")
_ADDED: Final = ("optional-dependencies", "entry-points", "gui-scripts")
_LICENSES: Final = ("LICEN[CS]E*", "COPYING*", "NOTICE*", "AUTHORS*")


def read_project(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parts of `[project]` that wheels depend on; setuptools checks the rest."""
    project = data.get("project")
    if not isinstance(project, dict):
        message = "pyproject.toml has no table [project]"
        hint = 'write `name`, `description` and `dynamic = ["version", "dependencies"]` into it'
        raise DeclarationError(message, hint=hint)
    hint = (
        f'put `dynamic = ["version", "dependencies"]` into [project], and the values into {PLACE}'
    )
    for key in _DYNAMIC:
        if key in project:
            got = spell(project[key])
            message = f"`{key}` of [project] must be dynamic, got {got}: it differs by wheel"
            raise DeclarationError(message, hint=hint)
    dynamic = project.get("dynamic", [])
    if not isinstance(dynamic, list) or not set(_DYNAMIC) <= {str(one) for one in dynamic}:
        message = f"`dynamic` of [project] must have {' and '.join(_DYNAMIC)}, got {spell(dynamic)}"
        raise DeclarationError(message, hint=hint)
    _require_python(project)
    for key in _ADDED:
        if project.get(key):
            got = spell(project[key])
            message = f"`{key}` of [project] must be left out, got {got}: no wheel has them"
            raise DeclarationError(message, hint="`scripts` of [project] names functions to run")
    scripts = project.get("scripts", {})
    if not isinstance(scripts, dict) or not all(map(_is_text, scripts.values())):
        message = f"`scripts` of [project] must be a table of functions, got {spell(scripts)}"
        raise DeclarationError(message, hint='for example `my-norms = "my_norms.__main__:run"`')
    return project


def _require_python(project: Mapping[str, Any]) -> None:
    told = project.get("requires-python")
    if not isinstance(told, str) or "".join(told.split()) != PYTHON:
        got = f"got {spell(told)}" if "requires-python" in project else "which it lacks"
        message = f"`requires-python` of [project] must be `{PYTHON}`, {got}"
        hint = f'write `requires-python = "{PYTHON}"`: one wheel is for all of them'
        raise DeclarationError(message, hint=hint)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def find_licenses(project: Mapping[str, Any], root: Path) -> list[str]:
    """Return the licence files that setuptools packs."""
    patterns = project.get("license-files", _LICENSES)
    hint = 'for example `license-files = ["LICENSE"]`'
    if not isinstance(patterns, (list, tuple)) or not all(map(_is_text, patterns)):
        message = f"`license-files` of [project] must be a list of paths, got {spell(patterns)}"
        raise DeclarationError(message, hint=hint)
    found: set[str] = set()
    for pattern in patterns:
        try:
            matching = [one for one in root.glob(pattern) if one.is_file()]
        except (OSError, ValueError, NotImplementedError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            message = f"`license-files` of [project] cannot name {spell(pattern)}: {reason}"
            raise DeclarationError(message, hint=hint) from error
        found |= {one.relative_to(root).as_posix() for one in matching}
    return sorted(found)
