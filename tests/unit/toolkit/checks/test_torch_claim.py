"""GPU code of torch, read from planted libraries and judged on GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.checks.torch_claim import check_torch_claim, find_refusal
from flash_dist.toolkit.machine.torch_install import (
    Torch,
    TorchCode,
    read_arch_list,
    read_torch_code,
)
from tests.unit.made.builds import ALL
from tests.unit.made.fatbin_builder import PTX, SASS, Kernel, container, cubin, entry, library, ptx
from tests.unit.made.scenarios import AMPERE, TURING, make_machine, make_torch

if TYPE_CHECKING:
    from pathlib import Path

    from flash_dist.toolkit.findings.result import CheckResult

FLAGS = b"\x7fELF junk\0sm_notes\0sm_75 sm_80 sm_90a compute_90\0more\0"


def compare(code: TorchCode, *, archs: str = ALL, driver: str = "580.65.06") -> CheckResult | None:
    machine = replace(make_machine(archs, AMPERE, driver=driver), torch_code=code)
    return check_torch_claim(machine, machine.cuda.gpus[0])


def test_the_targets_and_the_claim_are_read_from_torchs_files(tmp_path: Path) -> None:
    images = container(
        entry(SASS, 80, cubin(Kernel("add"))), entry(PTX, 90, ptx("add", target="sm_90"))
    )
    (tmp_path / "libtorch_cuda.so").write_bytes(library(images))
    (tmp_path / "libtorch_cuda_linalg.so").write_bytes(library())
    (tmp_path / "libtorch_python.so").write_bytes(FLAGS)
    code = read_torch_code(tmp_path)
    assert code.reason == ""
    assert [str(arch) for report in code.reports for arch in report.archs] == [
        "sm_80", "compute_90",
    ]  # fmt: skip
    assert list(map(str, code.arch_list)) == ["sm_75", "sm_80", "sm_90a", "compute_90"]
    assert code.to_json()["libraries"] == [
        {
            "path": str(tmp_path / "libtorch_cuda.so"),
            "targets": ["sm_80", "compute_90"],
            "images": 2,
        }
    ]


@pytest.mark.parametrize(
    ("data", "claim"),
    [
        (FLAGS, "sm_75 sm_80 sm_90a compute_90"),
        (b"x\0sm_120\0", "sm_120"),
        (b"x\0sm_80 sm_90 \0sm_100\0", "sm_80 sm_90"),
        (b"x\0sm_80 and more\0", ""),
        (b"no such text", ""),
    ],
)
def test_the_arch_list_is_a_whole_text(tmp_path: Path, data: bytes, claim: str) -> None:
    path = tmp_path / "libtorch_python.so"
    path.write_bytes(data)
    assert " ".join(map(str, read_arch_list(path))) == claim
    assert read_arch_list(tmp_path / "none") == ()


def test_a_torch_that_cannot_be_read_is_a_reason_and_no_finding(tmp_path: Path) -> None:
    (tmp_path / "libtorch_cuda.so").write_bytes(b"cut short")
    code = read_torch_code(tmp_path)
    assert "libtorch_cuda.so" in code.reason
    assert compare(code) is None
    assert "no GPU code" in read_torch_code(tmp_path / "none").reason


def test_the_installed_torch_is_read_without_importing_it() -> None:
    code = read_torch_code()
    assert bool(code.reports) != bool(code.reason)


def test_single_kernels_for_newer_gpus_are_no_lack() -> None:
    most = make_torch("8.0", containers=5).reports[0].entries
    few = tuple(
        replace(one, container=9) for one in make_torch("9.0", containers=1).reports[0].entries
    )
    code = TorchCode((replace(make_torch("8.0").reports[0], entries=most + few),))
    assert compare(code) is None
    rare = TorchCode((replace(code.reports[0], entries=most[:1] + few),))
    result = compare(rare)
    assert result is not None
    assert (result.status, result.id) == ("fail", "torch-claim-differs")


def test_a_torch_for_a_newer_driver_is_named_as_such() -> None:
    machine = make_machine(ALL, TURING, driver="535.183.01")
    refusal = find_refusal(machine, make_torch(ALL), machine.cuda.gpus[0])
    assert "code built with CUDA 13.0 needs driver 580 or newer" in refusal
    older = replace(machine, torch=Torch("ok", "2.11.0", "12.6"))
    assert find_refusal(older, make_torch("7.5"), machine.cuda.gpus[0]) == ""


def test_only_the_build_is_reported_if_torch_lacks_code_too() -> None:
    assert compare(make_torch("9.0"), archs="9.0a") is None
