"""Doctor on recorded machines: results of each check, exit codes, JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.checks.environment import CheckChoice
from flash_dist.toolkit.checks.gpus import check_gpu
from flash_dist.toolkit.checks.install import check_system
from flash_dist.toolkit.checks.visible import check_mig
from flash_dist.toolkit.doctor.examine import CHECKS, Examination, examine
from flash_dist.toolkit.findings.result import guard
from flash_dist.toolkit.loading.parts import Loading
from flash_dist.toolkit.machine.installed import Installed
from flash_dist.toolkit.machine.libcuda import Cuda, Gpu
from flash_dist.toolkit.machine.torch_install import Torch
from flash_dist.toolkit.targets.devices import Device, Driver
from tests.unit.made.builds import (
    ALL,
    BLACKWELL,
    HOPPER,
    TURING_AMPERE_ADA,
    Passes,
    make_environment,
    make_installed,
    make_what_if,
)

if TYPE_CHECKING:
    from flash_dist.toolkit.checks.environment import Environment
    from flash_dist.toolkit.findings.result import CheckResult

NO_DRIVER = Cuda("absent", reason="libcuda.so.1 does not load: no such file")


def look(environment: Environment, *, selftest: bool = True) -> Examination:
    results = examine(environment, selftest=Passes() if selftest else None)
    return Examination(environment, tuple(results))


def find(examination: Examination, name: str) -> CheckResult:
    return next(result for result in examination.results if result.name == name)


@pytest.mark.parametrize(
    ("archs", "device"),
    [(HOPPER, "9.0"), (ALL, "7.5"), (ALL, "8.6"), (ALL, "9.0"), (ALL, "12.1"), (BLACKWELL, "10.3")],
)
@pytest.mark.parametrize("proof", ["native", "jit", "assembled"])
def test_a_healthy_install_shows_no_warning(archs: str, device: str, proof: str) -> None:
    examination = look(make_environment(archs, device, proof=proof))
    assert {result.status for result in examination.results} == {"ok"}
    assert {result.id for result in examination.results} == {""}
    assert examination.exit_code(strict=True) == 0


def test_mixed_2080_and_3090_with_a_turing_ptx_wheel() -> None:
    examination = look(make_environment("7.5+PTX", "7.5", "8.6"))
    turing, ampere = find(examination, "gpu 0"), find(examination, "gpu 1")
    assert turing.status == "ok"
    assert turing.summary == "GPU A (compute capability 7.5), 24 GiB, 82 SMs: native code (sm_75)"
    assert ampere.status == "warn"
    assert ampere.id == "dtype-not-built"
    assert "PTX through the JIT (compute_75)" in ampere.summary
    assert "no bf16 kernels" in ampere.summary
    assert "`nox -s build_wheels -- turing-ampere-ada`" in ampere.fix
    assert examination.exit_code() == 0
    assert examination.exit_code(strict=True) == 1


def test_an_old_driver_fails_every_gpu_for_the_driver_alone() -> None:
    examination = look(make_environment(ALL, "7.5", "8.6", driver="535.183.01"))
    failed = [result for result in examination.results if result.status == "fail"]
    assert [result.name for result in failed] == ["driver", "gpu 0", "gpu 1"]
    assert {result.id for result in failed} == {"driver-too-old"}
    assert all("580" in result.summary for result in failed)
    assert all("535.183.01" in result.summary for result in failed)
    assert find(examination, "selftest 0").id == "selftest-not-run"
    assert examination.exit_code() == 1


def test_without_a_gpu_nothing_could_be_checked() -> None:
    environment = replace(make_environment(ALL), cuda=NO_DRIVER)
    examination = look(environment)
    assert find(examination, "driver").id == "driver-absent"
    assert find(examination, "gpu").id == "no-gpu"
    assert examination.exit_code() == 3


def test_gpus_that_nothing_was_judged_on_are_nothing_checked() -> None:
    machine = replace(make_environment(ALL, "8.6"), installed=Installed())
    choice = CheckChoice(frozenset({"gpu"}))
    examination = Examination(machine, tuple(examine(machine, choice=choice)), choice)
    assert [result.status for result in examination.results] == ["skip"]
    assert examination.exit_code() == 3


def test_a_cpu_torch_is_fine_without_a_gpu_and_a_failure_with_one() -> None:
    cpu = Torch("ok", "2.13.0+cpu")
    without = look(replace(make_environment(ALL), torch=cpu, cuda=NO_DRIVER))
    assert find(without, "torch").status == "ok"
    assert without.exit_code() == 3
    with_gpu = look(replace(make_environment(ALL, "8.6"), torch=cpu))
    assert find(with_gpu, "torch").id == "torch-cpu-build"
    assert with_gpu.exit_code() == 1


@pytest.mark.parametrize(
    ("torch", "status", "cause"),
    [
        (Torch("absent", reason="torch is not installed"), "fail", "torch-absent"),
        (Torch("broken", reason="torch cannot be read"), "fail", "torch-broken"),
        (Torch("ok", "2.9.1", "13.0"), "fail", "torch-too-old"),
        (Torch("ok", "2.10.0", "13.0"), "ok", ""),
        (Torch("ok", "2.15.1+cu130", "13.0"), "ok", ""),
        (Torch("ok", "2.16.0.dev20261201", "13.0"), "warn", "torch-newer-than-tested"),
    ],
    ids=lambda value: value.version or value.status if isinstance(value, Torch) else None,
)
def test_torch_is_judged_by_its_version(torch: Torch, status: str, cause: str) -> None:
    result = find(look(replace(make_environment(ALL, "8.6"), torch=torch)), "torch")
    assert (result.status, result.id) == (status, cause)


def test_a_failure_outranks_the_missing_gpu() -> None:
    environment = make_environment(ALL)
    broken = Loading("failed", "extension", "libtorch.so: undefined symbol: aoti_torch_x")
    examination = look(replace(environment, cuda=NO_DRIVER, loading=broken))
    result = find(examination, "extension")
    assert result.id == "extension-failed"
    assert "undefined symbol" in result.summary
    assert examination.exit_code() == 1


def test_without_torch_only_torch_fails() -> None:
    environment = replace(
        make_environment(ALL, "8.6"),
        torch=Torch("absent", reason="torch is not installed"),
        loading=Loading("failed", "torch", "No module named 'torch'"),
    )
    examination = look(environment)
    assert [result.name for result in examination.results if not result] == ["torch"]
    assert find(examination, "torch").fix == "`pip install 'torch>=2.10'`"
    assert find(examination, "extension").id == "extension-needs-torch"
    assert find(examination, "selftest 0").id == "selftest-not-run"


def test_an_extension_that_crashes_is_a_finding_and_stops_the_selftest() -> None:
    crashed = Loading("crashed", "kernels", "it was killed by SIGSEGV")
    examination = look(replace(make_environment(ALL, "8.6"), loading=crashed))
    assert find(examination, "extension").id == "kernels-crashed"
    assert find(examination, "gpu 0").status == "ok"
    assert find(examination, "selftest 0").id == "selftest-not-run"


@pytest.mark.parametrize(
    ("installed", "cause"),
    [
        (Installed(manifest_problem="no manifest", library_problem="no library"), "not-built"),
        (replace(make_installed(ALL), library_problem="cut short"), "library-unreadable"),
        (replace(make_installed(ALL), manifest_problem="not JSON"), "manifest-unreadable"),
        (replace(make_installed(ALL), differences=("a is declared",) * 20), "embedded-differs"),
    ],
    ids=["nothing", "library", "manifest", "differ"],
)
def test_a_broken_install_is_a_failure_and_the_rest_is_still_checked(
    installed: Installed, cause: str
) -> None:
    examination = look(replace(make_environment(ALL, "8.6"), installed=installed))
    build = find(examination, "build")
    assert (build.status, build.id) == ("fail", cause)
    assert len(build.details) <= 9
    assert find(examination, "gpu 0").status == ("skip" if cause == "not-built" else "ok")
    assert examination.exit_code() == 1


def test_a_turing_wheel_on_hopper_says_which_set_to_install() -> None:
    examination = look(make_environment("7.5", "9.0"))
    result = find(examination, "gpu 0")
    assert (result.status, result.id) == ("fail", "no-matching-code")
    assert "built for SASS sm_75 and no PTX; install the arch set `hopper`" in result.summary
    assert "`nox -s build_wheels -- hopper`" in result.fix
    assert "label hopper" in result.fix


def test_a_fix_serves_all_gpus_of_the_machine() -> None:
    examination = look(make_environment(HOPPER, "8.6", "9.0"))
    assert find(examination, "gpu 0").status == "fail"
    assert "`nox -s build_wheels -- all`" in find(examination, "gpu 0").fix
    assert find(examination, "gpu 1").status == "ok"


def test_on_an_unproven_target_the_selftest_is_called_the_first_proof() -> None:
    details = find(look(make_environment(ALL, "12.0", proof="assembled")), "gpu 0").details
    assert any("sm_120" in line and "first proof" in line for line in details)
    proven = find(look(make_environment(ALL, "9.0")), "gpu 0").details
    assert not any("first proof" in line for line in proven)


def test_the_cost_of_the_jit_is_reported() -> None:
    environment = make_environment("7.5+PTX", "8.6")
    details = find(look(environment), "gpu 0").details
    assert any("at the first start" in line for line in details)
    uncached = replace(environment, variables={"CUDA_CACHE_DISABLE": "1"})
    assert any("at every start" in line for line in find(look(uncached), "gpu 0").details)
    native = find(look(make_environment(ALL, "9.0")), "gpu 0").details
    assert not any("start" in line for line in native)


def test_the_plan_of_each_kernel_is_shown() -> None:
    result = find(look(make_environment(ALL, "8.6")), "gpu 0")
    assert result.details == ()
    plans = result.background
    assert "fwd              fp16 bf16 fp32 ieee32  head_dim 64: sm_80, 64 KB plan; " in plans[0]
    assert "head_dim 128: sm_80, 99 KB plan" in plans[0]
    assert result.to_json()["details"] == list(plans)


def test_a_lowered_limit_and_jit_variables_are_warnings() -> None:
    environment = make_environment(ALL, "9.0")
    for name, value in (("FLASH_DIST_SMEM_LIMIT", "65536"), ("CUDA_FORCE_PTX_JIT", "1")):
        examination = look(replace(environment, variables={name: value}))
        assert find(examination, "variables").status == "warn"
    assert "compute_80" in find(examination, "gpu 0").summary


@pytest.mark.parametrize("text", ["64k", "0", "65536 ", " ", "2147483648", "9" * 5000, "\uff16"])
def test_a_limit_that_the_dispatcher_cannot_read_is_a_failure(text: str) -> None:
    environment = replace(make_environment(ALL, "9.0"), variables={"FLASH_DIST_SMEM_LIMIT": text})
    result = find(look(environment), "variables")
    assert (result.status, result.id) == ("fail", "smem-limit-malformed")
    assert f"got `{text:.60}`" in result.summary


def test_a_budget_that_is_no_number_is_a_failure() -> None:
    environment = make_environment(ALL, "9.0")
    found = {
        text: find(
            look(replace(environment, variables={"FLASH_DIST_WORKSPACE_MB": text, **more})),
            "variables",
        )
        for text, more in (("512", {}), ("1e3", {}), ("-1", {"CUDA_FORCE_PTX_JIT": "1"}))
    }
    assert found["512"].status == "ok"
    for text in ("1e3", "-1"):
        assert (found[text].status, found[text].id) == ("fail", "workspace-malformed")
        assert f"got `{text}`" in found[text].summary


def test_a_check_of_boundaries_that_is_neither_on_nor_off_is_a_failure() -> None:
    environment = make_environment(ALL, "9.0")
    found = {
        text: find(look(replace(environment, variables={"FLASH_DIST_CHECK": text})), "variables")
        for text in ("0", "1", "on")
    }
    assert found["0"].status == found["1"].status == "ok"
    assert (found["on"].status, found["on"].id) == ("fail", "check-malformed")
    assert found["on"].summary == "FLASH_DIST_CHECK must be 0 or 1, got `on`"


def test_unpromised_code_is_a_warning_that_names_the_selftest() -> None:
    result = find(look(make_environment(TURING_AMPERE_ADA, "8.7")), "gpu 0")
    assert (result.status, result.id) == ("warn", "unverified")
    assert "selftest" in result.fix


@pytest.mark.parametrize("device", ["7.6", "8.5", "9.9", "13.0", "99.9"])
def test_a_gpu_that_nobody_knows_is_judged_by_the_rules_with_a_warning(device: str) -> None:
    result = find(look(make_what_if(ALL, device)), "gpu 0")
    assert (result.status, result.id) == ("warn", "unknown-gpu")
    assert result.summary.endswith("; no such GPU is known")
    kib = Device.parse(device).smem_optin // 1024
    assert any(line.startswith(f"assumed: {kib} KB of shared memory") for line in result.details)
    assert any("12.0, 12.1" in line for line in result.details)


def test_a_gpu_newer_than_all_known_ones_gets_ptx_and_99_kb() -> None:
    result = find(look(make_what_if(ALL, "13.0")), "gpu 0")
    assert "PTX through the JIT (compute_80)" in result.summary
    assert any(line.startswith("assumed: 99 KB") for line in result.details)
    refused = find(look(make_what_if("9.0a", "13.0")), "gpu 0")
    assert (refused.status, refused.id) == ("fail", "no-matching-code")
    assert any(line.startswith("assumed: 99 KB") for line in refused.details)


def test_a_new_gpu_that_is_really_there_is_no_warning_and_its_own_limit_counts() -> None:
    machine = make_environment(ALL, "13.0")
    gpu = replace(machine.cuda.gpus[0], smem_optin=163 * 1024)
    machine = replace(machine, cuda=replace(machine.cuda, gpus=(gpu,)))
    result = find(look(machine), "gpu 0")
    assert (result.status, result.id) == ("ok", "")
    assert any("163 KB plan" in line for line in result.background)
    assert any("13.0 is unknown to this flash_dist" in line for line in result.details)
    assert not any("assumed" in line for line in result.details)


def test_a_crashing_check_is_a_result() -> None:
    def crash() -> CheckResult:
        message = "boom"
        raise RuntimeError(message)

    (result,) = guard("torch", crash)
    assert (result.name, result.status, result.id) == ("torch", "fail", "check-crashed")
    assert "RuntimeError: boom" in result.summary


def test_the_runner_of_a_check_names_it() -> None:
    machine = make_environment(ALL, "8.6")
    assert check_system(machine).name == ""
    (named,) = guard("gpu 0", partial(check_gpu, machine, machine.cuda.gpus[0]), gpu=0)
    assert (named.name, named.gpu, named.status) == ("gpu 0", 0, "ok")
    assert not list(guard("mig", partial(check_mig, machine)))
    names = [result.name for result in look(machine).results]
    assert names == [*(name for name, _ in CHECKS), "gpu 0", "selftest 0"]


def test_a_crashing_selftest_does_not_end_doctor() -> None:
    class Crashes(Passes):
        def run(self, gpu: Gpu) -> CheckResult:
            message = f"boom {gpu.index}"
            raise OSError(message)

    results = list(examine(make_environment(ALL, "8.6", "8.6"), selftest=Crashes()))
    assert [result.id for result in results[-2:]] == ["check-crashed", "check-crashed"]


def test_a_what_if_looks_at_build_driver_and_gpus_alone() -> None:
    examination = look(make_what_if(ALL, "7.5", "8.6"))
    names = [result.name for result in examination.results]
    assert names == ["build", "driver", "gpu 0", "gpu 1"]
    assert examination.exit_code() == 0
    assert find(examination, "gpu 1").summary == (
        "compute capability 8.6, 82 SMs: code of the same major (sm_80)"
    )


@pytest.mark.parametrize(
    ("archs", "devices", "driver", "code"),
    [
        (ALL, ("7.5", "8.6", "8.7", "8.9", "9.0", "10.3", "11.0", "12.1"), "580", 0),
        (TURING_AMPERE_ADA, ("9.0", "12.1"), "580", 0),
        (HOPPER, ("8.6", "12.1"), "580", 1),
        (HOPPER, ("9.0",), "535", 1),
        ("7.5+PTX", ("8.6",), "580", 0),
        (ALL, ("9.0",), None, 0),
    ],
)
def test_what_if_exit_codes(
    archs: str, devices: tuple[str, ...], driver: str | None, code: int
) -> None:
    assert look(make_what_if(archs, *devices, driver=driver)).exit_code() == code


def test_a_what_if_without_a_build_fails_instead_of_checking_nothing() -> None:
    environment = replace(make_what_if(ALL, "8.6"), installed=Installed(manifest_problem="none"))
    assert look(environment).exit_code() == 1


def test_the_driver_check_says_what_the_build_needs() -> None:
    result = find(look(make_what_if(ALL, "8.6")), "driver")
    assert result.background == (
        "CUDA 13.0 needs driver 580 or newer",
        "PTX ISA 9.0 needs driver 580 or newer",
        "zstd compression needs driver 550 or newer",
    )


def test_a_driver_that_does_not_answer_is_broken_not_absent() -> None:
    cuda = Cuda("broken", Driver.parse("580"), reason="libcuda.so.1 did not answer within 120 s")
    examination = look(replace(make_environment(ALL), cuda=cuda))
    assert find(examination, "driver").id == "driver-broken"
    assert examination.exit_code() == 1


def test_the_json_holds_everything_and_is_versioned() -> None:
    examination = look(make_environment("7.5+PTX", "7.5", "8.6"))
    data = json.loads(json.dumps(examination.to_json()))
    assert data["version"] == 1
    assert data["command"] == "doctor"
    assert (data["status"], data["exit_code"], data["what_if"]) == ("warn", 0, False)
    assert data["environment"]["cuda"]["gpus"][1]["compute_capability"] == "8.6"
    assert data["environment"]["cuda"]["driver_release"] == "580.65.06"
    ampere = next(check for check in data["checks"] if check["name"] == "gpu 1")
    assert set(ampere) == {
        "name", "status", "id", "gpu", "summary", "details", "fix", "docs", "data",
    }  # fmt: skip
    assert ampere["data"]["how"] == "jit"
    assert ampere["data"]["missing_dtypes"] == ["bf16"]
    assert {kernel["target"] for kernel in ampere["data"]["kernels"]} == {"compute_75"}
