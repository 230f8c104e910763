"""Reads and checks the keys of `[project]` that affect wheels, and the requirements of wheels."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from ...builds.metadata import PYTHON
from .keys import PLACE, DeclarationError, spell

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

_DYNAMIC: Final = ("version", "dependencies")
_ADDED: Final = ("optional-dependencies", "gui-scripts")
_LICENSES: Final = ("LICEN[CS]E*", "COPYING*", "NOTICE*", "AUTHORS*")

OLDEST_TORCH: Final = (2, 10)  # native/CMakeLists.txt compiles for its stable ABI


def read_project(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `[project]` after checking the keys that affect wheels; setuptools checks the rest.

    Raises:
        DeclarationError: The table is missing, or one of these keys is missing, invalid or must be
            left out.
    """
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
    _require_functions("scripts", project.get("scripts", {}))
    groups = project.get("entry-points", {})
    if not isinstance(groups, dict) or {"console_scripts", "gui_scripts"} & {*groups}:
        message = f"`entry-points` of [project] must be tables of plug-ins, got {spell(groups)}"
        raise DeclarationError(message, hint="`scripts` of [project] names functions to run")
    for group, table in groups.items():
        _require_functions(f"entry-points.{group}", table)
    return project


def _require_functions(key: str, table: object) -> None:
    if not isinstance(table, dict) or not all(map(_is_text, table.values())):
        message = f"`{key}` of [project] must be a table of functions, got {spell(table)}"
        raise DeclarationError(message, hint='for example `my-norms = "my_norms.__main__:run"`')


def list_functions(table: Mapping[str, str]) -> tuple[str, ...]:
    """Return the lines of entry_points.txt: `name = module:function`."""
    return tuple(f"{name} = {function}" for name, function in table.items())


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


def require_releases(own: Mapping[str, Any]) -> None:
    """Check that `torch_min` is new enough, and that `torch_tested_max` is not older than it."""
    oldest = _parse_release(own["torch_min"])
    if oldest < OLDEST_TORCH:
        least = ".".join(map(str, OLDEST_TORCH))
        message = f"`torch_min` of {PLACE} must be {least} or newer, got `{own['torch_min']}`"
        raise DeclarationError(message, hint=f"bindings are compiled for the stable ABI of {least}")
    tested = own.get("torch_tested_max", own["torch_min"])
    if _parse_release(tested) < oldest:
        allowed = f"`torch_min`, {own['torch_min']}, or newer"
        message = f"`torch_tested_max` of {PLACE} must be {allowed}, got `{tested}`"
        raise DeclarationError(message, hint="leave it out, or raise it")


def _parse_release(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def read_dependencies(told: Iterable[str]) -> Iterator[str]:
    """Yield the declared requirements; raise if one is invalid, or is torch."""
    where = f"`dependencies` of {PLACE}"
    for text in told:
        name = re.match(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)", text)
        problem = _find_problem(text) if name else "it names no package"
        if problem:
            message = f"{where} must be requirements, got {spell(text)}: {problem}"
            raise DeclarationError(message, hint="for example `numpy>=1.26`")
        if name and re.sub(r"[-_.]+", "-", name[1]).lower() == "torch":
            message = f"{where} has {spell(text)}, and wheels require torch by `torch_min`"
            raise DeclarationError(message, hint="leave it out")
        yield text


def _find_problem(text: str) -> str:
    """Describe what is wrong with a requirement; return an empty text if it is valid."""
    try:
        from packaging.requirements import InvalidRequirement, Requirement  # noqa: PLC0415
    except ImportError:  # `packaging` is absent when the build backend checks the machine
        return ""
    try:
        Requirement(text)
    except InvalidRequirement as error:
        return str(error).partition("\n")[0]
    return ""
