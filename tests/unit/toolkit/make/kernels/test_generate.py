from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ci.places import read_table
from flash_dist.toolkit.errors import KernelsError
from flash_dist.toolkit.make.kernels.generate import generate, render_own_plans, render_plans
from flash_dist.toolkit.make.kernels.table import Row, Table
from flash_dist.toolkit.targets.archs import Arch, ArchSet
from flash_dist.toolkit.targets.devices import Device
from flash_dist.toolkit.targets.verdict import Situation, judge_kernel
from tests.unit.made.builds import make_table_build

if TYPE_CHECKING:
    from pathlib import Path

TABLE = """
[defaults]
dtype = ["fp16", "bf16"]
[smem_plans]
0 = 49152
64 = 65536
99 = 101376
163 = 166912
[[family]]
name = "fwd"
header = "mma/fwd/launch.h"
config = "FwdConfig"
kernel = "fwd_block"
params = "FwdParams"
launch = "launch_fwd"
rows = [
  { head_dim = 64, plan = 64, warps = 4 },
  { head_dim = 128, plan = 163, warps = 8, block_n = 32 },
]
[[family]]
name = "fwd"
header = "f32/fwd/launch.h"
config = "F32FwdConfig"
kernel = "f32_fwd_block"
params = "FwdParams"
launch = "launch_f32_fwd"
dtype = ["fp32"]
rows = [
  { head_dim = 192, head_dim_v = 128, plan = 99, warps = 4 },
]
[[family]]
name = "delta"
header = "mma/bwd/delta.h"
config = "DeltaConfig"
kernel = "delta_block"
params = "DeltaParams"
launch = "launch_delta"
rows = [
  { head_dim = 64, plan = 0, warps = 8 },
]
"""


@pytest.fixture
def table(tmp_path: Path) -> Table:
    path = tmp_path / "kernels.toml"
    path.write_text(TABLE)
    return Table.load(path)


HALF = "fwd_fp16_d64_smem64 fwd_bf16_d64_smem64 delta_fp16_d64 delta_bf16_d64"
OF_163_KB = "fwd_fp16_d128_smem163 fwd_bf16_d128_smem163"


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("sm_75", "fwd_fp16_d64_smem64 delta_fp16_d64"),
        ("sm_86", f"{HALF} fwd_fp32_d192v128_smem99"),
        ("compute_80", f"{HALF} fwd_fp32_d192v128_smem99 {OF_163_KB}"),
    ],
    ids=["no bf16 and 64 KB", "99 KB", "PTX, 163 KB"],
)
def test_a_target_gets_its_dtypes_and_the_plans_it_has_room_for(
    table: Table, target: str, expected: str
) -> None:
    symbols = {variant.symbol for variant in table.variants(Arch.parse(target))}
    suffix = target.replace("_", "")
    assert symbols == {f"flash_dist_{name}_{suffix}" for name in expected.split()}


def test_every_variant_of_the_real_table_has_a_symbol_of_its_own() -> None:
    real = read_table()
    archs = ArchSet.parse("7.5;8.0+PTX;9.0a;9.0;10.0f;12.0+PTX").archs
    symbols = [variant.symbol for arch in archs for variant in real.variants(arch)]
    assert len(symbols) == len(set(symbols))
    assert all(re.fullmatch(r"flash_dist_[a-z0-9_]+", symbol) for symbol in symbols)


def test_ptx_files_hold_one_kernel_and_sass_files_one_family(table: Table, tmp_path: Path) -> None:
    generate(table, ArchSet.parse("8.0+PTX").archs, [], tmp_path)
    kernels = {
        path.relative_to(tmp_path): path.read_text().count("__global__")
        for path in tmp_path.rglob("*.cu")
    }
    ptx = {path: count for path, count in kernels.items() if "compute_80" in path.parts}
    sass = {path.name: count for path, count in kernels.items() if "sm_80" in path.parts}
    assert len(ptx) == 7
    assert set(ptx.values()) == {1}
    assert sass == {"fwd.cu": 5, "delta.cu": 2}


def test_sources_that_nothing_needs_any_more_are_removed(table: Table, tmp_path: Path) -> None:
    archs = ArchSet.parse("9.0a").archs
    generate(table, archs, [], tmp_path)
    before = sorted(tmp_path.rglob("*.cu"))
    before[0].with_name("gone.cu").touch()
    generate(table, archs, [], tmp_path)
    assert sorted(tmp_path.rglob("*.cu")) == before


def test_the_target_is_a_template_argument_of_kernel_and_launcher(
    table: Table, tmp_path: Path
) -> None:
    generate(table, ArchSet.parse("9.0a").archs, [], tmp_path)
    text = (tmp_path / "targets" / "sm_90a" / "delta.cu").read_text()
    assert "DeltaConfig<Target<90, 'a', Code::SASS>, Fp16, 64, 64, 0>" in text
    assert "launch_delta<flash_dist_delta_fp16_d64_sm90a_config>" in text
    assert "__CUDA_ARCH__" not in text
    assert "namespace {" not in text


