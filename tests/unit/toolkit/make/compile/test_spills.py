"""Spills are judged once for a whole build: all are reported, under their source names."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.make.compile.spills import SpillException, judge_spills, load_exceptions

if TYPE_CHECKING:
    from pathlib import Path

MANGLED = "_ZN3fht15hadamard_kernelI7float16EEvPKT_i"
READABLE = "fht::hadamard_kernel<float16>"


def say(symbol: str, *, spills: int = 0, target: str = "sm_80") -> str:
    """Write the output of `ptxas -v` on a kernel."""
    return (
        f"ptxas info    : Compiling entry function '{symbol}' for '{target}'\n"
        f"ptxas info    : Function properties for {symbol}\n"
        f"    16 bytes stack frame, {spills} bytes spill stores, {spills} bytes spill loads\n"
        "ptxas info    : Used 32 registers\n"
    )


def allow(symbol: str, spill_bytes: int = 64) -> SpillException:
    return SpillException(symbol, spill_bytes, "measured")


def test_kernels_that_do_not_spill_pass() -> None:
    assert judge_spills([say("a"), say("b")], [])


def test_every_kernel_that_spills_has_a_line_with_its_targets() -> None:
    texts = [
        say(MANGLED, spills=296, target="sm_75") + say("kept"),
        say(MANGLED, spills=12, target="sm_90a") + say("rms_sm80", spills=8),
    ]
    found = judge_spills(texts, [])
    assert not found
    assert found.lines == (
        f"{READABLE} spills 296 bytes for sm_75 and 12 bytes for sm_90a",
        "rms_sm80 spills 8 bytes for sm_80",
    )
    assert found.summary == "2 kernels spill registers and may not"
    assert found.worst == "*fht::hadamard_kernel*"
    assert found.most == 296


def test_code_and_ptx_of_one_target_are_one_spill() -> None:
    found = judge_spills([say("a", spills=8), say("a", spills=12)], [])
    assert found.lines == ("a spills 12 bytes for sm_80",)
    assert found.summary == "1 kernel spills registers and may not"


@pytest.mark.parametrize(
    "pattern",
    [
        MANGLED,
        "*hadamard_kernel*",
        "*15hadamard_kernelI7float16*",
        "fht::hadamard_kernel<float16>",
        "fht::*",
        "void fht::hadamard_kernel<float16>(float16 const*, int)",
    ],
)
def test_a_row_names_kernels_as_the_source_or_as_the_object_has_them(pattern: str) -> None:
    found = judge_spills([say(MANGLED, spills=64)], [allow(pattern)])
    assert found
    assert found.unused == ()


@pytest.mark.parametrize("pattern", ["hadamard_kernel", "*HADAMARD*", "*other*"])
def test_a_row_for_other_kernels_allows_nothing_and_is_named(pattern: str) -> None:
    found = judge_spills([say(MANGLED, spills=64)], [allow(pattern)])
    assert not found
    assert found.unused == (pattern,)


def test_a_row_allows_its_bytes_and_no_more() -> None:
    found = judge_spills([say("a", spills=65) + say("b", spills=64)], [allow("*")])
    assert found.lines == ("a spills 65 bytes for sm_80, allowed are 64",)


def test_the_most_generous_of_several_rows_counts() -> None:
    assert judge_spills([say("a", spills=64)], [allow("a", 8), allow("*", 64)])


@pytest.mark.parametrize("code", ["C7510", "C7512", "C7518", "C7520"])
def test_a_performance_warning_is_reported_and_no_row_allows_it(code: str) -> None:
    text = (
        f"ptxas info    : ({code}) Potential Performance Loss: wgmma is serialized in '{MANGLED}'"
    )
    found = judge_spills([text], [allow("*")])
    assert not found
    assert found.summary == "ptxas gives 1 warning of C7510 to C7520, which no kernel may have"
    assert found.lines == (text.replace(MANGLED, READABLE),)
    assert found.worst == ""


def test_spills_and_warnings_are_reported_together() -> None:
    warning = "ptxas info    : (C7510) Potential Performance Loss: wgmma is serialized"
    found = judge_spills([f"{say('a', spills=8)}{warning} here\n", f"{warning} there"], [])
    assert found.summary == (
        "1 kernel spills registers and may not, and ptxas gives 2 warnings of C7510 to C7520, "
        "which no kernel may have"
    )
    assert len(found.lines) == 3


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_exceptions_are_read_from_a_file(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"spills.{suffix}"
    row = {"symbol": "*_bwd_*", "spill_bytes": 64, "reason": "measured"}
    as_toml = "[[exception]]\nsymbol = '*_bwd_*'\nspill_bytes = 64\nreason = 'measured'\n"
    path.write_text(json.dumps({"exception": [row]}) if suffix == "json" else as_toml)
    assert load_exceptions(path) == load_exceptions([row]) == [allow("*_bwd_*")]
    assert load_exceptions(()) == []
