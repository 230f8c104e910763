"""The variant that each GPU runs, compared with a table written by hand from NVIDIA's guides."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flash_dist.toolkit.targets.advice import (
    describe_archs,
    explain_refusal,
    sets_for,
    unsupported_fix,
    unsupported_sentence,
)
from flash_dist.toolkit.targets.archs import Arch
from flash_dist.toolkit.targets.axes import AXES, Place
from flash_dist.toolkit.targets.compatibility import JitPolicy
from flash_dist.toolkit.targets.devices import Device, Driver
from flash_dist.toolkit.targets.verdict import (
    Build,
    Situation,
    Variant,
    judge_device,
    judge_kernel,
    variants_meant,
)
from tests.unit.made.builds import (
    ALL,
    ARCHSETS,
    HOPPER,
    TURING_AMPERE_ADA,
    make_build,
    make_key,
    make_variants,
)

R580 = Driver.parse("580")
R535 = Driver.parse("535")


def situation(device: str, driver: Driver | None = R580) -> Situation:
    return Situation(Device.parse(device), driver)


# set, device, how, target. CUDA 13 wheel, driver 580.
TABLE = [
    (ALL, "7.5", "native", "sm_75"),
    (ALL, "8.0", "native", "sm_80"),
    (ALL, "8.6", "same-major", "sm_80"),
    (ALL, "8.7", "jit", "compute_80"),  # integrated GPU: PTX runs, sm_80 is not promised
    (ALL, "8.9", "same-major", "sm_80"),
    (ALL, "9.0", "native", "sm_90a"),
    (ALL, "10.0", "native", "sm_100"),
    (ALL, "10.3", "same-major", "sm_100"),
    (ALL, "11.0", "jit", "compute_80"),  # the only GPU of its major
    (ALL, "12.0", "native", "sm_120"),
    (ALL, "12.1", "same-major", "sm_120"),
    (TURING_AMPERE_ADA, "7.5", "native", "sm_75"),
    (TURING_AMPERE_ADA, "8.0", "native", "sm_80"),
    (TURING_AMPERE_ADA, "8.6", "native", "sm_86"),
    (TURING_AMPERE_ADA, "8.7", "unverified", "sm_86"),  # compute_89 is too new for 8.7
    (TURING_AMPERE_ADA, "8.9", "native", "sm_89"),
    (TURING_AMPERE_ADA, "9.0", "jit", "compute_89"),
    (TURING_AMPERE_ADA, "10.0", "jit", "compute_89"),
    (TURING_AMPERE_ADA, "12.1", "jit", "compute_89"),
    (HOPPER, "9.0", "native", "sm_90a"),
    (HOPPER, "7.5", "none", None),
    (HOPPER, "8.6", "none", None),
    (HOPPER, "10.0", "none", None),
    (HOPPER, "12.1", "none", None),
    ("7.5+PTX", "7.5", "native", "sm_75"),
    ("7.5+PTX", "8.6", "jit", "compute_75"),
    ("7.5+PTX", "9.0", "jit", "compute_75"),
    ("7.5", "9.0", "none", None),
]


@pytest.mark.parametrize(
    ("archs", "device", "how", "target"), TABLE, ids=[f"{row[0]} on {row[1]}" for row in TABLE]
)
def test_each_set_runs_on_each_gpu_as_the_guides_say(
    archs: str, device: str, how: str, target: str | None
) -> None:
    verdict = judge_device(make_build(archs), situation(device))
    assert verdict.how == how
    assert [str(arch) for arch in verdict.targets] == ([target] if target else [])
    assert bool(verdict) == (target is not None)
    assert verdict.cause == ("" if target else "no-matching-code")


@pytest.mark.parametrize("archs", [ALL, TURING_AMPERE_ADA, HOPPER, "7.5+PTX"])
@pytest.mark.parametrize("device", ["7.5", "8.6", "9.0", "10.3", "12.1"])
def test_an_old_driver_is_the_only_reason_and_names_the_one_needed(archs: str, device: str) -> None:
    verdict = judge_device(make_build(archs), situation(device, R535))
    assert verdict.cause == "driver-too-old"
    assert "580" in verdict.reason
    assert "535" in verdict.reason
    assert {kernel.reason for kernel in verdict.kernels} == {verdict.reason}


def test_without_a_driver_the_driver_is_not_judged() -> None:
    assert judge_device(make_build(ALL), situation("8.6", None)).how == "same-major"


def test_bf16_is_no_fault_of_a_build_where_the_hardware_has_none() -> None:
    verdict = judge_device(make_build(ALL), situation("7.5"))
    hows = {kernel.key.words[0]: kernel.how for kernel in verdict.kernels}
    native = dict.fromkeys(("fp16", "fp32", "ieee32"), "native")
    assert hows == {**native, "bf16": "not-on-this-hardware"}
    assert verdict.how == "native"
    assert not verdict.missing_words


def test_a_dtype_that_only_the_build_lacks_is_named() -> None:
    assert judge_device(make_build("7.5+PTX"), situation("8.6")).missing_words == ("bf16",)


def test_a_gpu_older_than_every_kernel_is_reported() -> None:
    verdict = judge_device(make_build(ALL), situation("7.0"))
    assert verdict.cause == "hardware-too-old"
    assert "7.5 or newer" in verdict.reason


def test_a_build_without_kernels_serves_nobody() -> None:
    assert judge_device(Build("flash_dist", ()), situation("9.0")).cause == "no-kernels"


@pytest.mark.parametrize(
    ("device", "limit", "plan"),
    [
        ("8.0", None, 163),
        ("8.6", None, 99),
        ("9.0", None, 163),
        ("9.0", "101376", 99),
        ("9.0", "65536", 64),
        ("9.0", "999999", 163),
    ],
)
def test_the_largest_plan_that_fits_is_used(device: str, limit: str | None, plan: int) -> None:
    environ = {"FLASH_DIST_SMEM_LIMIT": limit} if limit else {}
    there = Situation.of(Device.parse(device), R580, environ)
    verdict = judge_kernel(make_key("fwd", "fp16", 128, 128), make_build(ALL), there)
    assert verdict.variant is not None
    assert verdict.variant.plan == plan


def test_the_limit_that_the_gpu_reports_wins_over_the_table() -> None:
    there = Situation.of(Device(9, 0), R580, {}, smem_optin=65536)
    assert there.smem_bytes == 65536


def test_a_limit_below_every_plan_is_the_cause() -> None:
    there = Situation.of(Device(9, 0), R580, {"FLASH_DIST_SMEM_LIMIT": "1000"})
    verdict = judge_device(make_build(ALL), there)
    assert verdict.cause == "smem-limit"
    assert "the limit is 1000" in verdict.reason
    assert all("the limit is 1000" in kernel.reason for kernel in verdict.kernels if not kernel)


@pytest.mark.parametrize(
    ("archs", "variable", "how", "cause"),
    [
        (ALL, "CUDA_FORCE_PTX_JIT", "jit", ""),
        (HOPPER, "CUDA_FORCE_PTX_JIT", "none", "jit-variable"),
        (ALL, "CUDA_DISABLE_PTX_JIT", "native", ""),
        ("8.0+PTX", "CUDA_DISABLE_PTX_JIT", "none", "jit-variable"),
    ],
)
def test_the_jit_variables_change_the_verdict(
    archs: str, variable: str, how: str, cause: str
) -> None:
    verdict = judge_device(make_build(archs), Situation.of(Device(9, 0), R580, {variable: "1"}))
    assert (verdict.how, verdict.cause) == (how, cause)
    assert not cause or variable in verdict.reason


def test_a_driver_that_takes_neither_sass_nor_ptx_loads_nothing() -> None:
    both = {"CUDA_FORCE_JIT": "1", "CUDA_DISABLE_PTX_JIT": "1"}
    there = Situation.of(Device(8, 0), R580, both)
    verdict = judge_device(make_build(ALL), there)
    assert (verdict.how, verdict.cause) == ("none", "jit-variable")
    assert "CUDA_FORCE_JIT is set, so the driver ignores sm_80" in verdict.reason
    forced = Situation(Device(9, 0), R580, jit=JitPolicy("CUDA_FORCE_PTX_JIT", lacks_compiler=True))
    assert judge_device(make_build(HOPPER), forced).cause == "jit-variable"
    only_ptx = judge_device(make_build("8.9+PTX"), forced)
    assert only_ptx.cause == "jit-compiler-absent"
    assert "libnvidia-ptxjitcompiler.so.1 is missing" in only_ptx.reason


def test_ptx_newer_than_the_driver_is_refused_for_the_driver() -> None:
    variants = [
        replace(variant, origin=replace(variant.origin, toolkit="13.1", ptx_isa=(9, 1)))
        for variant in make_variants(Arch.parse("compute_80"))
    ]
    build = Build("flash_dist 0", tuple(variants), ARCHSETS, "13.1")
    verdict = judge_device(build, situation("9.0"))
    assert verdict.cause == "driver-too-old"
    assert "PTX ISA 9.1" in verdict.reason
    assert "590" in verdict.reason
    disabled = Situation.of(Device(9, 0), R580, {"CUDA_DISABLE_JIT": "1"})
    assert judge_device(build, disabled).cause == "jit-variable"


def test_machine_code_is_preferred_and_refusals_are_kept() -> None:
    verdict = judge_kernel(make_key("fwd", "fp16", 64, 64), make_build(ALL), situation("9.0"))
    assert verdict.variant is not None
    assert verdict.variant.symbol == "flash_dist_fwd_fp16_d64_smem64_sm90a"
    assert {symbol.rsplit("_", 1)[1] for symbol, _ in verdict.refused} == {
        "sm75", "sm80", "sm100", "sm120",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("devices", "names"),
    [
        (["9.0"], ["hopper", "all"]),
        (["7.5"], ["turing-ampere-ada", "all"]),
        (["7.5", "8.6"], ["turing-ampere-ada"]),  # `all` has no code for 8.6 itself
        (["8.6", "12.1"], ["all"]),
        (["7.5", "9.0", "12.0"], ["all"]),
        (["7.0"], []),
    ],
    ids=str,
)
def test_the_sets_that_serve_all_gpus_best_are_named(devices: list[str], names: list[str]) -> None:
    serving = sets_for([Device.parse(device) for device in devices], ARCHSETS)
    assert [archset.name for archset in serving] == names


def test_the_sentence_names_gpu_build_contents_and_set() -> None:
    sentence = unsupported_sentence(Device(9, 0), make_build("7.5"), name="NVIDIA H200")
    assert sentence == (
        "NVIDIA H200 (compute capability 9.0) has no matching code in flash_dist "
        "0.1.0+cu130.test, built for SASS sm_75 and no PTX; install the arch set `hopper` or `all`"
    )


def test_the_fix_is_a_command() -> None:
    build = make_build("7.5")
    assert "`nox -s build_wheels -- hopper`" in unsupported_fix([Device(9, 0)], build)
    nowhere = replace(build, archsets=tuple(one for one in ARCHSETS if one.name == "hopper"))
    assert "TORCH_CUDA_ARCH_LIST='8.6;9.0a'" in unsupported_fix(
        [Device(9, 0), Device(8, 6)], nowhere
    )


def test_archs_are_described_with_and_without_ptx() -> None:
    assert describe_archs(make_build(ALL).archs) == (
        "SASS sm_75, sm_80, sm_90a, sm_100, sm_120; PTX compute_80"
    )
    assert describe_archs(()) == "no SASS; no PTX"


def test_a_verdict_becomes_json() -> None:
    data = judge_device(make_build(ALL), situation("8.6")).to_json()
    assert data["compute_capability"] == "8.6"
    assert data["driver"] == "580"
    assert data["smem_limit"] == 101376
    last = [kernel for kernel in data["kernels"] if kernel["dtype"] == "fp32"][-1]
    assert last == {
        "role": "fwd",
        "family": "fwd",
        "dtype": "fp32",
        "head_dim": 128,
        "head_dim_v": 128,
        "how": "same-major",
        "reason": last["reason"],
        "symbol": "flash_dist_fwd_fp32_d128_smem99_sm80",
        "target": "sm_80",
        "plan": 99,
        "smem_bytes": 101376,
        "proof": "native",
    }


def test_every_cause_is_explained() -> None:
    build = make_build(HOPPER)
    old = judge_device(build, situation("9.0", R535))
    sentence, fix = explain_refusal(old, build, name="NVIDIA H200")
    assert sentence == (
        "NVIDIA H200 (compute capability 9.0) cannot use this build: code built with CUDA 13.0 "
        "needs driver 580 or newer, not driver 535 (CUDA 12.2)"
    )
    assert fix.startswith("install NVIDIA driver 580 or newer")
    forced = judge_device(build, Situation(Device(9, 0), R580, jit=JitPolicy("CUDA_FORCE_PTX_JIT")))
    assert explain_refusal(forced, build)[1] == "`unset CUDA_FORCE_PTX_JIT`"


def test_code_for_some_kernels_only_is_not_called_no_code() -> None:
    whole = make_build("8.0;9.0a")
    hopper_fwd = tuple(
        v for v in whole.variants if v.arch.major == 8 or v.key == make_key("fwd", "fp16", 64, 64)
    )
    build = replace(whole, variants=hopper_fwd)
    verdict = judge_device(build, situation("9.0"))
    assert verdict.cause == "no-matching-code"
    assert "has code for some kernels only" in explain_refusal(verdict, build)[0]


# --- Families for some targets only ---------------------------------------------------------------


def general_forward(build: Build) -> Variant:
    """Return the forward variant of head_dim 64 for 9.0a."""
    (found,) = {
        v
        for v in build.variants
        if v.key == make_key("fwd", "bf16", 64, 64) and v.arch.number == 90
    }
    return found


def rename(
    variant: Variant, symbol: str, family: str, head_dim: int = 64, plan: int = 64
) -> Variant:
    """Return a variant with another symbol, family and size."""
    place = Place(variant.key.words, (head_dim, head_dim), plan)
    return Variant.of(symbol, family, place, variant.arch, origin=variant.origin)


def with_specific(build: Build, head_dim: int, plan: int = 163) -> Build:
    """Add a forward for 9.0a alone."""
    general = general_forward(build)
    symbol = f"flash_dist_fwd_sm90_bf16_d{head_dim}_smem{plan}_sm90a"
    specific = rename(general, symbol, "fwd_sm90", head_dim, plan)
    return replace(build, variants=(*build.variants, specific))


def chosen(build: Build, device: str, head_dim: int = 64, *, smem: int = 0) -> str | None:
    here = replace(situation(device), smem_limit=smem)
    variant = judge_kernel(make_key("fwd", "bf16", head_dim, head_dim), build, here).variant
    return variant.family if variant else None


def test_a_role_is_told_from_its_families_name() -> None:
    build = make_build(HOPPER)
    roles = {v.key.role for v in with_specific(build, 64).variants}
    assert roles == {v.family for v in build.variants}
    assert AXES.role_of("bwd_dq_gemm") == "bwd_dq_gemm"
    assert AXES.role_of("bwd_dq_gemm_sm100") == "bwd_dq_gemm"
    assert AXES.role_of("bwd_dq_gemm_scored_sm100") == "bwd_dq_gemm"


def test_the_family_made_for_a_target_is_taken_there() -> None:
    build = with_specific(make_build(HOPPER), 64)
    assert chosen(build, "9.0") == "fwd_sm90"
    assert chosen(build, "9.0", smem=64 * 1024) == "fwd"  # fwd_sm90's plan does not fit
    verdict = judge_device(build, situation("9.0"))
    assert verdict
    (forward,) = (k for k in verdict.kernels if k.key == make_key("fwd", "bf16", 64, 64))
    assert (forward.to_json(AXES)["role"], forward.to_json(AXES)["family"]) == ("fwd", "fwd_sm90")


def test_tiles_for_score_modification_come_last_among_equals() -> None:
    build = with_specific(make_build(HOPPER), 64, plan=226)
    plain = build.variants[-1]
    symbol = plain.symbol.replace("fwd_", "fwd_scored_")
    scored = rename(plain, symbol, "fwd_scored_sm90", plan=226)
    assert (plain.comes_last, scored.comes_last) == (False, True)
    for pair in ((plain, scored), (scored, plain)):
        both = replace(build, variants=(*build.variants[:-1], *pair))
        assert chosen(both, "9.0") == "fwd_sm90"


def test_the_best_target_comes_before_the_family() -> None:
    build = with_specific(make_build(ALL), 64)
    assert chosen(build, "12.0") == "fwd"
    assert chosen(build, "8.0") == "fwd"


def test_a_size_of_its_own_is_expected_on_its_target_alone() -> None:
    build = with_specific(make_build(ALL), 72)
    for device in ("7.5", "8.6", "12.0"):
        verdict = judge_device(build, situation(device))
        assert verdict
        assert all(72 not in kernel.key.sizes for kernel in verdict.kernels)
    keys = {kernel.key for kernel in judge_device(build, situation("9.0")).kernels}
    assert make_key("fwd", "bf16", 72, 72) in keys


def test_a_size_that_a_family_lacks_is_served_by_its_next_larger_one() -> None:
    base = make_build(HOPPER)
    general = general_forward(base)
    wide, narrow = (
        rename(general, f"flash_dist_fwd_bf16_d{size}_smem64_sm90a", "fwd", size)
        for size in (96, 32)
    )
    build = with_specific(replace(base, variants=(*base.variants, wide, narrow)), 128)
    assert chosen(build, "9.0", 96) == "fwd_sm90"
    assert chosen(build, "9.0", 96, smem=64 * 1024) == "fwd"


def test_a_role_that_has_families_for_some_targets_only_need_not_run() -> None:
    base = with_specific(make_build(ALL), 64, plan=227)
    *others, forward = base.variants
    symbol = forward.symbol.replace("fwd_sm90", "bwd_fused_sm90")
    fused = rename(forward, symbol, "bwd_fused_sm90", plan=227)
    build = replace(base, variants=(*others, fused))
    key = make_key("bwd_fused", "bf16", 64, 64)
    assert build.fallbacks.stand_ins == {"bwd_fused": ()}
    assert key in {kernel.key for kernel in judge_device(build, situation("9.0")).kernels}
    for device, smem in (("9.0", 64 * 1024), ("8.0", 0)):
        verdict = judge_device(build, replace(situation(device), smem_limit=smem))
        assert verdict
        assert key not in {kernel.key for kernel in verdict.kernels}


def test_a_family_for_some_targets_leaves_few_columns_to_the_general_one() -> None:
    base = make_build(HOPPER)
    general = general_forward(base)
    narrow = rename(general, "flash_dist_fwd_bf16_d32_smem64_sm90a", "fwd", 32)
    build = with_specific(replace(base, variants=(*base.variants, narrow)), 64)
    assert chosen(build, "9.0", 64) == "fwd_sm90"
    assert chosen(build, "9.0", 32) == "fwd"


@pytest.mark.parametrize("kind", ["", "_scored"])
def test_a_role_without_a_general_family_takes_few_columns_too(kind: str) -> None:
    family = f"bwd_fused{kind}_sm90"
    forward = with_specific(make_build(HOPPER), 64).variants[-1]
    fused = rename(forward, forward.symbol.replace("fwd_sm90", family), family, plan=163)
    build = Build("test", (fused,))
    for head_dim in (8, 32, 64):
        key = make_key("bwd_fused", "bf16", head_dim, head_dim)
        assert variants_meant(key, build) == [fused]
    assert variants_meant(make_key("bwd_fused", "bf16", 72, 72), build) == []
