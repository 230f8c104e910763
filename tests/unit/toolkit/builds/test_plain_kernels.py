"""Kernels of plain files, which no table lists: the manifest names their files."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.audit.own import audit_contents
from flash_dist.toolkit.builds.contents import OWN, Naming, find_naming
from flash_dist.toolkit.builds.linkage import expected_linkage
from flash_dist.toolkit.builds.manifest import KernelRecord, Manifest, declare_build
from flash_dist.toolkit.machine.installed import read_embedded
from flash_dist.toolkit.targets.archs import Arch
from flash_dist.toolkit.targets.axes import NOWHERE, is_plain
from flash_dist.toolkit.targets.devices import Device
from flash_dist.toolkit.targets.verdict import Situation, judge_device
from tests.unit.made.fatbin_builder import PTX, SASS, Kernel, container, cubin, entry, library, ptx
from tests.unit.toolkit.audit.test_own import make_contents
from tests.unit.toolkit.builds.test_manifest import make_manifest

if TYPE_CHECKING:
    from pathlib import Path

SCALE, FAST = "_Z12scale_kernelPKfPf", "_Z11fast_kernelPf"


def record(symbol: str, family: str, target: str) -> KernelRecord:
    ptx = target.startswith("compute")
    number = None if ptx else 32
    return KernelRecord(
        symbol, family, NOWHERE, Arch.parse(target), number, number and 0, number and 0,
        number and 0, 0, None, "assembled", source="scale.cu", role=family.partition("_")[0],
    )  # fmt: skip


def make_plain(*records: KernelRecord, archs: str = "8.0+PTX;9.0a") -> Manifest:
    made = make_manifest(archs, kernels=records)
    return replace(made, product="my_norms", libraries=("_C.so",))


PLAIN = make_plain(
    record(SCALE, "scale", "sm_80"),
    record(SCALE, "scale", "compute_80"),
    record(SCALE, "scale", "sm_90a"),
    record(FAST, "fast_sm90", "sm_90a"),
)


def test_the_manifest_round_trips() -> None:
    again = Manifest.from_text(PLAIN.to_text(), source="_build.json")
    assert again == PLAIN
    assert all(is_plain(one.key) for one in declare_build(again).variants)


@pytest.mark.parametrize(
    ("device", "roles"), [("8.6", {"scale"}), ("9.0", {"scale", "fast"}), ("12.0", {"scale"})]
)
def test_a_file_for_some_targets_is_expected_on_their_gpus_alone(
    device: str, roles: set[str]
) -> None:
    verdict = judge_device(declare_build(PLAIN), Situation(Device.parse(device)))
    assert verdict
    assert {one.key.role for one in verdict.kernels} == roles
    assert verdict.how == {"8.6": "same-major", "9.0": "native", "12.0": "jit"}[device]


def test_kernels_of_files_are_counted_and_not_their_files() -> None:
    build = declare_build(PLAIN)
    assert build.counts == "2 kernels of 2 files"
    listed = declare_build(make_manifest("9.0a"))
    both = replace(build, variants=(*listed.variants, *build.variants))
    assert both.counts == f"{listed.counts} and 2 kernels of 2 files"


def test_a_gpu_that_no_file_has_code_for_is_refused() -> None:
    verdict = judge_device(declare_build(PLAIN), Situation(Device.parse("7.5")))
    assert (bool(verdict), verdict.cause) == (False, "no-matching-code")


def test_the_library_is_read_by_the_files_of_the_manifest(tmp_path: Path) -> None:
    path = tmp_path / "_C.so"
    images = (
        entry(SASS, 80, cubin(Kernel(SCALE))),
        entry(PTX, 80, ptx(SCALE)),
        entry(SASS, 90, cubin(Kernel(SCALE), Kernel(FAST)), suffix="a"),
        entry(SASS, 90, cubin(Kernel("_Z5otherv")), suffix="a"),
    )
    path.write_bytes(library(container(*images)))
    found = read_embedded(path, "13.0", PLAIN)
    assert [(one.symbol, one.key.role, str(one.arch)) for one in found] == [
        (FAST, "fast", "sm_90a"),
        (SCALE, "scale", "sm_80"),
        (SCALE, "scale", "compute_80"),
        (SCALE, "scale", "sm_90a"),
    ]
    assert read_embedded(path, "13.0") == ()


def test_one_kernel_that_is_declared_twice_for_a_target_is_a_finding() -> None:
    twice = replace(PLAIN, kernels=(*PLAIN.kernels, PLAIN.kernels[0]))
    contents = replace(make_contents(), manifest=twice)
    assert f"{SCALE} is declared 2 times for sm_80" in map(str, audit_contents(contents).problems)


def test_a_package_of_plain_files_links_torch_and_the_cuda_runtime() -> None:
    linkage = expected_linkage(PLAIN)
    needs = linkage.needs("_C.so", PLAIN, kernels=True)
    assert needs == {"libtorch.so", "libtorch_cpu.so"}
    assert linkage.path("_C.so", kernels=True) == ("$ORIGIN",)
    older = replace(PLAIN, toolkit=replace(PLAIN.toolkit, cuda="12.4"))
    linkage = expected_linkage(older)
    assert "libcudart.so.12" in linkage.needs("_C.so", older, kernels=True)
    assert linkage.path("_C.so", kernels=True)[0] == "$ORIGIN"
    assert "libcudart.so.12" not in linkage.needs("_C.so", older, kernels=False)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["flash_dist/_build.json"], OWN),
        (["flash_dist/__init__.py"], OWN),
        (["my_norms/_build.json", "my_norms/__init__.py"], Naming("my_norms")),
        (["my_norms/__init__.py"], None),
        (["one/_build.json", "two/_build.json"], None),
        (["my_norms/data/_build.json"], None),
        (["../_build.json"], None),
        (["flash_dist/_build.json", "my_norms/_build.json"], OWN),
    ],
    ids=["own", "own, broken", "other", "none", "two", "deeper", "outside", "own and other"],
)
def test_a_wheel_is_named_by_the_record_of_its_build(
    names: list[str], found: Naming | None
) -> None:
    assert find_naming(names) == found
