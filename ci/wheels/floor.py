"""Which Linux distributions are new enough for a wheel's manylinux tag."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_TAG = re.compile(r"manylinux_2_([0-9]+)_\w+")

# The glibc that each release came with: 2.x.
RELEASES = {
    "Debian": {"10": 28, "11": 31, "12": 36, "13": 41},
    "Ubuntu": {"18.04": 27, "20.04": 31, "22.04": 35, "24.04": 39},
    "RHEL": {"8": 28, "9": 34, "10": 39},
    "Amazon Linux": {"2": 26, "2023": 34},
}


def read_floor(file_name: str) -> int | None:
    """Return 34 for a wheel that is `manylinux_2_34`; None without such a tag."""
    found = [int(match[1]) for match in _TAG.finditer(file_name)]
    return min(found, default=None)


def oldest_served(glibc: int) -> list[str]:
    """Return the first release of each distribution with this glibc 2.x or a newer one."""
    served = []
    for family, releases in RELEASES.items():
        fitting = [release for release, has in releases.items() if has >= glibc]
        if fitting:
            served.append(f"{family} {fitting[0]}")
    return served


def describe_floor(file_names: Iterable[str]) -> str:
    """Say what tag auditwheel proved, and what the wheels run on."""
    floors = [read_floor(name) for name in file_names]
    known = [floor for floor in floors if floor is not None]
    if not known or len(known) < len(floors):
        return "no manylinux tag: these wheels run where they were built"
    tag = f"manylinux_2_{max(known)}"
    served = ", ".join(oldest_served(max(known))) or "nothing that is known here"
    return f"{tag}: glibc 2.{max(known)} or newer; the oldest served: {served}"