def test_plans_hold_every_further_key_of_a_row(table: Table) -> None:
    text = render_plans(table)
    assert "static constexpr int WARPS = 8; static constexpr int BLOCK_N = 32;" in text
    assert "template <> struct FwdPlan<128, 128, 163>" in text
    assert "template <> struct F32FwdPlan<192, 128, 99>" in text
    assert "if (plan == 163) return 166912;" in text


def test_a_family_may_have_a_header_of_its_own_for_its_plans(table: Table) -> None:
    own = replace(table.families[0], name="own", config="OwnConfig", plans="own_plans.h")
    both = replace(table, families=(*table.families, own))
    assert render_plans(both) == render_plans(table)
    text = render_own_plans(both, "own_plans.h")
    assert text.count("template <> struct OwnPlan<") == len(own.rows)
    assert text.count("template <> struct") == len(own.rows)


def test_the_dispatchers_table_lists_only_what_is_linked(table: Table, tmp_path: Path) -> None:
    linked, other = ArchSet.parse("7.5").archs, ArchSet.parse("9.0a").archs
    generate(table, linked, other, tmp_path)
    lines = (tmp_path / "variants.inc").read_text().splitlines()
    assert [line.removeprefix("KERNEL_VARIANT(flash_dist_") for line in lines] == [
        r"fwd_fp16_d64_smem64_sm75, FWD, FWD, 0, 64, 75, '\0', 0, 0, 64, 64)",
        r"delta_fp16_d64_sm75, DELTA, DELTA, 0, 0, 75, '\0', 0, 0, 64, 64)",
    ]
    data = json.loads((tmp_path / "variants.json").read_text())
    assert [entry["target"] for entry in data] == ["sm_75", "sm_75"]
    assert (tmp_path / "targets" / "sm_90a" / "fwd.cu").is_file()
    assert "OTHER_TARGETS sm_90a" in (tmp_path / "sources.cmake").read_text()


def test_an_unchanged_file_keeps_its_time_stamp(table: Table, tmp_path: Path) -> None:
    archs = ArchSet.parse("7.5").archs
    generate(table, archs, [], tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}
    generate(table, archs, [], tmp_path)
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}


def test_a_debug_build_keeps_one_head_dim_and_dtype(table: Table) -> None:
    target = Arch.parse("sm_80")
    kept = table.only([128], ["fp16"]).variants(target)
    assert {(v.row.sizes[0], v.words[0]) for v in kept} == {(128, "fp16")}
    assert table.only([], []).variants(target) == table.variants(target)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_debug_build_can_make_every_call_of_its_head_dim(head_dim: int) -> None:
    target = Arch.parse("sm_80")
    kept = read_table().only([head_dim], ["bf16"]).variants(target)
    roles = {v.family.role for v in kept}
    assert {"fwd", "bwd_dkdv", "decode", "decode_fold", "append"} <= roles
    # These roles have one kernel for every head_dim, or for several.
    of_all = {"decode_fold", "append", "bwd_bias", "bwd_bias_dropout", "max_logit"}
    of_all.add("bwd_dq_recompute_dropout")
    sizes = {v.row.sizes[0] for v in kept if v.family.name not in of_all}
    assert sizes == {head_dim}


# --- A family for some targets ------------------------------------------------------------------

SPECIFIC = """
[[family]]
name = "fwd_sm90"
role = "fwd"
targets = ["9.0a"]
header = "sm90/fwd/launch.h"
config = "FwdSm90Config"
kernel = "sm90_fwd_block"
params = "FwdSm90Params"
launch = "launch_sm90_fwd"
refuses = "refuses_sm90_fwd"
rows = [
  { head_dim = 64, plan = 99, warps = 12 },
]
"""


@pytest.fixture
def specific(tmp_path: Path) -> Table:
    path = tmp_path / "specific.toml"
    path.write_text(TABLE + SPECIFIC)
    return Table.load(path)


def symbols_of(table: Table, target: str) -> set[str]:
    return {variant.symbol for variant in table.variants(Arch.parse(target))}


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "compute_90", "sm_100"])
def test_other_targets_do_not_notice_a_family_for_one(
    table: Table, specific: Table, target: str
) -> None:
    assert symbols_of(specific, target) == symbols_of(table, target)


def test_its_target_gets_it_beside_the_general_family(table: Table, specific: Table) -> None:
    assert symbols_of(specific, "sm_90a") - symbols_of(table, "sm_90a") == {
        f"flash_dist_fwd_sm90_{dtype}_d64_smem99_sm90a" for dtype in ("fp16", "bf16")
    }


