from __future__ import annotations

import pytest

from flash_dist.toolkit.builds.published import load_picks
from flash_dist.toolkit.errors import ArchError
from flash_dist.toolkit.machine.libcuda import Cuda, imagine_cuda
from flash_dist.toolkit.make.building.plan import choose_targets, make_plan
from flash_dist.toolkit.make.project import ARCHSETS
from flash_dist.toolkit.make.toolchain.nvcc import ToolchainError
from flash_dist.toolkit.targets.devices import Device, Driver

NEW_DRIVER = Driver.parse("580")


def gpus(*capabilities: str, driver: Driver | None = NEW_DRIVER) -> Cuda:
    return imagine_cuda([Device.parse(one) for one in capabilities], driver)


def no_driver() -> Cuda:
    return Cuda("absent", reason="libcuda.so.1 was not found")


def never() -> Cuda:
    message = "the driver was asked although the environment says what to build"
    raise AssertionError(message)


@pytest.mark.parametrize(
    ("here", "archs", "label"),
    [
        (["9.0"], "9.0a", "sm90a"),
        (["8.6", "9.0", "8.6"], "8.6;9.0a", "sm86.sm90a"),
        (["12.1"], "12.1", "sm121"),
        (["10.7"], "10.3", "sm103"),
        (["13.0"], "compute_121", "compute121"),
    ],
    ids=["H100", "two kinds", "DGX Spark", "newer than nvcc, same major", "newer than nvcc"],
)
def test_the_gpus_here_get_what_they_run_best(here: list[str], archs: str, label: str) -> None:
    plan = choose_targets({}, "13.0", lambda: gpus(*here))
    assert (str(plan.archset), plan.archset.label) == (archs, label)


def test_the_line_names_the_gpus_the_targets_and_the_variable() -> None:
    plan = choose_targets({}, "13.0", lambda: gpus("9.0", "8.6"))
    assert str(plan) == (
        "building for the GPUs here, 8.6, 9.0 (TORCH_CUDA_ARCH_LIST chooses others): sm_86, sm_90a"
    )


def test_a_gpu_that_nothing_can_be_compiled_for_is_left_out_and_named() -> None:
    plan = choose_targets({}, "13.0", lambda: gpus("7.0", "8.0"))
    assert str(plan.archset) == "8.0"
    assert plan.notes == (
        "GPU 0 is left out, compute capability 7.0: CUDA 13.0 compiles nothing for it",
    )


@pytest.mark.parametrize(
    ("cuda", "why"),
    [
        (no_driver(), "no GPU is here"),
        (gpus(), "no GPU is here"),
        (gpus("6.1"), "nothing can be compiled for the GPUs here"),
        (Cuda("broken", reason="cuInit failed"), "the driver does not answer: cuInit failed"),
    ],
    ids=["no driver", "no GPU", "only old GPUs", "broken driver"],
)
def test_without_a_gpu_to_build_for_it_is_the_set_that_pip_gets(cuda: Cuda, why: str) -> None:
    plan = choose_targets({}, "13.0", lambda: cuda)
    assert plan.archset == load_picks(ARCHSETS)["pip"]
    assert f"building for arch set `all`, as {why} (TORCH_CUDA_ARCH_LIST chooses others)" in str(
        plan
    )


def test_the_list_wins_over_the_gpus_and_the_named_set_over_the_list() -> None:
    environ = {"TORCH_CUDA_ARCH_LIST": "7.5 8.6"}
    listed = choose_targets(environ, "13.0", never)
    assert (listed.archset.label, listed.reason) == ("sm75.sm86", "what TORCH_CUDA_ARCH_LIST says")
    named = choose_targets({**environ, "FLASH_DIST_ARCH_SET": "hopper"}, "13.0", never)
    assert (named.archset.label, named.reason) == ("hopper", "what FLASH_DIST_ARCH_SET says")


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"TORCH_CUDA_ARCH_LIST": "9.5"}, r"unknown architecture `9\.5`[\s\S]*did you mean"),
        ({"TORCH_CUDA_ARCH_LIST": "7.0 8.0"}, r"sm_70[\s\S]*hint: .*TORCH_CUDA_ARCH_LIST"),
        ({"FLASH_DIST_ARCH_SET": "hoper"}, r"did you mean `hopper`"),
        ({"FLASH_DIST_ARCH_SET": "hopper all"}, r"got `hopper all`[\s\S]*builds several"),
        (
            {"FLASH_DIST_ARCH_SET": "cuda12"},
            r"with CUDA 12\.4, not 13\.0[\s\S]*nox -s build_wheels",
        ),
    ],
    ids=["unknown", "too old", "misspelled", "two sets", "of another CUDA"],
)
def test_a_plan_that_cannot_be_built_is_an_error_with_a_hint(
    environ: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ArchError, match=sentence):
        choose_targets(environ, "13.0", never)


def test_a_driver_too_old_for_the_result_is_reported_before_the_build() -> None:
    plan = choose_targets({}, "13.0", lambda: gpus("9.0", driver=Driver.parse("550")))
    assert plan.notes[0].startswith("warning: what is built with CUDA 13.0 needs driver 580")


def test_a_wrong_cuda_home_is_reported_before_anything_else() -> None:
    with pytest.raises(ToolchainError, match="CUDA_HOME is `/nowhere`"):
        make_plan({"CUDA_HOME": "/nowhere", "TORCH_CUDA_ARCH_LIST": "9.5"}, never)


def test_a_list_without_the_suffix_of_hopper_is_reported_before_the_build() -> None:
    plan = choose_targets({"TORCH_CUDA_ARCH_LIST": "9.0"}, "13.0", never)
    assert "warning: sm_90 has none of the kernels that are only for sm_90a" in str(plan)
    assert choose_targets({"TORCH_CUDA_ARCH_LIST": "9.0a"}, "13.0", never).notes == ()


def test_native_asks_for_the_gpus_here() -> None:
    plan = choose_targets({"TORCH_CUDA_ARCH_LIST": "native"}, "13.0", lambda: gpus("9.0"))
    assert str(plan.archset) == "9.0a"
    with pytest.raises(
        ArchError, match=r"7\.5.*Volta 8\.0.*sm_70[\s\S]*hint: .*TORCH_CUDA_ARCH_LIST"
    ):
        choose_targets({"TORCH_CUDA_ARCH_LIST": "Volta 8.0"}, "13.0", never)
