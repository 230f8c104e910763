"""Checks the requirements of wheels: releases of torch, and other packages."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from .keys import PLACE, DeclarationError, spell

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

OLDEST_TORCH: Final = (2, 10)  # whose stable ABI bindings use: native/CMakeLists.txt


def require_releases(own: Mapping[str, Any]) -> None:
    """Check releases of torch: bindings load with them, and they are in order."""
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
    """Yield requirements other than torch."""
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
    """Describe what is wrong with a requirement; return an empty text if nothing is."""
    try:
        from packaging.requirements import InvalidRequirement, Requirement  # noqa: PLC0415
    except ImportError:  # while the build backend checks the machine
        return ""
    try:
        Requirement(text)
    except InvalidRequirement as error:
        return str(error).partition("\n")[0]
    return ""
