"""Parses the lines that this project prints for pip and uv: a version and its index."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from ..errors import UsageError
from ..product import NAME
from .credentials import without_credentials

_TOOLS = {"uv", "pip", "pip3", "install", "python", "python3", "-m"}
_INDEX = re.compile(r"--(?:extra-|default-)?index(?:-url)?|-i")


@dataclass(frozen=True)
class Pinned:
    """One version of a project on an index, as `pip install` accepts it."""

    project: str
    version: Version
    index: str

    def __str__(self) -> str:
        return f"{self.project}=={self.version} --index-url {shlex.quote(self.index)}"


def read_line(text: str) -> str | Pinned | None:
    """Read an install line for pip or uv, or the arguments of such a line.

    Returns:
        An address or path of a wheel, a version on an index, or None for another line.

    Raises:
        UsageError: An index comes without exactly one version, or a version without an index.
    """
    try:
        words = shlex.split(text)
    except ValueError:
        return None
    while words and words[0] in _TOOLS:
        words = words[1:]
    index, named = _split_index(words)
    try:
        requirement = Requirement(" ".join(named))
    except InvalidRequirement:
        return named[0] if len(named) == 1 and len(words) < len(shlex.split(text)) else None
    if requirement.url:
        return requirement.url
    versions = [one.version for one in requirement.specifier if one.operator == "=="]
    if not versions and not index:
        return None  # not a pin: a path may look like the name of a project
    return _pin(requirement, versions, index)


def _split_index(words: list[str]) -> tuple[str, list[str]]:
    """Return the index, and the other words."""
    index, named, waiting = "", list[str](), False
    for word in words:
        option, equals, value = word.partition("=")
        if waiting:
            index, waiting = word, False
        elif _INDEX.fullmatch(option) and (equals or word == option):
            index, waiting = value, not equals
        else:
            named.append(word)
    return index, named


def _pin(requirement: Requirement, versions: list[str], index: str) -> Pinned:
    name = canonicalize_name(requirement.name)
    try:
        if index and len(versions) == 1:
            return Pinned(name, Version(versions[0]), without_credentials(index))
    except InvalidVersion:  # such as `1.*`
        pass
    message = f"a requirement must name one version and an index, got `{requirement!s:.60}`"
    hint = f"`--wheel '{NAME}==0.1.0+cu130.all --index-url ADDRESS'`, or the wheel's own address"
    raise UsageError(message, hint=hint)
