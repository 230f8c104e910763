"""Invalid values are shown as in TOML; files that are not TOML give a sentence."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.make.declared.keys import (
    PLACE,
    DeclarationError,
    read_json_file,
    read_toml_file,
    require_keys,
    spell,
)
from tests.unit.made.projects import require_sentence, write

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("banana", '`"banana"`'),
        ("", '`""`'),
        ("a\nb", '`"a\\nb"`'),
        ("é", '`"é"`'),
        (3, "`3`"),
        (True, "`true`"),
        (1.5, "`1.5`"),
        (["a", 1], '`["a", 1]`'),
        ({"a": True}, '`{"a": true}`'),
        (dt.date(2026, 1, 2), '`"2026-01-02"`'),
        ("x" * 100, f'`"{"x" * 59}...`'),
        (10**5000, "`a number of thousands of digits`"),
        ([10**5000], "`a list`"),
    ],
    ids=lambda given: str(type(given)),
)
def test_a_value_is_shown_on_one_line(value: object, shown: str) -> None:
    assert spell(value) == shown


def test_a_number_in_place_of_a_text_is_called_a_number() -> None:
    with pytest.raises(DeclarationError) as caught:
        require_keys({"toolkit": 13.0}, "kernels", PLACE)
    require_sentence(caught.value)
    assert caught.value.message.endswith("such as `13.0`, got the number `13.0`")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"a = ", "cannot read `a.toml`: Invalid value"),
        (b"[a]\n[a]", "cannot read `a.toml`: Cannot declare"),
        (b"a = 1\na = 2", "cannot read `a.toml`: Cannot overwrite a value"),
        ("a = 'é'".encode("latin-1"), "cannot read `a.toml`: byte 5 is no UTF-8"),
        ("a = 'é'".encode("utf-16"), "cannot read `a.toml`: byte 0 is no UTF-8"),
        (b"\xef\xbb\xbfa = 1", "cannot read `a.toml`: it begins with a byte order mark"),
        (b"a = " + b"[" * 100_000, "cannot read `a.toml`: "),
        (b"a = " + b"9" * 100_000, "cannot read `a.toml`: "),
        (b"\0", "cannot read `a.toml`: "),
    ],
    ids=lambda given: str(given[:20]),
)
def test_a_file_that_is_not_toml_gives_a_sentence(data: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(data)
    with pytest.raises(DeclarationError) as caught:
        read_toml_file(path, path.name)
    require_sentence(caught.value)
    assert said in caught.value.message


def test_a_file_that_cannot_be_opened_gives_a_sentence(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.toml", tmp_path):
        for read in (read_toml_file, read_json_file):
            with pytest.raises(DeclarationError, match=r"cannot read `it`: [A-Z]") as caught:
                read(path, "it")
            require_sentence(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", "3", "[" * 100_000], ids=["cut", "list", "3", "deep"])
def test_a_file_that_is_no_json_object_gives_a_sentence(text: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", text)
    with pytest.raises(DeclarationError) as caught:
        read_json_file(path, path.name)
    require_sentence(caught.value)
