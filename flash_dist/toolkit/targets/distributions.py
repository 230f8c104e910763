"""glibc versions of Linux distributions, to compare with the version in the tag of a wheel."""

from __future__ import annotations

from typing import Final

# The minor glibc version 2.x of each release, oldest first.
RELEASES: Final = {
    "Debian": {"10": 28, "11": 31, "12": 36, "13": 41},
    "Ubuntu": {"18.04": 27, "20.04": 31, "22.04": 35, "24.04": 39, "25.04": 41},
    "RHEL": {"8": 28, "9": 34, "10": 39},
    "Amazon Linux": {"2": 26, "2023": 34},
}


def oldest_served(glibc: int) -> list[str]:
    """Return the first release of each distribution with this glibc 2.x or a newer one."""
    served = []
    for family, releases in RELEASES.items():
        fitting = [release for release, has in releases.items() if has >= glibc]
        if fitting:
            served.append(f"{family} {fitting[0]}")
    return served
