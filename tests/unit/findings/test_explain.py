"""Messages that users paste."""

from __future__ import annotations

import json

import pytest

from flash_dist.cli import main
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
def test_a_known_message_is_explained_with_steps(message: str, cause: str) -> None:
    found = explain(f"... {message}\n at line 3")
    assert found is not None
    assert found.id == cause
    assert found.summary
    assert found.steps


def test_the_stub_of_xformers_is_explained_with_its_own_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--explain", XFORMERS]) == 0
    out = capsys.readouterr().out
    assert "fmha_cutlassF_f16_aligned_64x128_rf_sm80 was compiled for sm_75" in out
    assert "from sm_80 to below sm_100" in out
    assert "GPUs of several kinds" in out
    assert "fix: show the program GPUs of one kind only" in out
    assert "this kernel needs 8.0" in out


def test_a_symbol_of_torch_is_told_from_others() -> None:
    torchs = explain("undefined symbol: _ZN3c1015SmallVectorBase")
    others = explain("undefined symbol: cudaLaunchKernelExC")
    assert torchs is not None
    assert others is not None
    assert torchs.details
    assert not others.details


def test_json_and_what_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--explain", XFORMERS]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["version"], document["id"]) == (1, "printf-stub")
    assert main(["doctor", "--explain", "out of memory\x1b[31m"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "this message is not known: out of memory\\x1b[31m\n"
