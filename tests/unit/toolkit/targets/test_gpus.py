"""The table of GPUs, and its derivations; lists of toolkits are written by hand."""

from __future__ import annotations

import pytest

from flash_dist.toolkit.targets.archs import NAMED_LISTS, TOOLKIT_ARCHS, Arch, ArchSet
from flash_dist.toolkit.targets.compatibility import FAMILIES, judge
from flash_dist.toolkit.targets.devices import (
    INTEGRATED,
    KNOWN_DEVICES,
    PTX_ISA_CUDA,
    Device,
    parse_version,
)
from flash_dist.toolkit.targets.gpus import CHIPS, SOLD

OLD = "5.0 5.2 5.3 6.0 6.1 6.2 7.0 7.2"
KEPT = "7.5 8.0 8.6 8.7 8.9 9.0 9.0a"
# From `nvcc --list-gpu-code` and `nvcc --help` of each version.
COMPILED = {
    "12.0": f"{OLD} {KEPT}",
    "12.8": f"{OLD} {KEPT} 10.0 10.0a 10.1 10.1a 12.0 12.0a",
    "12.9": f"{OLD} {KEPT} 10.0 10.0a 10.0f 10.1 10.1a 10.1f 10.3 10.3a 10.3f "
    "12.0 12.0a 12.0f 12.1 12.1a 12.1f",
    "13.0": "7.5 8.0 8.6 8.7 8.8 8.9 9.0 9.0a 10.0 10.0a 10.0f 10.3 10.3a 10.3f "
    "11.0 11.0a 11.0f 12.0 12.0a 12.0f 12.1 12.1a 12.1f",
}
COMPILED |= {"13.1": COMPILED["13.0"], "13.2": COMPILED["13.0"]}
COMPILED["13.4"] = COMPILED["13.0"].replace(" 11.0 ", " 10.7 10.7a 10.7f 11.0 ")
COMPILED["13.5"] = COMPILED["13.4"]


def test_each_gpu_has_one_row_and_rows_stand_from_old_to_new() -> None:
    versions = [chip.version for chip in CHIPS]
    assert versions == sorted(set(versions))
    assert [str(device) for device in KNOWN_DEVICES] == [str(chip) for chip in CHIPS]


@pytest.mark.parametrize("toolkit", TOOLKIT_ARCHS)
def test_a_toolkit_compiles_what_its_own_list_says(toolkit: str) -> None:
    assert toolkit in COMPILED, f"write what `nvcc --list-gpu-code` of CUDA {toolkit} says"
    assert " ".join(arch.dotted for arch in TOOLKIT_ARCHS[toolkit]) == COMPILED[toolkit]


def test_the_ptx_isa_of_every_toolkit_is_known() -> None:
    for toolkit in TOOLKIT_ARCHS:
        known = parse_version(toolkit) in PTX_ISA_CUDA.values()
        assert known, f"PTX_ISA_CUDA (targets/devices.py) has no row for CUDA {toolkit}"


def test_every_lately_compiled_target_has_a_row_and_every_row_is_compiled_by_some_toolkit() -> None:
    compiled = {arch.device for archs in TOOLKIT_ARCHS.values() for arch in archs}
    lacking = sorted(map(str, set(KNOWN_DEVICES) - compiled))
    assert not lacking, "no toolkit of TOOLKIT_ARCHS (targets/archs.py) compiles for it: add one"
    assert compiled == set(KNOWN_DEVICES)


def test_a_family_holds_its_own_gpu_and_known_ones_of_the_same_chip_generation() -> None:
    for version, members in FAMILIES.items():
        assert version in members
        assert members <= {chip.version for chip in CHIPS}
        assert {Device(*one).integrated for one in members} == {version in INTEGRATED}


def test_a_renamed_gpu_is_the_same_silicon_under_a_newer_toolkit() -> None:
    rows = {chip.version: chip for chip in CHIPS}
    renamed = [chip for chip in CHIPS if chip.renamed]
    assert [str(chip) for chip in renamed] == ["10.1"]
    for chip in renamed:
        assert chip.renamed is not None
        new = rows[chip.renamed]
        assert chip.until == new.first
        assert (chip.smem_kib, chip.integrated, chip.family) == (
            new.smem_kib,
            new.integrated,
            new.family,
        )
        assert judge(Arch(*chip.version), Device(*new.version)).how == "native"
        assert judge(Arch(*new.version), Device(*chip.version)).how == "native"


def test_integrated_gpus_are_those_of_the_tegra_lists_and_the_renamed() -> None:
    listed = {arch.device for name in NAMED_LISTS if "Tegra" in name for arch in _archs(name)}
    assert listed < {Device(*version) for version in INTEGRATED}
    others = {Device(*version) for version in INTEGRATED} - listed
    unlisted = [str(device) for device in sorted(others)]
    assert unlisted == ["6.2", "10.1"], "integrated, and in no list that torch names: write it here"


def _archs(name: str) -> tuple[Arch, ...]:
    return ArchSet.parse(name).archs


def test_products_are_those_that_the_newest_toolkit_serves() -> None:
    newest = {arch.device.version for arch in TOOLKIT_ARCHS[max(TOOLKIT_ARCHS, key=parse_version)]}
    assert {chip.version for chip in SOLD} <= newest
    arm_only = [str(chip) for chip in SOLD if chip.arm_only]
    assert arm_only == ["8.7", "11.0", "12.1"], "sold, and on Arm machines only: write it here"
