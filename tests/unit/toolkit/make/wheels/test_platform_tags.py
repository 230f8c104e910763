from __future__ import annotations

import pytest

from flash_dist.toolkit.audit.needs import read_floor
from flash_dist.toolkit.make.wheels.platform_tags import describe_floor

WHEEL = "flash_dist-0.1.0+cu130.all-py3-none-{}.whl"


@pytest.mark.parametrize(
    ("tags", "floor"),
    [
        ("manylinux_2_34_x86_64", 34),
        ("manylinux_2_28_x86_64.manylinux_2_31_x86_64", 28),
        ("linux_x86_64", None),
    ],
)
def test_the_floor_is_that_of_the_oldest_tag(tags: str, floor: int | None) -> None:
    assert read_floor(WHEEL.format(tags)) == floor


def test_several_wheels_are_as_portable_as_the_least_of_them() -> None:
    names = [WHEEL.format(f"manylinux_2_{glibc}_x86_64") for glibc in (28, 34)]
    assert describe_floor(names) == (
        "manylinux_2_34: glibc 2.34 or newer; the oldest served: "
        "Debian 12, Ubuntu 22.04, RHEL 9, Amazon Linux 2023"
    )


def test_a_wheel_without_a_manylinux_tag_promises_nothing() -> None:
    names = [WHEEL.format("manylinux_2_28_x86_64"), WHEEL.format("linux_x86_64")]
    assert describe_floor(names) == "no manylinux tag: these wheels run where they were built"
