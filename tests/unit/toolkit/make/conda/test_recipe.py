"""Conda metadata of a wheel: GPUs, driver, dependencies, build string and number."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.builds.conda_solver import constrain_gpus, map_dependencies, oldest_cuda
from flash_dist.toolkit.builds.manifest import ToolkitInfo
from flash_dist.toolkit.builds.metadata import parse_metadata
from flash_dist.toolkit.builds.published import load_archsets, load_picks, published_sets
from flash_dist.toolkit.errors import AuditError
from flash_dist.toolkit.make.conda.recipe import make_recipe, rank_set
from flash_dist.toolkit.make.wheels.artefacts import find_artefacts
from flash_dist.toolkit.targets.archs import ArchSet
from flash_dist.toolkit.targets.compatibility import judge
from flash_dist.toolkit.targets.devices import KNOWN_DEVICES, Device
from flash_dist.toolkit.targets.verdict import FLOOR
from tests.unit.made.builds import ALL, BLACKWELL, HOPPER, TURING_AMPERE_ADA
from tests.unit.made.wheels import write_dist, write_wheel
from tests.unit.toolkit.builds.test_manifest import make_manifest

if TYPE_CHECKING:
    from pathlib import Path

METADATA = "Metadata-Version: 2.4\nName: flash_dist\nVersion: 0.1.0\nRequires-Python: >=3.10\n"


def allows(constraint: str, device: Device) -> bool:
    """Return whether conda finds that a GPU meets a constraint; `a0` is just before a version."""
    for part in constraint.split("|"):
        low, _, high = part.partition(",")
        assert low.startswith(">=")
        above = device >= Device.parse(low[2:])
        if above and (not high or device < Device.parse(high[1:].removesuffix("a0"))):
            return True
    return False


@pytest.mark.parametrize(
    ("archs", "constraint"),
    [
        (TURING_AMPERE_ADA, ">=7.5,<8.7a0|>=8.8"),  # not 8.7, a Jetson: NVIDIA does not promise it
        (HOPPER, ">=9.0,<9.1a0"),
        (BLACKWELL, ">=10.0,<10.1a0|>=10.2,<11.0a0|>=12.0,<13.0a0"),  # 10.1 is the old name of 11.0
        (ALL, ">=7.5"),
        ("9.0a;12.0", ">=9.0,<9.1a0|>=12.0,<13.0a0"),
        ("10.0f;12.0f", ">=10.0,<10.1a0|>=10.3,<10.4a0|>=10.7,<10.8a0|>=12.0,<12.2a0"),
        ("11.0", ">=10.1,<10.2a0|>=11.0,<11.1a0"),
        ("8.7", ">=8.7,<8.8a0"),
        ("compute_90a", ">=9.0,<9.1a0"),
        ("7.0+PTX", ">=7.5"),  # our kernels need 7.5
    ],
)
def test_the_gpus_are_those_that_the_targets_serve(archs: str, constraint: str) -> None:
    assert constrain_gpus(ArchSet.parse(archs).archs) == constraint


@pytest.mark.parametrize("archset", published_sets(), ids=lambda one: one.name)
def test_the_constraint_of_a_published_set_says_what_the_rule_says(archset: ArchSet) -> None:
    constraint = constrain_gpus(archset.archs)
    for device in (*KNOWN_DEVICES, Device(9, 5), Device(13, 0), Device(20, 1)):
        served = device >= FLOOR and any(judge(arch, device) for arch in archset.archs)
        assert allows(constraint, device) == served, device


def test_code_that_serves_no_gpu_is_refused() -> None:
    with pytest.raises(AuditError, match="no GPU is served by sm_60"):
        constrain_gpus(ArchSet.parse("6.0").archs)


@pytest.mark.parametrize(
    ("toolkit", "driver", "flags", "cuda"),
    [
        ("13.0", "580", ("--compress-mode=size",), "13.0"),
        ("12.4", "525", (), "12.0"),
        ("12.4", "525", ("--compress-mode=size",), "12.4"),  # zstd: driver 550
        ("12.4", "550", (), "12.4"),
    ],
)
def test_the_driver_is_the_oldest_that_loads_the_code(
    toolkit: str, driver: str, flags: tuple[str, ...], cuda: str
) -> None:
    manifest = make_manifest("9.0a", flags=flags)
    info = ToolkitInfo(toolkit, f"{toolkit}.1", f"{toolkit}.1", driver, "8.4")
    assert oldest_cuda(replace(manifest, toolkit=info)) == cuda


def test_the_pick_outranks_every_set_and_no_two_have_one_number() -> None:
    archsets, pick = load_archsets(), load_picks()["conda"]
    numbers = {
        one.name: rank_set(one.label, one.toolkit, archsets.values(), pick)
        for one in archsets.values()
    }
    assert sorted(numbers.values()) == list(range(1, len(archsets) + 1))
    assert max(numbers, key=lambda name: numbers[name]) == pick.name
    assert rank_set("sm75.sm86", "13.0", archsets.values(), pick) == 0
    assert rank_set("hopper", "12.4", [archsets["hopper"]], pick) == 0  # it has another toolkit


def test_a_newer_toolkit_outranks_an_older_one_for_the_same_gpus() -> None:
    new = published_sets()[1]
    old = replace(new, toolkit="12.4")
    pick = load_picks()["conda"]
    ranks = [rank_set(one.label, one.toolkit, [old, new], pick) for one in (old, new)]
    assert ranks == [1, 2]


def needs(*lines: str) -> tuple[str, ...]:
    text = METADATA + "".join(f"Requires-Dist: {line}\n" for line in lines)
    return map_dependencies(parse_metadata(text.encode(), "a.whl"), "x86_64")


def test_dependencies_have_the_names_of_conda() -> None:
    assert needs(
        "torch>=2.10",
        "nvidia-cuda-runtime-cu12>=12.4,<13",
        "packaging",
        "Rich>=13,<15",
        "numpy==2.*",
        'backports.zstd; python_version < "3.14"',
        'tomli; python_version < "3.10"',
        'pytest; extra == "test"',
        'pywin32; sys_platform == "win32"',
    ) == (
        "python >=3.10",
        "pytorch >=2.10",
        "cuda-cudart <13,>=12.4",
        "packaging",
        "rich <15,>=13",
        "numpy 2.*",
        "backports.zstd",
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('tomli; python_version < "3.11"', r"is for\s3.10 alone"),
        ("torch @ https://example.org/torch.whl", "no word for the dependency"),
        ("torch[all]", "no word for the dependency"),
        ("torch===2.10", "no word for the versions `===2.10`"),
        ("torch==2.10+cu130", "no word for the versions"),
    ],
)
def test_requirements_that_conda_cannot_express_are_refused(line: str, words: str) -> None:
    with pytest.raises(AuditError, match=words):
        needs(line)


def test_a_wheel_that_says_no_python_is_refused() -> None:
    with pytest.raises(AuditError, match="which Pythons"):
        map_dependencies(parse_metadata(b"Name: a\nVersion: 1\n", "a.whl"), "x86_64")


def test_recipes_of_the_published_sets_name_set_toolkit_and_platform(tmp_path: Path) -> None:
    archsets, pick = load_archsets(), load_picks()["conda"]
    artefacts = find_artefacts(write_dist(tmp_path))
    recipes = {one.set_name: make_recipe(one, archsets, pick) for one in artefacts}
    hopper = recipes["hopper"]
    number = rank_set("hopper", "13.0", archsets.values(), pick)
    assert hopper.path == f"linux-64/flash-dist-0.1.0-cuda130_hopper_{number}.conda"
    assert hopper.depends == ("python >=3.10", "__glibc >=2.34", "__cuda >=13.0")
    assert hopper.constrains == ("__cuda_arch >=9.0,<9.1a0",)


@pytest.mark.parametrize(
    ("tags", "subdir"),
    [
        ("py3-none-manylinux_2_28_aarch64", "linux-aarch64"),
        ("py3-none-manylinux_2_27_x86_64.manylinux_2_28_x86_64", "linux-64"),
        ("py3-none-linux_x86_64", ""),
        ("cp310-cp310-manylinux_2_28_x86_64", ""),
    ],
)
def test_the_platform_is_that_of_the_tag(tags: str, subdir: str, tmp_path: Path) -> None:
    custom = ArchSet.parse("7.5;8.6")
    write_wheel(tmp_path / "one", custom, tags=tags)
    (one,) = find_artefacts(tmp_path)
    archsets, pick = load_archsets(), load_picks()["conda"]
    if not subdir:
        with pytest.raises(AuditError, match="is made of a wheel tagged"):
            make_recipe(one, archsets, pick)
        return
    recipe = make_recipe(one, archsets, pick)
    assert recipe.subdir == subdir
    assert recipe.build == "cuda130_sm75_sm86_0"
    assert f"__glibc >={'2.27' if '2_27' in tags else '2.28'}" in recipe.depends
