"""Hashes of kernels' code: changes that alter them, and changes that do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.errors import FatbinError
from flash_dist.toolkit.gpucode.kernel_code import read_code_hashes
from tests.unit.made.fatbin_builder import Kernel, container, cubin, entry, library, ptx

if TYPE_CHECKING:
    from pathlib import Path

PTX, SASS = 1, 2
ONE, OTHER = Kernel("one", code=b"1" * 128), Kernel("other", code=b"2" * 128)


def hashes(folder: Path, *entries: bytes) -> dict[str, str]:
    path = folder / "lib.so"
    path.write_bytes(library(container(*entries)))
    return read_code_hashes(path)


def test_a_kernel_has_its_hash_whatever_else_is_there_and_however_it_is_packed(
    tmp_path: Path,
) -> None:
    alone = hashes(tmp_path, entry(SASS, 90, cubin(ONE)))
    beside = hashes(tmp_path, entry(SASS, 90, cubin(OTHER, ONE), codec="zstd"))
    assert alone["one"] == beside["one"]
    assert beside["one"] != beside["other"]


def test_one_changed_byte_of_code_changes_the_hash(tmp_path: Path) -> None:
    before = hashes(tmp_path, entry(SASS, 90, cubin(ONE)))
    changed = Kernel("one", code=b"1" * 127 + b"2")
    assert hashes(tmp_path, entry(SASS, 90, cubin(changed))) != before
    registers = Kernel("one", registers=99, code=ONE.code)
    assert hashes(tmp_path, entry(SASS, 90, cubin(registers))) == before


def test_comments_of_ptx_do_not_count_and_its_target_does(tmp_path: Path) -> None:
    text = ptx("one", "other")
    before = hashes(tmp_path, entry(PTX, 80, text))
    assert set(before) == {"one", "other"}
    said = text.replace(b"// .globl", b"// said otherwise")
    assert hashes(tmp_path, entry(PTX, 80, said)) == before
    for old, new in ((b"\tret;", b"\ttrap;"), (b"sm_80", b"sm_89"), (b"9.0", b"8.0")):
        other = hashes(tmp_path, entry(PTX, 80, text.replace(old, new)))
        assert other["one"] != before["one"]


def test_one_kernel_with_two_codes_is_refused(tmp_path: Path) -> None:
    changed = Kernel("one", code=b"3" * 128)
    with pytest.raises(FatbinError, match="holds kernel `one` twice, with different code"):
        hashes(tmp_path, entry(SASS, 90, cubin(ONE)), entry(SASS, 90, cubin(changed)))


def test_code_for_several_targets_is_told_apart_by_them(tmp_path: Path) -> None:
    changed = Kernel("one", code=b"3" * 128)
    both = hashes(tmp_path, entry(SASS, 90, cubin(ONE)), entry(SASS, 80, cubin(changed)))
    assert set(both) == {"one sm_80", "one sm_90"}
    assert both["one sm_90"] == hashes(tmp_path, entry(SASS, 90, cubin(ONE)))["one"]
