from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.binaries.wheel import open_wheel
from flash_dist.toolkit.builds.metadata import parse_metadata, read_metadata, read_tags
from flash_dist.toolkit.errors import AuditError, FatbinError

if TYPE_CHECKING:
    from pathlib import Path

TEXT = b"""\
Metadata-Version: 2.4
Name: flash_dist
Version: 0.1.0+cu130.all
Summary: attention
License-Expression: BSD-3-Clause
Project-URL: Homepage, https://example.org/
Requires-Python: >=3.10
Requires-Dist: torch>=2.10
Requires-Dist: backports.zstd; python_version < "3.14"

# Version: 9
"""


def test_every_field_that_is_asked_for_is_read() -> None:
    found = parse_metadata(TEXT, "a.whl")
    assert (found.text, found.version, str(found.python)) == (TEXT, "0.1.0+cu130.all", ">=3.10")
    assert [one.name for one in found.requirements] == ["torch", "backports.zstd"]
    assert (found.summary, found.license) == ("attention", "BSD-3-Clause")
    assert found.homepage == "https://example.org/"


def test_absent_fields_are_empty() -> None:
    found = parse_metadata(b"Version: 1\n", "a.whl")
    assert (found.python, found.requirements) == (None, ())
    assert (found.summary, found.license, found.homepage) == ("", "", "")


def test_a_description_that_is_cut_off_in_a_letter_does_no_harm() -> None:
    text = TEXT + "Größe".encode()
    assert parse_metadata(text[:-4], "a.whl").version == "0.1.0+cu130.all"


BAD = {
    "no version": TEXT.replace(b"Version: 0", b"X: 0"),
    "empty": b"",
    "two versions": TEXT.replace(b"Summary: a", b"Version: a"),
    "no version at all": TEXT.replace(b"0.1.0+cu130.all", b"latest"),
    "bytes": TEXT.replace(b"0.1.0+cu130.all", b"0.1.0\xff"),
    "python": TEXT.replace(b">=3.10", b"three"),
    "requirement": TEXT.replace(b"torch>=2.10", b"torch >= or so"),
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD.keys())
def test_malformed_metadata_gives_a_sentence(text: bytes) -> None:
    with pytest.raises(FatbinError, match=r"cannot read `METADATA` in `a\.whl`: .") as caught:
        parse_metadata(text, "a.whl")
    assert caught.value.hint
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("names", [(), ("a-1", "b-1")], ids=["none", "two"])
def test_a_wheel_without_one_metadata_is_refused(names: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "a.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.py", "")
        for name in names:
            archive.writestr(f"{name}.dist-info/METADATA", TEXT)
    with (
        open_wheel(path) as wheel,
        pytest.raises(AuditError, match=f"holds {len(names)} METADATA files, not one"),
    ):
        read_metadata(wheel)


def test_tags_are_those_of_the_file_wheel() -> None:
    text = b"Wheel-Version: 1.0\nTag: py3-none-linux_x86_64\nTag: py3-none-any\n\nTag: no\n"
    assert read_tags(text) == ("py3-none-linux_x86_64", "py3-none-any")
    assert read_tags(b"\xff\xfe") == ()
