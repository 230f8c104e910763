from __future__ import annotations

import pytest

from flash_dist.toolkit.loading.causes import old_glibc
from flash_dist.toolkit.targets.distributions import RELEASES, oldest_served


@pytest.mark.parametrize(
    ("glibc", "served"),
    [
        (28, ["Debian 10", "Ubuntu 20.04", "RHEL 8", "Amazon Linux 2023"]),
        (34, ["Debian 12", "Ubuntu 22.04", "RHEL 9", "Amazon Linux 2023"]),
        (36, ["Debian 12", "Ubuntu 24.04", "RHEL 10"]),
        (41, ["Debian 13", "Ubuntu 25.04"]),
        (99, []),
    ],
)
def test_the_oldest_release_with_that_glibc_is_named(glibc: int, served: list[str]) -> None:
    assert oldest_served(glibc) == served


def test_releases_stand_from_old_to_new() -> None:
    assert all(list(one.values()) == sorted(one.values()) for one in RELEASES.values())


@pytest.mark.parametrize(
    ("version", "such"),
    [
        ("GLIBC_2.28", " (Debian 10, Ubuntu 20.04, RHEL 8 or newer)"),
        ("GLIBC_2.31", " (Debian 11, Ubuntu 20.04, RHEL 9 or newer)"),
        ("GLIBC_2.34", " (Debian 12, Ubuntu 22.04, RHEL 9 or newer)"),
        ("GLIBC_2.35", " (Debian 12, Ubuntu 22.04, RHEL 10 or newer)"),
        ("GLIBC_2.36", " (Debian 12, Ubuntu 24.04, RHEL 10 or newer)"),
        ("GLIBC_2.39", " (Debian 13, Ubuntu 24.04, RHEL 10 or newer)"),
        ("GLIBC_2.41", " (Debian 13, Ubuntu 25.04 or newer)"),
        ("GLIBC_2.99", ""),
        ("GLIBC_ABI_DT_RELR", ""),  # no version: nothing to look up
    ],
)
def test_a_library_that_needs_a_newer_glibc_names_three_distributions(
    version: str, such: str
) -> None:
    needed = version.removeprefix("GLIBC_")
    fix = old_glibc("a.so", version, "glibc 2.17").fix
    assert fix == f"use a system with glibc {needed} or newer{such}, or a build for glibc 2.17"
