"""Every error code of `cuInit`: doctor and `explain` agree."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pytest

from flash_dist.toolkit.checks.driver import check_driver
from flash_dist.toolkit.cli.selftest import _nothing_to_test
from flash_dist.toolkit.findings import FINDINGS, find_code
from flash_dist.toolkit.findings.codes import CODES
from flash_dist.toolkit.findings.explain import explain
from flash_dist.toolkit.machine.apart import read_cuda_apart
from flash_dist.toolkit.machine.host import DeviceFile, Host
from flash_dist.toolkit.machine.libcuda import Cuda, read_cuda
from tests.unit.made.builds import ALL, make_environment
from tests.unit.made.driver import needs_gcc

if TYPE_CHECKING:
    from pathlib import Path

    from flash_dist.toolkit.checks.environment import Environment

CAUSES: Final = {
    2: "start-memory",
    3: "uvm-not-ready",
    34: "cuda-stub",
    46: "gpu-unavailable",
    101: "device-refused",
    102: "gpu-licence",
    214: "ecc-error",
    304: "system-call-refused",
    802: "fabric-manager",
    803: "driver-module-mismatch",
    804: "cuda-compat-refused",
    805: "mps-unreachable",
    999: "cuda-unknown-error",
}


class FailingDriver:
    """A libcuda whose `cuInit` fails. With code 34 all calls fail, as in the toolkit's stub."""

    def __init__(self, code: int) -> None:
        self.code = code

    def __getattr__(self, name: str) -> object:
        def call(*arguments: object) -> int:
            if self.code == 34:
                return self.code
            if name == "cuGetErrorName":
                arguments[1]._obj.value = CODES[self.code].name.encode()  # type: ignore[attr-defined]
                return 0
            return self.code if name == "cuInit" else 0

        return call


def with_cuda(cuda: Cuda, host: Host | None = None) -> Environment:
    return replace(make_environment(ALL), cuda=cuda, host=host)


@pytest.mark.parametrize(("code", "cause"), CAUSES.items(), ids=map(str, CAUSES))
def test_doctor_and_explain_name_the_same_cause_of_a_code(
    monkeypatch: pytest.MonkeyPatch, code: int, cause: str
) -> None:
    monkeypatch.setattr(
        "flash_dist.toolkit.machine.libcuda.ctypes.CDLL", lambda _: FailingDriver(code)
    )
    cuda = read_cuda()
    assert (cuda.status, cuda.code) == ("broken", code)
    result = check_driver(with_cuda(cuda))
    assert (result.status, result.id) == ("fail", cause)
    assert str(code) in result.summary
    assert result.fix == FINDINGS[cause].remedy
    assert [one.entry.id for one in explain(cuda.reason)] == [cause]


def test_a_reboot_is_advised_only_if_it_helps() -> None:
    told = {cause for cause in CAUSES.values() if "reboot" in FINDINGS[cause].remedy.lower()}
    assert told == {
        "uvm-not-ready",
        "device-refused",
        "ecc-error",
        "driver-module-mismatch",
        "cuda-unknown-error",
    }


@pytest.mark.parametrize("code", [34, 214, 802, 805])
def test_a_code_that_names_its_cause_comes_before_what_the_host_shows(code: int) -> None:
    denied = Host(device_files=(DeviceFile("/dev/nvidia-caps", allowed=False),))
    cuda = Cuda("broken", reason=f"cuInit failed with error {code}")
    assert check_driver(with_cuda(cuda, denied)).id == CAUSES[code]


@pytest.mark.parametrize("code", [101, 304, 999])
def test_the_host_is_examined_first_for_a_vague_code(code: int) -> None:
    denied = Host(device_files=(DeviceFile("/dev/nvidiactl", allowed=False),))
    cuda = Cuda("broken", reason=f"cuInit failed with error {code}")
    assert check_driver(with_cuda(cuda, denied)).id == "device-permission"


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("libcuda.so.1 does not load: libcuda.so.1: file too short", "libcuda-empty"),
        ("libcuda.so.1 does not load: libcuda.so.1: invalid ELF header", "driver-broken"),
        ("libcuda.so.1 did not answer within 120 s", "driver-broken"),
        ("cuInit failed with CUDA_ERROR_TOMORROW (777)", "driver-broken"),
        ("cuDriverGetVersion failed with CUDA_ERROR_INVALID_VALUE (1)", "cuda-invalid-call"),
    ],
)
def test_an_unknown_code_is_a_driver_that_does_not_answer(reason: str, cause: str) -> None:
    assert check_driver(with_cuda(Cuda("broken", reason=reason))).id == cause


@pytest.mark.parametrize("number", CODES)
def test_a_code_is_known_in_every_way_of_writing_it(number: int) -> None:
    code, cause = CODES[number], find_code(number).id
    names = [code.name, f"cudaError{code.runtime}"] if code.runtime else [code.name]
    for text in (
        *names,
        *(name.lower() for name in names),
        f"CUDA error: {code.text}",
        f"CUDA error {number}",
        f"CUDA failure {number}: x",
        f"Triton Error [CUDA]: {code.text}",
        f"CUDA error at a.cu:3 code={number}({names[-1]})",
        f"that might have already set an error? Error {number}: {code.text}",
        f"cudaGetDeviceCount returned {number}",
    ):
        found = [one.entry.id for one in explain(text)]
        assert found in ([cause], [find_code(_same_text(code.text)).id]), text


def _same_text(text: str) -> int:
    """Return the first number with the same text: 300 for 200."""
    return next(number for number, code in sorted(CODES.items()) if code.text == text)


def test_an_old_number_beside_its_text_is_read_by_the_text() -> None:
    old = "cuda runtime error (77) : an illegal memory access was encountered at a.cu:3"
    assert [one.entry.id for one in explain(old)] == ["illegal-address"]


@needs_gcc
def test_a_library_that_fails_with_a_code_is_read_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "f.c"
    source.write_text(
        "int cuInit(unsigned f){return 802;}\n"
        "int cuDriverGetVersion(int*v){*v=13000;return 0;}\n"
        'int cuGetErrorName(int e,const char**s){*s="CUDA_ERROR_SYSTEM_NOT_READY";return 0;}\n'
    )
    made = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", made, source], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    cuda = read_cuda_apart()
    assert cuda.code == 802
    assert check_driver(with_cuda(cuda)).id == "fabric-manager"


def test_a_selftest_that_finds_a_broken_driver_names_its_cause() -> None:
    result = _nothing_to_test(Cuda("broken", reason="cuInit failed with error 802"))
    assert (result.status, result.id) == ("fail", "fabric-manager")
    assert "nvidia-fabricmanager" in result.fix
    fix = "`--device cpu --runs 2` tests the reference path in a minute or two"
    assert _nothing_to_test(Cuda("ok")).fix == fix
