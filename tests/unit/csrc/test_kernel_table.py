"""csrc/kernels.toml: its kernels for every target, published or not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Final

import pytest

from ci.places import read_table
from flash_dist.attention.layouts import GENERAL_HEAD_DIM, MAX_HEAD_DIM
from flash_dist.toolkit.builds.published import load_archsets, published_sets
from flash_dist.toolkit.make.project import load_project
from flash_dist.toolkit.targets.archs import TOOLKIT_ARCHS, ArchSet, own_targets
from flash_dist.toolkit.targets.compatibility import judge
from flash_dist.toolkit.targets.devices import KNOWN_DEVICES, Device, parse_version
from flash_dist.toolkit.targets.verdict import FLOORS, Situation, judge_device
from tests.unit.made.builds import make_table_build

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from flash_dist.toolkit.make.kernels.table import Variant
    from flash_dist.toolkit.targets.archs import Arch

Size = tuple[int, ...]  # head_dim, head_dim_v

HALF_SIZES: Final = [
    *((d, d) for d in (32, 64, 96, 128, 160, 192, 224, 256, 384, 512)),
    (192, 128),
]
LARGEST_ON_TURING: Final = 256
FIRST_LARGE: Final = 80  # the first target with larger sizes
SINGLE_SIZES: Final = [(d, d) for d in (64, 128, 256)]
SIZES: Final = {
    "fp16": HALF_SIZES,
    "bf16": HALF_SIZES,
    "fp32": SINGLE_SIZES,
    "ieee32": SINGLE_SIZES,
}
ARCHSETS: Final = load_archsets()
TARGETS: Final = sorted({arch for archset in ARCHSETS.values() for arch in archset.archs})
NEWEST: Final = max(TOOLKIT_ARCHS, key=parse_version)
COMPILABLE: Final = sorted(
    x for arch in TOOLKIT_ARCHS[NEWEST] for x in (arch, replace(arch, ptx=True))
)
TABLE: Final = read_table()


@cache
def variants_of(target: Arch) -> list[Variant]:
    return TABLE.variants(target)


def launched_for(size: Size, dtype: str) -> Iterator[tuple[str, Size]]:
    """Yield the kernels of a forward and a backward, each with the requested size."""
    head_dim, head_dim_v = size
    yield "fwd", size
    yield "bwd_dkdv", size
    yield "bwd_dq_recompute", size
    if dtype in {"fp16", "bf16"}:
        yield "bwd_dq_gemm", size
    if dtype == "ieee32":  # kernels without a product use fp32's
        return
    yield "bwd_delta", (head_dim_v, head_dim_v)
    yield "bwd_reduce", (head_dim, head_dim)
    yield "bwd_reduce", (head_dim_v, head_dim_v)


def smallest_holding(size: Size, compiled: Collection[Size]) -> Size:
    """Return the compiled size with the fewest columns in total, then of v, as the dispatcher."""
    holding = [x for x in compiled if x[0] >= size[0] and x[1] >= size[1]]
    return min(holding, key=lambda x: (sum(x), x[1]))


def plans_for(target: Arch, family: str, dtype: str, size: Size) -> dict[Size, list[int]]:
    """Return the size that serves a kernel, and its plans for a target."""
    mine = [v for v in variants_of(target) if (v.family.name, v.words[0]) == (family, dtype)]
    chosen = smallest_holding(size, {v.row.sizes for v in mine})
    return {chosen: [v.row.plan for v in mine if v.row.sizes == chosen]}


@pytest.mark.parametrize("target", COMPILABLE, ids=str)
def test_every_kernel_has_a_row_that_fits_every_device_that_runs_the_target(target: Arch) -> None:
    devices = [device for device in KNOWN_DEVICES if judge(target, device)]
    assert devices
    room = min(device.smem_optin for device in devices)
    for dtype, first in FLOORS.items():
        if target.number < first.number:
            continue
        for size in SIZES[dtype]:
            if target.number < FIRST_LARGE and size[0] > LARGEST_ON_TURING:
                continue
            for family, asked in launched_for(size, dtype):
                ((_, plans),) = plans_for(target, family, dtype, asked).items()
                fitting = [plan for plan in plans if TABLE.smem_plans[plan] <= room]
                assert fitting, f"{family} {dtype} {asked}: plans {plans} of {room} bytes"


@pytest.mark.parametrize("dtype", SIZES)
def test_kernels_that_share_a_workspace_are_of_one_size(dtype: str) -> None:
    target = TARGETS[-1]
    for size in SIZES[dtype]:
        for family, asked in launched_for(size, dtype):
            ((chosen, _),) = plans_for(target, family, dtype, asked).items()
            assert chosen[0] == asked[0], f"{family} {size}"
            if family in {"fwd", "bwd_dkdv"}:
                assert chosen == size


@pytest.mark.parametrize("dtype", SIZES)
def test_every_head_dim_is_served(dtype: str) -> None:
    compiled = set(SIZES[dtype])
    most = MAX_HEAD_DIM if dtype in {"fp16", "bf16"} else GENERAL_HEAD_DIM
    for head_dim in range(8, most + 1, 8):
        assert smallest_holding((head_dim, head_dim), compiled)[0] >= head_dim
    listed = {
        row.sizes
        for family in TABLE.families
        if family.name == "fwd" and (dtype,) in family.words
        for row in family.rows
    }
    assert listed == compiled


@pytest.mark.parametrize(
    "target",
    [x for x in TARGETS if x.number >= 80 and (x.ptx or x.number == 80)],
    ids=str,
)
def test_code_that_runs_on_an_a100_and_on_smaller_parts_has_the_plans_of_both(target: Arch) -> None:
    for dtype in SIZES:
        for family in TABLE.families:
            if (dtype,) not in family.words or not family.serves(target):
                continue
            for row in family.rows:
                plans = [r.plan for r in family.rows if r.sizes == row.sizes and r.plan <= 99]
                expected = row.plan in {max(plans), 163}
                found = any(
                    v.family is family and v.words[0] == dtype and v.row == row
                    for v in variants_of(target)
                )
                assert found or not expected, f"{family.name} {dtype} {row.sizes} plan {row.plan}"


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_no_target_carries_a_plan_that_none_of_its_devices_would_take(target: Arch) -> None:
    rooms = {device.smem_optin for device in KNOWN_DEVICES if judge(target, device)}
    for variant in variants_of(target):
        if variant.family.refuses or variant.row.kept_for == target.number:
            continue  # a larger plan may refuse calls; the table explains kept_for
        same = [
            TABLE.smem_plans[v.row.plan]
            for v in variants_of(target)
            if (v.family, v.key) == (variant.family, variant.key)
        ]
        taken = {max((size for size in same if size <= room), default=None) for room in rooms}
        assert TABLE.smem_plans[variant.row.plan] in taken, variant.symbol


def test_a_build_for_tests_carries_every_plan_of_the_test_machine() -> None:
    (target,) = ArchSet.parse("9.0a").archs
    rows = {(v.family.name, v.row) for v in replace(TABLE, every_plan=True).variants(target)}
    served = [family for family in TABLE.families if family.serves(target)]
    assert rows == {(family.name, row) for family in served for row in family.rows}


def test_every_family_for_all_targets_has_a_row_for_its_smallest_gpus() -> None:
    for family in TABLE.families:
        for_turing = any(FLOORS[dtype] == Device(7, 5) for (dtype,) in family.words)
        for size in {row.sizes for row in family.rows}:
            room = TABLE.smem_plans[64 if for_turing and size[0] <= LARGEST_ON_TURING else 99]
            plans = [row.plan for row in family.rows if row.sizes == size]
            assert len(plans) == len(set(plans)), f"{family.name} {size}: two rows of one plan"
            least = min(TABLE.smem_plans[plan] for plan in plans)
            assert family.targets or least <= room, f"{family.name} {size}: no plan of {room}"


def test_kernels_of_ieee32_are_compiled_apart_and_change_no_code_of_others() -> None:
    (target,) = ArchSet.parse("9.0a").archs
    files: dict[str, set[bool]] = {}
    for variant in TABLE.variants(target):
        files.setdefault(variant.source, set()).add(variant.words[0] == "ieee32")
    assert all(len(kinds) == 1 for kinds in files.values())
    assert {True} in files.values()


def test_what_is_published_is_among_the_targets_that_the_toolkit_compiles() -> None:
    assert set(TARGETS) <= set(COMPILABLE)
    assert {"sm_88", "compute_88", "sm_110", "sm_90a", "compute_90a"} <= set(map(str, COMPILABLE))


def test_the_targets_with_families_of_their_own_are_published_ones() -> None:
    own = {target for family in TABLE.families for target in family.targets if not target.ptx}
    assert own == set(own_targets(published_sets())) == set(load_project().own_targets)


@pytest.mark.parametrize("archset", ARCHSETS.values(), ids=list(ARCHSETS))
def test_every_gpu_of_a_set_has_each_kernel_that_it_has_room_for(archset: ArchSet) -> None:
    build = make_table_build(read_table(), str(archset))
    served = [one for one in KNOWN_DEVICES if any(judge(arch, one) for arch in archset.archs)]
    assert served
    for device in served:
        verdict = judge_device(build, Situation(device))
        assert verdict, f"{device}: {verdict.reason}"


def test_turing_is_told_which_head_dims_it_has_no_room_for() -> None:
    verdict = judge_device(
        make_table_build(read_table(), "7.5;8.0"), Situation(Device.parse("7.5"))
    )
    lacking = {
        one.key.sizes[0]: one.reason
        for one in verdict.kernels
        if not one.variant and one.key.role != "max_logit"  # max_logit takes 64 columns at a time
    }
    assert lacking[512] == "head_dim 512 needs compute capability 8.0 or newer, not 7.5"
    larger = {size for size, reason in lacking.items() if "head_dim" in reason}
    assert larger == {384, 512}
