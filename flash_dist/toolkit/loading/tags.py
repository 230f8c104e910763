"""Compares the tags of a wheel's file name with this Python and this system.

Source: "Platform compatibility tags", packaging.python.org.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from packaging.tags import Tag, sys_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from . import causes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..findings.result import Finding
    from .linker import LoadHost

_MANYLINUX = re.compile(r"manylinux_2_([0-9]{1,4})_(\w+)")
_LEGACY = {"manylinux1": 5, "manylinux2010": 12, "manylinux2014": 17}  # glibc 2.x
_LINUX = re.compile(r"(?:manylinux_2_[0-9]+|manylinux[0-9]+|musllinux_[0-9]+_[0-9]+|linux)_(\w+)")


def judge_tags(
    file_name: str, host: LoadHost, supported: Iterable[Tag] | None = None
) -> Finding | None:
    """Say why pip would refuse a wheel; None if pip would accept the wheel, or if that is unknown.

    Args:
        file_name: The wheel's file name.
        host: The environment.
        supported: The supported tags. None: the tags of this interpreter.
    """
    try:
        tags = parse_wheel_filename(file_name)[3]
    except InvalidWheelFilename:
        return None
    taken = frozenset(sys_tags() if supported is None else supported)
    if tags & taken:
        return None
    pythons = {(tag.interpreter, tag.abi) for tag in taken}
    fitting = [tag for tag in tags if (tag.interpreter, tag.abi) in pythons]
    if not fitting:
        listed = ", ".join(sorted({f"{tag.interpreter}-{tag.abi}" for tag in tags}))
        return causes.other_python(file_name, listed, host.python)
    return _judge_platform(file_name, [tag.platform for tag in fitting], host)


def _judge_platform(file_name: str, platforms: list[str], host: LoadHost) -> Finding:
    machine = causes.name_machine(host.linker.platform.machine, host.linker.platform.bits)
    here = [one for one in platforms if (found := _LINUX.fullmatch(one)) and found[1] == machine]
    needed = [glibc for one in here if (glibc := _read_glibc(one)) is not None]
    if needed and host.libc.startswith("glibc"):
        return causes.old_glibc(file_name, f"GLIBC_2.{min(needed)}", host.libc)
    if here:
        return causes.no_glibc(file_name, host.libc)
    return causes.wrong_architecture(file_name, ", ".join(sorted(platforms)), f"linux_{machine}")


def _read_glibc(platform: str) -> int | None:
    """Return the minor version of the glibc in a tag: 34 for `manylinux_2_34_x86_64`.

    Return None for a tag without a glibc version.
    """
    match = _MANYLINUX.fullmatch(platform)
    if match is not None:
        return int(match[1])
    return _LEGACY.get(platform.partition("_")[0])
