"""Numbers of thousands of digits, which Python 3.11 cannot read, count as damage."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from fractions import Fraction
from io import BytesIO
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import pytest

from flash_dist.errors import FlashDistError
from flash_dist.toolkit.audit.needs import find_glibc
from flash_dist.toolkit.builds.conda_solver import read_platform
from flash_dist.toolkit.builds.manifest import Manifest
from flash_dist.toolkit.errors import show
from flash_dist.toolkit.indexes.fetch import content_length
from flash_dist.toolkit.indexes.index import parse_wheel
from flash_dist.toolkit.indexes.pages import Link
from flash_dist.toolkit.loading.causes import old_glibc
from flash_dist.toolkit.loading.prediction import _version_key
from flash_dist.toolkit.machine.host import DEFAULT_LIMIT, read_limit
from flash_dist.toolkit.machine.installed import parse_symbol
from flash_dist.toolkit.targets.archs import Arch
from flash_dist.toolkit.targets.compatibility import DEFAULT_ORIGIN
from flash_dist.toolkit.targets.devices import parse_version
from tests.unit.made.dynamic_builder import make_shared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LONG: Final = "9" * 5000
REFUSING: Final[dict[str, Callable[[], object]]] = {
    "manifest": lambda: Manifest.from_text(f'{{"version": {LONG}}}', source="_build.json"),
    "version of a toolkit": lambda: parse_version(f"{LONG}.0"),
    "tag of a wheel": lambda: read_platform("x.whl", [f"py3-none-manylinux_2_{LONG}_x86_64"]),
}


@pytest.mark.parametrize("read", REFUSING.values(), ids=REFUSING)
def test_arguments_that_must_be_numbers_are_refused_in_a_sentence(
    read: Callable[[], object],
) -> None:
    with pytest.raises(FlashDistError):
        read()


def test_optional_values_become_none() -> None:
    headers: Any = SimpleNamespace(headers={"Content-Length": LONG})
    assert content_length(headers) is None
    assert parse_wheel(Link(f"https://host/flash_dist-{LONG}-py3-none-any.whl")) is None
    arch = Arch.parse("sm_80")
    assert parse_symbol("flash_dist_fwd_fp16_d64_sm80", arch, DEFAULT_ORIGIN) is not None
    assert parse_symbol(f"flash_dist_fwd_fp16_d{LONG}_sm80", arch, DEFAULT_ORIGIN) is None
    assert read_limit(LONG) == DEFAULT_LIMIT


def test_a_version_of_glibc_is_newer_than_any() -> None:
    @contextmanager
    def unpacked(_: str) -> Iterator[BytesIO]:
        yield BytesIO(make_shared(version=f"GLIBC_2.{LONG}"))

    wheel: Any = SimpleNamespace(unpacked=unpacked)
    assert list(find_glibc(wheel, ["lib.so"])) == [999_999_999]
    assert _version_key(f"GLIBC_2.{LONG}") > _version_key("GLIBC_2.39")
    assert old_glibc("lib.so", f"GLIBC_2.{LONG}", "glibc 2.36").summary.startswith("lib.so needs")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "0.5"),
        ("a\n b", r"'a\n b'"),
        (10**70, "1" + "0" * 59 + "..."),
        ([1, 2], "[1, 2]"),
    ],
    ids=["number", "text", "cut off", "list"],
)
def test_the_received_value_is_shown_on_one_line(value: object, text: str) -> None:
    assert show(value) == text


@pytest.mark.skipif(
    not hasattr(sys, "get_int_max_str_digits"), reason="this Python writes all numbers"
)
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (10**5000, "a number of thousands of digits"),
        (Fraction(1, 10**5000), "a number of thousands of digits"),
        ((-(10**5000), 1), "a tuple with a number of thousands of digits"),
    ],
    ids=["int", "fraction", "tuple"],
)
def test_numbers_that_python_does_not_write_are_described(value: object, text: str) -> None:
    assert show(value) == text
