"""The keys stand_ins and leaves_half_filled of csrc/kernels.toml: every reader follows them."""

from __future__ import annotations

import json
from itertools import product
from typing import TYPE_CHECKING, Final

import pytest

from ci.places import TABLE, read_table
from flash_dist.errors import FlashDistError
from flash_dist.toolkit.make.kernels.generate import generate
from flash_dist.toolkit.make.kernels.table import Table
from flash_dist.toolkit.targets.archs import ArchSet
from flash_dist.toolkit.targets.axes import KernelKey
from flash_dist.toolkit.targets.devices import Device
from flash_dist.toolkit.targets.fallbacks import Fallbacks
from flash_dist.toolkit.targets.verdict import (
    NO_OPT_IN,
    Situation,
    judge_device,
    judge_kernel,
    variants_meant,
)
from tests.unit.made.builds import make_table_build
from tests.unit.made.planner import compile_program, plan_backward

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Plant = Callable[[str, str], Table]

HOPPER: Final = Device(9, 0)
STAND_INS: Final = 'bwd_fused = ["bwd_dkdv", "bwd_dq_recompute"]'
LEAVES: Final = "leaves_half_filled = true\n"


@pytest.fixture
def plant(tmp_path: Path) -> Plant:
    """Return the table of kernels with one change."""

    def load(old: str, new: str) -> Table:
        text = TABLE.read_text(encoding="utf-8")
        assert old in text
        path = tmp_path / "kernels.toml"
        own = f'own_headers = "{TABLE.parent / "headers.py"}"'
        text = text.replace(old, new).replace('own_headers = "headers.py"', own)
        path.write_text(text, encoding="utf-8")
        return Table.load(path)

    return load


def without_leaves(launch: str) -> tuple[str, str]:
    """Return the change that removes the key from the family with this `refuses` function."""
    return f'refuses = "{launch}"\n{LEAVES}', f'refuses = "{launch}"\n'


def family_for(table: Table, role: str, head_dim: int) -> str | None:
    """Return the family that serves a role on an H100."""
    key = KernelKey(role, ("bf16",), (head_dim, head_dim))
    variant = judge_kernel(key, make_table_build(table), Situation(HOPPER)).variant
    return variant.family if variant else None


def roles_without_opt_in(table: Table) -> set[str]:
    """Return the roles that doctor judges on an H100 with at most 48 KB per block."""
    verdict = judge_device(make_table_build(table), Situation(HOPPER, smem_limit=NO_OPT_IN))
    return {kernel.key.role for kernel in verdict.kernels}


def test_families_leave_half_filled_calls_by_their_key(plant: Plant) -> None:
    real = read_table()
    planted = plant(*without_leaves("refuse_dq_gemm_sm90"))
    for head_dim, family in ((32, "bwd_dq_gemm"), (48, "bwd_dq_gemm_sm90")):
        assert family_for(real, "bwd_dq_gemm", head_dim) == family
        assert family_for(planted, "bwd_dq_gemm", head_dim) == "bwd_dq_gemm_sm90"


@pytest.mark.parametrize("head_dim", [256, 264, 384, 392, 512])
def test_large_head_dims_use_wgmma(head_dim: int) -> None:
    for role in ("fwd", "bwd_dkdv", "bwd_dq_gemm"):
        assert family_for(read_table(), role, head_dim) == f"{role}_sm90"


def test_roles_with_stand_ins_need_not_run(plant: Plant) -> None:
    others = roles_without_opt_in(read_table())
    assert "bwd_fused" not in others
    assert "bwd_dq_gemm" in others
    planted = plant(STAND_INS, f'{STAND_INS}\nbwd_dq_gemm = ["bwd_dq_recompute"]')
    assert roles_without_opt_in(planted) == others - {"bwd_dq_gemm"}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (STAND_INS, "", "bwd_fused_sm90 leaves calls to bwd_fused, which has no general family"),
        (STAND_INS, 'bwd_fused = ["nothing"]', "bwd_fused_sm90 leaves calls to nothing, which has"),
        (
            '"FusedSm90Config"\n',
            f'"FusedSm90Config"\n{LEAVES}',
            "bwd_fused_sm90 leaves calls to bwd_fused, which has no general family",
        ),
        (
            'launch = "launch_whole"\n',
            f'launch = "launch_whole"\n{LEAVES}',
            "bwd_whole leaves calls to bwd_whole, which has no general family",
        ),
    ],
)
def test_calls_are_left_to_general_families(plant: Plant, old: str, new: str, said: str) -> None:
    with pytest.raises(FlashDistError, match=said):
        plant(old, new)


def test_cpp_and_the_manifest_get_the_same_facts(plant: Plant, tmp_path: Path) -> None:
    for table in (read_table(), plant(*without_leaves("refuse_decode_sm90"))):
        generate(table.only([32], ["bf16"]), ArchSet.parse("9.0a").archs, [], tmp_path)
        data = json.loads((tmp_path / "fallbacks.json").read_text(encoding="utf-8"))
        assert Fallbacks.from_json(data) == table.fallbacks
        told = [
            f"static_assert({function}({kind}::{name.upper()}) == {str(name in true_for).lower()});"
            for function, kind, names, true_for in (
                ("has_stand_ins", "Role", table.roles, table.fallbacks.stand_ins),
                ("leaves_half_filled", "Family", table.names, table.fallbacks.leaves_half_filled),
            )
            for name in names
        ]
        lines = ['#include "roles.h"', "using namespace flash_dist;", *told, "int main() {}"]
        compile_program(tmp_path, "\n".join(lines))


def test_builds_that_do_not_state_the_facts_are_judged_alike() -> None:
    table = read_table().only([32, 64, 128], ["bf16"])
    stated = make_table_build(table, "8.0;9.0a")
    silent = make_table_build(table, "8.0;9.0a", stated=False)
    assert silent.told_fallbacks is None
    for device, smem in ((HOPPER, 0), (HOPPER, NO_OPT_IN), (Device(8, 0), 0)):
        there = Situation(device, smem_limit=smem)
        assert judge_device(stated, there) == judge_device(silent, there)
    for role, head_dim in product(table.roles, (8, 32, 64)):
        key = KernelKey(role, ("bf16",), (head_dim, head_dim))
        assert variants_meant(key, stated) == variants_meant(key, silent)


def test_the_planner_launches_the_stand_ins() -> None:
    shape = {"batch": 1, "seqlen_q": 1024, "seqlen_k": 1024, "num_heads_kv": 16, "group": 1}
    made = plan_backward(
        **shape, head_dim=128, mask=(0, -1, -1, 1), budget=0, sm_count=132, key_tile=64,
        blocks_per_sm=2,
    )  # fmt: skip
    launched = [step["role"] for step in made["steps"]]
    assert launched == ["bwd_delta", *read_table().fallbacks.stand_ins["bwd_fused"]]


def test_the_facts_round_trip() -> None:
    facts = read_table().fallbacks
    assert Fallbacks.from_json(facts.to_json()) == facts
    assert (
        Fallbacks.infer({one.name: one.role for one in read_table().families}).leaves_half_filled
        == facts.leaves_half_filled
    )