def test_a_plan_that_no_gpu_of_a_target_takes_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "plans.toml"
    general, own = "{ head_dim = 128, plan = 163,", "{ head_dim = 64, plan = 99,"
    more = TABLE.replace(general, f"{general.replace('163', '99')} warps = 4 }},\n  {general}")
    refusing = SPECIFIC.replace(own, f"{own.replace('99', '64')} warps = 8 }},\n  {own}")
    path.write_text(more + refusing)
    table = Table.load(path)
    small = {f"flash_dist_fwd_{dtype}_d128_smem99_sm90a" for dtype in ("fp16", "bf16")}
    kept = symbols_of(table, "sm_90a")
    assert "flash_dist_fwd_bf16_d128_smem163_sm90a" in kept
    assert {f"flash_dist_fwd_sm90_bf16_d64_smem{plan}_sm90a" for plan in (64, 99)} <= kept
    assert symbols_of(replace(table, every_plan=True), "sm_90a") - kept == small


def test_roles_and_families_are_told_apart(specific: Table, tmp_path: Path) -> None:
    generate(specific, ArchSet.parse("9.0a").archs, [], tmp_path)
    names = (tmp_path / "roles.h").read_text()
    assert "enum class Role : int { FWD, DELTA };" in names
    assert "enum class Family : int { FWD, DELTA, FWD_SM90 };" in names
    assert "ROLE_COUNT = 2" in names
    table = (tmp_path / "variants.inc").read_text()
    assert (
        "(flash_dist_fwd_sm90_bf16_d64_smem99_sm90a, FWD, FWD_SM90, 1, 99, 90, 'a', 0, 1, 64, 64)"
        in table
    )
    assert "(flash_dist_fwd_bf16_d64_smem64_sm90a, FWD, FWD, 0, 64, 90, 'a', 0, 1, 64, 64)" in table
    found = {
        (entry["role"], entry["family"])
        for entry in json.loads((tmp_path / "variants.json").read_text())
    }
    assert found == {("fwd", "fwd"), ("fwd", "fwd_sm90"), ("delta", "delta")}


def test_the_function_that_refuses_arguments_is_in_the_entry(
    specific: Table, tmp_path: Path
) -> None:
    generate(specific, ArchSet.parse("9.0a").archs, [], tmp_path)
    folder = tmp_path / "targets" / "sm_90a"
    symbol = "flash_dist_fwd_sm90_bf16_d64_smem99_sm90a"
    assert f"&refuses_sm90_fwd<{symbol}_config>" in (folder / "fwd_sm90.cu").read_text()
    assert "refuses" not in (folder / "fwd.cu").read_text()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"fwd_sm90"', '"fwd"', "must be named fwd_sm90 or fwd_scored_sm90, got `fwd`"),
        ('"fwd_sm90"', '"fwd_hopper"', "must be named fwd_sm90 or fwd_scored_sm90, got `fwd_h"),
        ('"fwd_sm90"', '"fwd_sm90_scored"', "must be named fwd_sm90 or fwd_scored_sm90, got"),
        ('targets = ["9.0a"]', "", "for all targets must be named fwd, got `fwd_sm90`"),
    ],
)
def test_the_name_of_a_family_tells_its_role_and_its_target(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    path = tmp_path / "named.toml"
    path.write_text(TABLE + SPECIFIC.replace(old, new))
    with pytest.raises(KernelsError, match=said):
        Table.load(path)


def test_rows_with_scored_are_a_family_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "scored.toml"
    changed = "warps = 12, scored = { plan = 64, warps = 8 } }"
    path.write_text(TABLE + SPECIFIC.replace("warps = 12 }", changed))
    plain, scored = Table.load(path).families[-2:]
    assert (plain.name, scored.name) == ("fwd_sm90", "fwd_scored_sm90")
    assert (plain.role, plain.targets) == (scored.role, scored.targets)
    assert (plain.config, scored.config) == ("FwdSm90Config", "FwdScoredSm90Config")
    assert (plain.params, scored.params) == ("FwdSm90Params", "FwdScoredSm90Params")
    assert plain.rows == (Row((64, 64), 99, (("warps", 12),)),)
    assert scored.rows == (Row((64, 64), 64, (("warps", 8),)),)


def test_a_family_for_all_targets_has_no_row_with_scored(tmp_path: Path) -> None:
    path = tmp_path / "scored.toml"
    path.write_text(TABLE.replace("warps = 4 }", "warps = 4, scored = {} }"))
    with pytest.raises(KernelsError, match="for all targets must be named fwd, got `fwd_scored`"):
        Table.load(path)


@pytest.mark.parametrize("smem", [232448, 166912, 101376, 65536])
def test_families_of_bent_scores_are_not_what_is_known_to_serve_a_size(smem: int) -> None:
    # doctor reports the kernel that is chosen without arguments; fingerprints record its code
    built = make_table_build(read_table())
    assert any(one.comes_last for one in built.variants)
    here = Situation(Device(9, 0), smem_limit=smem)
    keys = {one.key for one in built.variants}
    chosen = [judge_kernel(key, built, here).variant for key in keys]
    assert [one.symbol for one in chosen if one and one.comes_last] == []
