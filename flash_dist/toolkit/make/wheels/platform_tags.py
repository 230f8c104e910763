"""Checks the platform tag of a wheel, and names the Linux distributions that it serves.

A file is easily renamed, so the tag is compared with the code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from packaging.tags import parse_tag
from packaging.utils import parse_wheel_filename

from ...audit.needs import find_glibc, read_floor
from ...binaries.wheel import open_wheel
from ...builds.metadata import read_tags
from ...errors import KernelsError
from ...targets.distributions import oldest_served

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

MANYLINUX: Final = "manylinux_2_28"  # tag of released wheels, which need glibc 2.28 or newer


class PlatformTagError(KernelsError):
    """A wheel does not match the tags in its file name."""


def platform_of(machine: str) -> str:
    """Return the platform tag of a released wheel for a CPU."""
    return f"{MANYLINUX}_{machine}"


def require_platform(wheel: Path, platform: str) -> None:
    """Check that a wheel has only this platform tag: no newer tag, and no list with older tags."""
    found = sorted({tag.platform for tag in parse_wheel_filename(wheel.name)[3]})
    if found != [platform]:
        message = f"{wheel.name} must have the platform tag `{platform}`, has {', '.join(found)}"
        raise PlatformTagError(message)


def require_same_tags(wheel: Path) -> None:
    """Check that the file name has the tags of the file WHEEL, which auditwheel wrote."""
    with open_wheel(wheel) as opened:
        names = [name for name in opened.names if name.endswith(".dist-info/WHEEL")]
        texts = [opened.read(name) for name in names]
    told = {str(tag) for text in texts for line in read_tags(text) for tag in parse_tag(line)}
    named = set(map(str, parse_wheel_filename(wheel.name)[3]))
    if told != named:
        tags = ", ".join(sorted(told)) or "none"
        message = f"{wheel.name} was renamed: its file WHEEL has the tags {tags}"
        raise PlatformTagError(message, hint="build it again; wheels are not to be renamed")


def require_glibc(wheel: Path) -> None:
    """Check that no library needs a newer glibc than the tag in the file name."""
    floor = read_floor(wheel.name)
    with open_wheel(wheel) as opened:
        needed = max(find_glibc(opened, opened.libraries), default=0)
    if floor is None or needed > floor:
        promised = "no manylinux tag" if floor is None else f"glibc 2.{floor}"
        message = f"{wheel.name} needs glibc 2.{needed}, its name promises {promised}"
        raise PlatformTagError(message, hint="`nox -s build_wheels` in a container builds it again")


def describe_floor(file_names: Iterable[str]) -> str:
    """Describe the newest manylinux tag of the wheels, and the oldest systems that run them all."""
    floors = [read_floor(name) for name in file_names]
    known = [floor for floor in floors if floor is not None]
    if not known or len(known) < len(floors):
        return "no manylinux tag: these wheels run where they were built"
    tag = f"manylinux_2_{max(known)}"
    served = ", ".join(oldest_served(max(known))) or "nothing that is known here"
    return f"{tag}: glibc 2.{max(known)} or newer; the oldest served: {served}"
