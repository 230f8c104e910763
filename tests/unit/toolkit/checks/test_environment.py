"""Describing the machine: every absent or broken part is a state."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.builds.manifest import (
    HostInfo,
    KernelRecord,
    Manifest,
    TargetInfo,
    ToolkitInfo,
)
from flash_dist.toolkit.checks.driver import check_variables
from flash_dist.toolkit.checks.environment import (
    imagine_environment,
    read_libc,
    read_python,
    read_system,
    read_variables,
)
from flash_dist.toolkit.checks.gpus import check_gpu
from flash_dist.toolkit.checks.install import check_system
from flash_dist.toolkit.loading.child import report_loading
from flash_dist.toolkit.loading.parts import judge_loading
from flash_dist.toolkit.loading.process import Outcome
from flash_dist.toolkit.machine.installed import (
    combine,
    find_differences,
    parse_symbol,
    read_installed,
    unsupported_error,
)
from flash_dist.toolkit.machine.libcuda import parse_release, read_cuda
from flash_dist.toolkit.machine.torch_install import Torch, parse_torch_cuda, read_torch
from flash_dist.toolkit.targets.archs import Arch, ArchSet
from flash_dist.toolkit.targets.axes import KernelKey, Place
from flash_dist.toolkit.targets.compatibility import Origin
from flash_dist.toolkit.targets.devices import Device, Driver
from tests.unit.made.builds import (
    ALL,
    ARCHSETS,
    HOPPER,
    make_build,
    make_environment,
    make_key,
)

if TYPE_CHECKING:
    from pathlib import Path

    from flash_dist.toolkit.targets.verdict import Variant

RELEASES = {
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n"
    "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n": "535.183.01",
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n": (
        "580.65.06"
    ),
    "something else 12.2.0": "",
}


@pytest.mark.parametrize(("text", "release"), RELEASES.items(), ids=RELEASES.values())
def test_the_release_is_found_in_the_kernel_modules_text(text: str, release: str) -> None:
    assert parse_release(text) == release


def test_without_libcuda_the_driver_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        message = f"{name}: cannot open shared object file: No such file or directory"
        raise OSError(message)

    monkeypatch.setattr("flash_dist.toolkit.machine.libcuda.ctypes.CDLL", refuse)
    cuda = read_cuda()
    assert (cuda.status, cuda.gpus, cuda.driver) == ("absent", (), None)
    assert "libcuda.so.1" in cuda.reason


class FakeDriver:
    """A libcuda whose calls fail from a chosen one on."""

    def __init__(self, failing: str, code: int) -> None:
        self.failing, self.code = failing, code

    def __getattr__(self, name: str) -> object:
        if name == "cuGetErrorName":
            return lambda *_: 1
        return lambda *_: self.code if name == self.failing else 0


@pytest.mark.parametrize(
    ("failing", "code", "status"),
    [("cuInit", 100, "ok"), ("cuInit", 999, "broken"), ("cuDriverGetVersion", 1, "broken")],
)
def test_a_driver_without_gpus_differs_from_one_that_fails(
    monkeypatch: pytest.MonkeyPatch, failing: str, code: int, status: str
) -> None:
    monkeypatch.setattr(
        "flash_dist.toolkit.machine.libcuda.ctypes.CDLL", lambda _: FakeDriver(failing, code)
    )
    cuda = read_cuda()
    assert cuda.status == status
    assert cuda.gpus == ()
    assert failing in cuda.reason


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        ("__version__ = '2.11.0'\ncuda: Optional[str] = '13.0'\nhip = None\n", "13.0"),
        ("cuda: _Optional[str] = None\n", ""),
        ("cuda = '12.8'\n", "12.8"),
        ("", ""),
    ],
)
def test_torchs_cuda_version_is_read_without_importing_it(text: str, cuda: str) -> None:
    assert parse_torch_cuda(text) == cuda


def test_an_absent_torch_is_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(
        "flash_dist.toolkit.machine.torch_install.importlib.metadata.distribution", refuse
    )
    assert read_torch().status == "absent"


def test_only_variables_that_matter_are_kept() -> None:
    kept = read_variables({"HOME": "/root", "SECRET": "x", "CUDA_VISIBLE_DEVICES": "1"})
    assert kept == {"CUDA_VISIBLE_DEVICES": "1"}


def test_variables_that_change_which_files_are_found_are_listed_where_they_are_set() -> None:
    folders = ":".join(f"/opt/software/library-{number}/lib" for number in range(9))
    given = {"LD_LIBRARY_PATH": folders, "LD_PRELOAD": "", "PYTHONPATH": "/src"}
    kept = read_variables(given)
    assert kept == {"LD_LIBRARY_PATH": folders, "PYTHONPATH": "/src"}
    machine = replace(make_environment(ALL, "8.6"), variables=kept)
    summary = check_variables(machine).summary
    assert summary == f"LD_LIBRARY_PATH={folders[:80]}..., PYTHONPATH=/src"
    many = replace(machine, variables={**kept, "CUDA_MODULE_LOADING": "LAZY"})
    assert check_variables(many).summary == "3 that change what is loaded"
    assert check_variables(many).details[1] == "PYTHONPATH=/src"


def test_a_python_without_the_gil_is_named_and_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert read_python() == platform.python_version()
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: name == "Py_GIL_DISABLED")
    assert read_python() == f"{platform.python_version()} free-threaded"
    result = check_system(replace(make_environment(ALL), python="3.13.1 free-threaded"))
    assert (result.status, result.summary[-20:]) == ("ok", "3.13.1 free-threaded")


def test_the_system_is_named() -> None:
    assert read_system()
    assert read_libc().startswith("glibc")


def test_a_what_if_takes_no_variables_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_FORCE_PTX_JIT", "1")
    imagined = imagine_environment([Device(8, 6)], Driver.parse("535"))
    assert imagined.what_if
    assert not imagined.variables
    assert [str(gpu.device) for gpu in imagined.cuda.gpus] == ["8.6"]


def test_an_environment_becomes_json() -> None:
    data = json.loads(json.dumps(make_environment(ALL, "8.6").to_json()))
    assert data["torch"] == {
        "status": "ok",
        "version": "2.11.0",
        "cuda": "13.0",
        "reason": None,
        "copies": [],
    }
    assert data["installed"]["targets"][-1] == "sm_120"
    assert Torch("absent", reason="no").to_json()["version"] is None


def make_manifest(variants: tuple[Variant, ...]) -> Manifest:
    kernels = tuple(
        KernelRecord(
            v.symbol, v.family, Place(*v.key[1:], v.plan), v.arch,
            64, 0, 0, 0, 1024, 128, "assembled",
        )
        for v in variants
    )  # fmt: skip
    return Manifest(
        package_version="0.1.0+cu130.hopper",
        arch_set=ArchSet.parse(HOPPER, name="hopper", label="hopper"),
        archsets=ARCHSETS,
        toolkit=ToolkitInfo("13.0", "13.0.88", "13.0.88", "580", "9.0"),
        host=HostInfo("g++ 12.2.0", "2.36"),
        flags=("-O3", "--compress-mode=size"),
        torch_headers="2.13.0",
        torch_min="2.10",
        torch_tested_max="2.15",
        targets=(TargetInfo(Arch.parse("sm_90a"), "assembled"),),
        kernels=kernels,
    )


def test_the_library_decides_and_the_manifest_adds_proof() -> None:
    variants = make_build(HOPPER).variants
    bare = tuple(replace(variant, proof="") for variant in variants)
    installed = combine(make_manifest(variants), bare, library="lib.so")
    assert installed.build is not None
    assert installed.build.name == "flash_dist 0.1.0+cu130.hopper"
    assert {variant.proof for variant in installed.build.variants} == {"assembled"}
    assert installed.differences == ()
    assert installed.torch_tested_max == "2.15"


def test_kernels_that_are_not_as_declared_are_listed() -> None:
    declared = tuple(sorted(make_build(HOPPER).variants, key=lambda variant: variant.symbol))
    moved = replace(declared[1], arch=Arch.parse("sm_90"))
    installed = combine(make_manifest(declared), (*declared[2:], moved))
    assert installed.differences == (
        f"{declared[0].symbol} for sm_90a is declared but not embedded",
        f"{declared[1].symbol} for sm_90a is declared but not embedded",
        f"{declared[1].symbol} for sm_90 is embedded but not declared",
    )
    assert find_differences(declared, declared) == ()


def test_an_unreadable_library_leaves_what_was_declared() -> None:
    installed = combine(make_manifest(make_build(HOPPER).variants), (), library_problem="cut short")
    assert installed.build is not None
    assert [str(arch) for arch in installed.build.archs] == ["sm_90a"]
    assert {variant.origin.codec for variant in installed.build.variants} == {"zstd"}
    assert installed.differences == ()


def test_without_a_manifest_the_library_is_judged_alone() -> None:
    installed = combine(None, make_build(HOPPER).variants, manifest_problem="absent")
    assert installed.build is not None
    assert installed.build.name == "flash_dist"


def test_an_empty_folder_has_two_problems(tmp_path: Path) -> None:
    installed = read_installed(tmp_path)
    assert installed.build is None
    assert "_build.json" in installed.manifest_problem
    assert "libflash_dist_kernels.so" in installed.library_problem
    assert installed.library == ""


def test_a_library_that_is_no_library_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "libflash_dist_kernels.so").write_text("hello")
    installed = read_installed(tmp_path)
    assert "fat binary" in installed.library_problem
    assert installed.library


@pytest.mark.parametrize(
    ("symbol", "key", "plan"),
    [
        ("flash_dist_fwd_bf16_d64_smem64_sm90a", make_key("fwd", "bf16", 64, 64), 64),
        ("flash_dist_fwd_bf16_d192v128_smem99_sm80", make_key("fwd", "bf16", 192, 128), 99),
        (
            "flash_dist_bwd_dq_recompute_fp16_d128_smem163_compute80",
            make_key("bwd_dq_recompute", "fp16", 128, 128),
            163,
        ),
        ("flash_dist_bwd_delta_fp32_d128_sm120", make_key("bwd_delta", "fp32", 128, 128), 0),
    ],
)
def test_a_kernels_name_tells_what_it_is(symbol: str, key: KernelKey, plan: int) -> None:
    variant = parse_symbol(symbol, Arch.parse("sm_90a"), Origin())
    assert variant is not None
    assert (variant.key, variant.plan) == (key, plan)


def test_a_foreign_kernel_is_not_ours() -> None:
    assert parse_symbol("_Z6kernelPf", Arch.parse("sm_80"), Origin()) is None


@pytest.mark.parametrize(
    ("outcome", "status", "stage", "reason"),
    [
        (
            Outcome("done", events=({"event": "stage", "stage": "torch"}, {"event": "loaded"})),
            "ok", "", "",
        ),
        (
            Outcome(
                "done",
                events=({"event": "failed", "stage": "kernels", "reason": "undefined symbol"},),
            ),
            "failed", "kernels", "undefined symbol",
        ),
        (
            Outcome(
                "signal", "SIGSEGV", ({"event": "stage", "stage": "extension"},), ("last words",)
            ),
            "crashed", "extension", "it was killed by SIGSEGV; it printed `last words`",
        ),
        (Outcome("timeout", "after 120 s"), "crashed", "", "it was still running after 120 s"),
    ],
    ids=["loaded", "failed", "signal", "timeout"],
)  # fmt: skip
def test_how_loading_ended_is_judged(
    outcome: Outcome, status: str, stage: str, reason: str
) -> None:
    loading = judge_loading(outcome)
    assert (loading.status, loading.stage) == (status, stage)
    assert loading.reason.startswith(reason)


def test_the_first_part_that_does_not_load_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        message = "libtorch.so: no such file"
        raise OSError(message)

    stages = (("kernels", lambda: None), ("torch", fail), ("extension", fail))
    monkeypatch.setattr("flash_dist.toolkit.loading.child.STAGES", stages)
    report_loading(tmp_path / "report")
    lines = (tmp_path / "report").read_text().splitlines()
    assert json.loads(lines[-1]) == {
        "event": "failed",
        "stage": "torch",
        "reason": "libtorch.so: no such file",
    }
    assert len(lines) == 3


def test_looking_at_the_machine_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; import flash_dist.toolkit.cli.doctor; "
        "import flash_dist.toolkit.checks.environment as e; e.read_torch(); "
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_operator_raises_the_sentence_of_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = combine(make_manifest(make_build("7.5").variants), make_build("7.5").variants)
    monkeypatch.setattr("flash_dist.toolkit.machine.installed.read_installed", lambda: installed)
    error = unsupported_error(Device(9, 0), name="NVIDIA H200")
    assert error is not None
    machine = replace(make_environment("7.5", "9.0"), installed=installed)
    gpu = replace(machine.cuda.gpus[0], name="NVIDIA H200")
    result = check_gpu(machine, gpu)
    assert (error.message, error.hint) == (result.summary, result.fix)
    assert unsupported_error(Device(7, 5)) is None


def test_an_operator_names_the_set_that_serves_the_other_gpus_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = make_environment("9.0a", "8.6", "12.1")
    monkeypatch.setattr(
        "flash_dist.toolkit.machine.installed.read_installed", lambda: machine.installed
    )
    monkeypatch.setattr("flash_dist.toolkit.machine.installed.read_cuda", lambda: machine.cuda)
    error = unsupported_error(Device(8, 6), name="GPU A")
    result = check_gpu(machine, machine.cuda.gpus[0])
    assert error is not None
    assert (error.message, error.hint) == (result.summary, result.fix)
    assert "install the arch set `all`" in error.message
