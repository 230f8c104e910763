"""The printed fix: it agrees with the sentence above it and can really be followed."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.builds.published import published_sets
from flash_dist.toolkit.targets.advice import driver_fix, explain_refusal
from flash_dist.toolkit.targets.devices import Device, Driver
from flash_dist.toolkit.targets.verdict import Situation, judge_device
from tests.unit.made.builds import ALL, ARCHSETS, HOPPER, make_build

if TYPE_CHECKING:
    from flash_dist.toolkit.targets.archs import ArchSet

R580 = Driver.parse("580")


def explain(
    archs: str, device: str, *others: str, archsets: tuple[ArchSet, ...] = ARCHSETS
) -> tuple[str, str]:
    build = replace(make_build(archs), archsets=archsets)
    verdict = judge_device(build, Situation(Device.parse(device), R580))
    return explain_refusal(verdict, build, others=[Device.parse(other) for other in others])


@pytest.mark.parametrize(
    ("device", "others", "name"),
    [
        ("8.6", [], "turing-ampere-ada"),
        ("8.6", ["12.1"], "all"),
        ("12.1", ["8.6"], "all"),
        ("8.6", ["7.5"], "turing-ampere-ada"),
        ("8.6", ["5.2"], "turing-ampere-ada"),  # 5.2 is unservable; the others still count
    ],
)
def test_sentence_and_fix_name_one_set(device: str, others: list[str], name: str) -> None:
    sentence, fix = explain(HOPPER, device, *others)
    assert re.findall(r"install the arch set `(.+?)`", sentence) == [name]
    assert f"`nox -s build_wheels -- {name}`" in fix


def test_a_list_of_targets_serves_gpus_that_no_set_serves() -> None:
    hopper_and_blackwell = ARCHSETS[1:3]
    sentence, fix = explain("9.0", "12.1", "8.6", "5.2", archsets=hopper_and_blackwell)
    assert sentence.endswith("; no published arch set serves all of 8.6, 12.1")
    assert "`TORCH_CUDA_ARCH_LIST='8.6;12.1' nox -s build_wheels`" in fix
    sentence, fix = explain("9.0", "8.6", archsets=hopper_and_blackwell)
    assert sentence.endswith("; no published arch set serves it")


@pytest.mark.parametrize("device", ["5.2", "7.0", "7.2"])
@pytest.mark.parametrize("archs", [ALL, HOPPER], ids=["all", "hopper"])
def test_a_gpu_too_old_for_every_build_is_told_where_support_starts(
    archs: str, device: str
) -> None:
    sentence, fix = explain(archs, device)
    assert f"not {device}" in sentence
    assert re.search(rf"CUDA 13\.0\b.* {re.escape(str(device))}\b", fix)
    assert "compute capability 7.5 or newer" in fix


def test_a_variable_is_unset_only_if_it_is_set() -> None:
    build = make_build(ALL)
    small = Situation.of(Device(9, 0), R580, {}, smem_optin=1000)
    sentence, fix = explain_refusal(judge_device(build, small), build)
    assert "the limit is 1000" in sentence
    assert "unset" not in fix
    lowered = Situation.of(Device(9, 0), R580, {"FLASH_DIST_SMEM_LIMIT": "1000"})
    verdict = judge_device(build, lowered)
    assert explain_refusal(verdict, build)[1] == "`unset FLASH_DIST_SMEM_LIMIT`"


def test_a_driver_too_old_for_this_build_is_told_the_set_that_it_loads() -> None:
    build = replace(make_build(ALL), archsets=published_sets())
    fix = driver_fix(build, Driver.parse("535"), [Device(7, 5), Device(9, 0)])
    assert fix == (
        "install NVIDIA driver 580 or newer (`nvidia-smi` shows the present one), or the arch set "
        "`cuda12`: CUDA 12.4 runs on driver 535 (CUDA 12.2)"
    )
    assert "cuda12" not in driver_fix(build, Driver.parse("535"), [Device(12, 0)])
    older = driver_fix(build, Driver.parse("470"), [Device(7, 5)])
    assert older.endswith(", or NVIDIA driver 525 or newer and the arch set `cuda12`")
    assert "cuda12" not in driver_fix(build)


def test_a_driver_that_does_not_work_the_gpu_is_to_be_the_one_that_does() -> None:
    build = replace(make_build(ALL), archsets=published_sets())
    verdict = judge_device(build, Situation(Device(10, 7), R580))
    sentence, fix = explain_refusal(verdict, build)
    assert "10.7 needs driver 615 or newer, not driver 580" in sentence
    assert fix == "install NVIDIA driver 615 or newer (`nvidia-smi` shows the present one)"


@pytest.mark.parametrize(
    ("toolkit", "device", "driver", "name", "end"),
    [
        # a set that this driver loads comes before a better set for a newer driver
        ("13.0", "8.6", "535", "cuda12", "install that wheel"),
        ("12.4", "8.6", "535", "cuda12", "install that wheel"),
        ("13.0", "12.0", "580", "blackwell", "install that wheel"),
        # if all sets need a newer driver, both steps are printed
        ("12.4", "12.0", "535", "blackwell", ", and NVIDIA driver 580 or newer"),
        ("13.0", "12.0", "570", "blackwell", ", and NVIDIA driver 580 or newer"),
    ],
)
def test_the_set_that_is_named_runs_on_the_driver_or_says_which_it_needs(
    toolkit: str, device: str, driver: str, name: str, end: str
) -> None:
    whole = make_build(HOPPER)
    variants = tuple(
        replace(variant, origin=replace(variant.origin, toolkit=toolkit))
        for variant in whole.variants
    )
    build = replace(whole, variants=variants, archsets=published_sets(), toolkit=toolkit)
    there = Situation(Device.parse(device), Driver.parse(driver))
    sentence, fix = explain_refusal(judge_device(build, there), build)
    assert f"code for {device}" in sentence or f"install the arch set `{name}`" in sentence
    assert f"`nox -s build_wheels -- {name}`" in fix
    assert fix.endswith(end)
