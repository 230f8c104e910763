"""glibc versions of Linux distributions, to compare with the version in a wheel's platform tag."""

from __future__ import annotations

from typing import Final

# The glibc version of each release: 28 for glibc 2.28. Oldest release first.
RELEASES: Final = {
    "Debian": {"10": 28, "11": 31, "12": 36, "13": 41},
    "Ubuntu": {"18.04": 27, "20.04": 31, "22.04": 35, "24.04": 39, "25.04": 41},
    "RHEL": {"8": 28, "9": 34, "10": 39},
    "Amazon Linux": {"2": 26, "2023": 34},
}


def oldest_served(glibc: int) -> list[str]:
    """Return the oldest release of each distribution that has glibc 2.`glibc` or newer, if any."""
    served = []
    for family, releases in RELEASES.items():
        fitting = [release for release, has in releases.items() if has >= glibc]
        if fitting:
            served.append(f"{family} {fitting[0]}")
    return served
