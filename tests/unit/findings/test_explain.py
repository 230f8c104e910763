"""Messages that users paste."""

from __future__ import annotations

import json

import pytest

from flash_dist.cli import main
from flash_dist.findings import FINDINGS
from flash_dist.findings.explain import explain

XFORMERS = (
    "FATAL: kernel `fmha_cutlassF_f16_aligned_64x128_rf_sm80` is for sm80-sm100, but was built "
    "for sm75"
)
KNOWN = {
    XFORMERS: "printf-stub",
    "ERROR : Arch conditional MMA instruction used without targeting appropriate compute "
    "capability. Aborting.": "arch-conditional-stub",
    "RuntimeError: CUDA error: no kernel image is available for execution on the "
    "device": "no-kernel-image",
    "CUDA error: device kernel image is invalid": "invalid-image",
    "the provided PTX was compiled with an unsupported toolchain.": "ptx-too-new",
    "PTX JIT compiler library not found": "jit-compiler-absent",
    "PTX JIT compilation was disabled": "jit-disabled",
    "CUDA driver version is insufficient for CUDA runtime version": "driver-too-old",
    "ImportError: flash_attn_2_cuda.so: undefined symbol: "
    "_ZN3c105ErrorC2ENS_14SourceLocationENSt7__cxx1112basic_string": "undefined-symbol",
}


@pytest.mark.parametrize(("message", "cause"), KNOWN.items(), ids=KNOWN.values())
def test_a_known_message_is_explained(message: str, cause: str) -> None:
    found = explain(f"... {message}\n at line 3")
    assert found is not None
    assert found.entry.id == cause
    assert found.summary


def test_the_stub_of_xformers_is_explained_with_its_own_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["explain", XFORMERS]) == 0
    out = capsys.readouterr().out
    assert "fmha_cutlassF_f16_aligned_64x128_rf_sm80 was compiled for sm_75" in out
    assert "from sm_80 to below sm_100" in out
    assert "another GPU than the one that ran it" in out
    assert "fix: Show the program GPUs of one kind only" in out


def test_a_symbol_is_named_as_its_source_has_it() -> None:
    torchs = explain("undefined symbol: _ZN3c105ErrorD1Ev")
    others = explain("undefined symbol: cudaLaunchKernelExC")
    assert torchs is not None
    assert others is not None
    assert "`c10::Error::~Error()` is not there" in torchs.summary
    assert "`cudaLaunchKernelExC` is not there" in others.summary


@pytest.mark.parametrize(("message", "cause"), KNOWN.items(), ids=KNOWN.values())
def test_a_message_and_its_id_are_explained_by_one_entry(message: str, cause: str) -> None:
    by_message, by_id, entry = explain(message), explain(cause), FINDINGS[cause]
    assert by_message is not None
    assert by_id is not None
    assert by_message.entry is by_id.entry is entry
    assert by_id.summary == entry.title
    assert (by_message.summary == entry.title) == (not entry.said)


def test_each_pattern_of_an_entry_knows_a_message() -> None:
    assert set(KNOWN.values()) == {name for name, entry in FINDINGS.items() if entry.pattern}


def test_no_message_is_known_to_two_entries() -> None:
    for message, cause in KNOWN.items():
        assert [name for name, entry in FINDINGS.items() if entry.match(message)] == [cause]


def test_json_and_what_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--json", XFORMERS]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["version"], document["id"]) == (1, "printf-stub")
    assert main(["explain", "out of memory\x1b[31m"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "this message is not known: out of memory\\x1b[31m\n"
