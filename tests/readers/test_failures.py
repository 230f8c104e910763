"""The dispatcher's reaction to each error of the CUDA runtime, at each of its calls.

The host code of csrc/ is compiled with NVIDIA's headers and linked to a runtime that fails on
request (failures.cpp). The dispatcher skips only an image that cannot run here; any other failure
is an error, and the next call launches the same kernels as without the failure.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import pytest

from ci.places import SOURCES, read_table
from flash_dist.kernels.budget import (
    BUDGET_NOW,
    BUDGET_VARIABLE,
    DEFAULT_BUDGET_MB,
    find_budget_problem,
)
from flash_dist.toolkit.make.kernels.generate import generate
from flash_dist.toolkit.make.project import NATIVE
from flash_dist.toolkit.targets.archs import ArchSet
from tests.readers.tools import include, needs, run

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = needs("nvcc")

# Errors of an image that can never run on this GPU.
REFUSALS: Final = {
    "cudaErrorInvalidDeviceFunction",
    "cudaErrorInvalidKernelImage",
    "cudaErrorNoKernelImageForDevice",
    "cudaErrorInvalidSource",
    "cudaErrorInvalidPtx",
    "cudaErrorUnsupportedPtxVersion",
    "cudaErrorJitCompilerNotFound",
    "cudaErrorJitCompilationDisabled",
}
LOADING: Final = (
    "cudaFuncGetAttributes",
    "cudaFuncSetAttribute",
    "cudaOccupancyMaxActiveClusters",
)
# Temporary errors. The first one is tested at every call, the others at each function's first call.
PASSING: Final = ("cudaErrorMemoryAllocation", "cudaErrorStreamCaptureUnsupported")


class Attempt(NamedTuple):
    """Results of one forward and backward."""

    errors: list[str]
    launched: list[str]
    calls: dict[str, int]
    left_behind: int  # result of cudaGetLastError that is left over
    device: int  # current device after the calls
    first_keys_first: bool  # of the fused kernel


Pair = tuple[Attempt, Attempt]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("failures")
    table = read_table().only([32, 64, 96, 128], ["bf16", "fp32", "ieee32"])
    table = replace(table, every_plan=True)  # some calls have little shared memory
    generate(table, ArchSet.parse("9.0a;8.0+PTX").archs, [], folder)
    folders = (SOURCES / "host", NATIVE)
    host = sorted(path for one in folders for path in one.glob("*.cpp"))
    sources = [Path(__file__).with_name("failures.cpp"), *host]
    options = ["-std=c++17", "-O1", "-Xcompiler=-Wall,-Wextra,-Werror", "-cudart=none"]
    run("nvcc", *options, *include(folder), *sources, "-o", folder / "failures")
    return folder / "failures"


@pytest.fixture(scope="module")
def codes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Read the errors by name from NVIDIA's header."""
    source = tmp_path_factory.mktemp("codes") / "codes.cpp"
    source.write_text("#include <driver_types.h>\n", encoding="utf-8")
    found = re.findall(r"\b(cudaError[A-Z]\w*)\s*=\s*(\d+)", run("nvcc", "-E", source))
    assert len(found) > 100
    return {name: int(number) for name, number in found}


def ask(
    program: Path,
    *failures: tuple[str, int, int],
    sizes: str = "",
    environ: Mapping[str, str] | None = None,
) -> list[Pair]:
    """Return both attempts for each failure, which is (function, call number, error code)."""
    behind = f" ; {sizes}" if sizes else ""
    lines = "".join(f"{function} {count} {code}{behind}\n" for function, count, code in failures)
    kept = {name: value for name, value in os.environ.items() if name != BUDGET_VARIABLE}
    done = subprocess.run(
        [program],
        input=lines,
        env={**kept, **(environ or {})},
        capture_output=True,
        text=True,
        check=True,
    )
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(told) == len(failures)
    return [(Attempt(**first), Attempt(**second)) for first, second in told]


@pytest.fixture(scope="module")
def undisturbed(program: Path) -> Attempt:
    ((first, second),) = ask(program, ("nothing", 0, 0))
    assert first.errors == []
    assert first.launched == second.launched
    assert first.launched
    return first


def test_an_error_that_may_pass_leaves_the_next_call_as_it_would_have_been(
    program: Path, codes: dict[str, int], undisturbed: Attempt
) -> None:
    cases = [
        (function, count, name)
        for function, calls in undisturbed.calls.items()
        for count in range(1, calls + 1)
        for name in (codes if count == 1 else PASSING)
        if name not in REFUSALS or function not in LOADING
        if (function, name) != ("cudaFuncSetAttribute", "cudaErrorInvalidValue")
    ]
    asked = [(function, count, codes[name]) for function, count, name in cases]
    for case, (first, second) in zip(cases, ask(program, *asked), strict=True):
        assert second.errors == [], case
        assert second.launched == undisturbed.launched, case
        assert first.left_behind == second.left_behind == 0, case
        if first.errors:
            (sentence,) = first.errors
            assert f"error {codes[case[2]]} (" in sentence, case
            assert sentence.startswith("CUDA out of memory. ") == (
                case[2] == "cudaErrorMemoryAllocation"
            ), case
        else:  # a failure to restore the device cannot be reported
            assert case[0] == "cudaSetDevice", case
            assert first.launched == undisturbed.launched, case


@pytest.mark.parametrize("name", sorted(REFUSALS))
def test_an_image_that_cannot_run_here_is_passed_over_for_the_rest_of_the_process(
    program: Path, codes: dict[str, int], undisturbed: Attempt, name: str
) -> None:
    # Two more kernels are loaded but not launched: dK/dV if the fused kernel replaces it, and the
    # kernel of short sequences, which refuses long ones. Only dK/dV can have clusters.
    standing_by = undisturbed.calls[LOADING[0]] - len(set(undisturbed.launched))
    for function in LOADING:
        counts = range(1, undisturbed.calls[function] + 1)
        asked = [(function, count, codes[name]) for count in counts]
        unchanged = 0
        for case, (first, second) in zip(asked, ask(program, *asked), strict=True):
            assert first.errors == second.errors == [], case
            assert first.launched == second.launched, case
            unchanged += first.launched == undisturbed.launched
            assert first.left_behind == 0, case
            assert not set(LOADING) & second.calls.keys(), case
        assert 0 < unchanged <= standing_by, function
        assert unchanged == standing_by or "Clusters" in function


def test_more_shared_memory_than_a_block_gets_is_a_refusal(
    program: Path, codes: dict[str, int], undisturbed: Attempt
) -> None:
    invalid = codes["cudaErrorInvalidValue"]
    ((first, second),) = ask(program, ("cudaFuncSetAttribute", 1, invalid))
    assert first.errors == []
    assert first.launched == second.launched != undisturbed.launched


def test_registers_that_its_warpgroups_were_not_made_for_are_a_refusal(
    program: Path, undisturbed: Attempt
) -> None:
    assert undisturbed.launched[0].startswith("flash_dist_fwd_sm90_")
    ((first, second),) = ask(program, ("cudaFuncGetAttributes", 1, 0))
    assert first.errors == []
    assert first.launched == second.launched != undisturbed.launched


def test_a_kernel_that_is_first_used_in_a_capture_says_what_to_do(
    program: Path, codes: dict[str, int]
) -> None:
    unsupported = codes["cudaErrorStreamCaptureUnsupported"]
    ((first, _),) = ask(program, ("cudaFuncGetAttributes", 1, unsupported))
    assert re.match(r"flash_dist could not load flash_dist_fwd_\w*bf16_d64_\w+: ", first.errors[0])
    assert "hint: call it once before the capture" in first.errors[0]


def test_no_memory_for_a_kernel_is_said_as_torch_says_it(
    program: Path, codes: dict[str, int]
) -> None:
    memory = codes["cudaErrorMemoryAllocation"]
    ((first, _),) = ask(program, ("cudaFuncGetAttributes", 1, memory))
    start = "CUDA out of memory. flash_dist could not load flash_dist_fwd_"
    assert first.errors[0].startswith(start)
    assert "the next call tries again" in first.errors[0]


MOST = 2**31 - 1


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ((1, MOST, 64, 1, 1, -1), f"seqlen_q must be at most 1073741696, got {MOST}"),
        ((1, 64, MOST, 1, 1, -1), f"seqlen_k must be at most 1073741696, got {MOST}"),
        ((1, 64, 1073741697, 1, 1, -1), "seqlen_k must be at most 1073741696, got 1073741697"),
        (
            (2**20, 64, 64, 2**8, 2**4, -1),
            f"batch * num_heads_q must be at most {MOST}, got 1048576 * 4096",
        ),
        (
            (2**20, 64, 64, 1, 1, 2**31 - 2**27),
            "total_q + 128 * batch must be at most 2147483518, got 2013265920 + 128 * 1048576",
        ),
    ],
    ids=["seqlen_q", "seqlen_k", "one-more", "heads", "total_q"],
)
def test_sizes_that_32_bits_do_not_hold_are_refused_before_anything_runs(
    program: Path, sizes: tuple[int, ...], sentence: str
) -> None:
    ((first, _),) = ask(program, ("nothing", 0, 0), sizes=" ".join(map(str, (*sizes, 0))))
    assert first.errors == [sentence, sentence]
    assert first.calls == {}


@pytest.mark.parametrize("total_q", [-1, 0], ids=["", "packed"])
@pytest.mark.parametrize("seqlen_k", [64, 4096])
@pytest.mark.parametrize(("batch", "seqlen_q"), [(0, 8), (2, 0), (0, 0)])
def test_a_call_without_a_query_is_no_error(
    program: Path, batch: int, seqlen_q: int, seqlen_k: int, total_q: int
) -> None:
    sizes = f"{batch} {seqlen_q} {seqlen_k} 1 4 {total_q} {64 << 20}"
    ((first, second),) = ask(program, ("nothing", 0, 0), sizes=sizes)
    assert first.errors == second.errors == []
    assert first.launched == second.launched


@pytest.mark.parametrize(("num_heads_kv", "group"), [(0, 4), (1, 0), (0, 0)])
@pytest.mark.parametrize("seqlen_q", [8, 1000])
def test_no_head_is_refused(program: Path, seqlen_q: int, num_heads_kv: int, group: int) -> None:
    sizes = f"2 {seqlen_q} 4096 {num_heads_kv} {group} -1 {64 << 20}"
    ((first, _),) = ask(program, ("nothing", 0, 0), sizes=sizes)
    assert first.errors == 2 * ["num_heads_q must be at least 1, got 0"]
    assert first.calls == {}


def with_cache(program: Path, *sizes: int, seqlen_new: int = 0) -> list[str]:
    """Return the errors of decode and append.

    Args:
        program: The compiled program.
        sizes: batch, seqlen_q, capacity, num_heads_kv, group.
        seqlen_new: Number of keys to append.
    """
    line = " ".join(map(str, (*sizes, -1, 64 << 20, 1, 0, seqlen_new)))
    ((first, second),) = ask(program, ("nothing", 0, 0), sizes=line)
    assert first.errors == second.errors
    return first.errors


def test_a_cache_is_read_and_written(program: Path) -> None:
    assert with_cache(program, 2, 8, 4096, 1, 4, seqlen_new=8) == []


@pytest.mark.parametrize(("batch", "seqlen_q"), [(0, 8), (2, 0), (0, 0)])
def test_a_cache_without_a_query_is_not_read(program: Path, batch: int, seqlen_q: int) -> None:
    got = f"{batch} and {seqlen_q}"
    assert with_cache(program, batch, seqlen_q, 4096, 1, 4) == [
        f"batch and seqlen_q must be at least 1 to read a cache, got {got}"
    ]


def test_a_cache_without_a_head_is_refused(program: Path) -> None:
    sentence = "num_heads_q must be at least 1, got 0"
    assert with_cache(program, 2, 8, 4096, 0, 4) == [sentence, sentence]


@pytest.mark.parametrize(
    ("capacity", "seqlen_new", "sentence"),
    [
        (MOST, 8, f"seqlen_k must be at most 1073741696, got {MOST}"),
        (4096, MOST, f"seqlen_new must be at most 1073741696, got {MOST}"),
    ],
    ids=["capacity", "seqlen_new"],
)
def test_a_cache_whose_rows_32_bits_do_not_hold_is_neither_read_nor_written(
    program: Path, capacity: int, seqlen_new: int, sentence: str
) -> None:
    got = with_cache(program, 2, 8, capacity, 1, 4, seqlen_new=seqlen_new)
    assert got == [sentence, sentence]


def test_more_units_of_a_cache_than_64_bits_hold_are_refused(program: Path) -> None:
    (sentence,) = with_cache(program, 2**19, 2**29, 2**29, 2**11, 1)
    assert sentence.startswith(
        "blocks of 128 keys * tiles of 64 queries of a group must be at most 2147483647, "
        f"got {2**41} * {2**34}\n\nhint: "
    )


def test_more_blocks_than_a_launch_has_say_what_to_do(program: Path, codes: dict[str, int]) -> None:
    invalid = codes["cudaErrorInvalidConfiguration"]
    ((first, _),) = ask(program, ("cudaLaunchKernel", 1, invalid))
    assert "it would need more than 2147483647 blocks" in first.errors[0]
    assert "hint: pass less at a time" in first.errors[0]


# 1000 queries and keys of 2 x 4 heads: dS takes 16 MiB. With less room, dS is computed in chunks.
SIZES = "2 1000 1000 1 4 -1"


def with_budget(program: Path, budget: int, **environ: str) -> Attempt:
    sizes = f"{SIZES} {budget}"
    return ask(program, ("nothing", 0, 0), sizes=sizes, environ=environ)[0][0]


@pytest.mark.parametrize(
    ("text", "megabytes"),
    [("64", 64), ("0", 0), ("007", 7), ("", DEFAULT_BUDGET_MB), (None, DEFAULT_BUDGET_MB)],
    ids=str,
)
def test_a_graph_takes_the_budget_of_the_moment(
    program: Path, text: str | None, megabytes: int
) -> None:
    environ = {} if text is None else {BUDGET_VARIABLE: text}
    now = with_budget(program, BUDGET_NOW, **environ)
    assert now.errors == []
    assert now.launched == with_budget(program, megabytes << 20, **environ).launched
    assert (now.launched == with_budget(program, 0).launched) == (megabytes == 0)


@pytest.mark.parametrize("text", ["x", "-1", "1.5", " 64", "8796093022208", "9" * 40])
def test_a_budget_that_is_no_number_is_refused_in_the_same_words(program: Path, text: str) -> None:
    now = with_budget(program, BUDGET_NOW, **{BUDGET_VARIABLE: text})
    hint = f"hint: unset it for the default of {DEFAULT_BUDGET_MB}"
    assert now.errors == [f"{find_budget_problem(text)}\n\n{hint}"]


def with_dtype(program: Path, dtype: int) -> Attempt:
    sizes = f"{SIZES} {64 << 20} {dtype}"
    return ask(program, ("nothing", 0, 0), sizes=sizes)[0][0]


@pytest.mark.parametrize(("dtype", "name"), [(2, "fp32"), (3, "ieee32")])
def test_float32_by_any_products_takes_the_same_kernels_where_nothing_is_multiplied(
    program: Path, dtype: int, name: str
) -> None:
    ran = with_dtype(program, dtype)
    assert ran.errors == []
    assert [one.partition("_d64")[0].removeprefix("flash_dist_") for one in ran.launched] == [
        f"fwd_{name}",
        "bwd_delta_fp32",
        f"bwd_dq_recompute_{name}",
        f"bwd_dkdv_{name}",
        "bwd_reduce_fp32",
    ]


UNBOUNDED: Final = 1 << 30


def families_with(
    program: Path, softcap: float, budget: int, head_dim: int = 64, **environ: str
) -> list[str]:
    """Return the families of a causal bfloat16 call, in order."""
    sizes = f"{SIZES} {budget} 1 {softcap} -1 {head_dim} {UNBOUNDED} 0 0"
    ((ran, again),) = ask(program, ("nothing", 0, 0), sizes=sizes, environ=environ)
    assert ran.errors == []
    assert ran.launched == again.launched
    return families_of(ran)


def families_of(ran: Attempt) -> list[str]:
    """Return the families that ran for a bfloat16 call."""
    return [one.partition("_bf16")[0].removeprefix("flash_dist_") for one in ran.launched]


SMALL: Final = "166911"  # bytes of shared memory, too few for the Hopper kernels


@pytest.mark.parametrize(
    ("budget", "backward"),
    [(64 << 20, ["bwd_fused{}_sm90"]), (0, ["bwd_dkdv{}_sm90", "bwd_dq_recompute"])],
    ids=["fused", "chain"],
)
@pytest.mark.parametrize(("softcap", "kind"), [(0, ""), (50, "_scored")])
def test_calls_with_a_soft_cap_take_the_families_made_for_them(
    program: Path, budget: int, backward: list[str], softcap: float, kind: str
) -> None:
    named = [name.format(kind) for name in ("fwd{}_sm90", "bwd_delta", *backward)]
    assert set(families_with(program, softcap, budget)) - {"bwd_reduce"} == set(named)
    short = families_with(program, softcap, budget, FLASH_DIST_SMEM_LIMIT=SMALL)
    assert {"fwd", "bwd_delta", "bwd_dkdv"} <= set(short)
    assert not [name for name in short if name.endswith("_sm90")]


@pytest.mark.parametrize(
    ("head_dim", "softcap", "backward"),
    [
        (8, 0, {"bwd_fused_sm90"}),
        (32, 0, {"bwd_fused_sm90"}),
        (32, 50, {"bwd_fused_scored_sm90"}),
        (96, 0, {"bwd_fused_sm90"}),
        (96, 50, {"bwd_dkdv_scored_sm90", "bwd_dq_gemm_sm90"}),
        (128, 50, {"bwd_fused_scored_sm90"}),
    ],
)
def test_one_kernel_makes_all_gradients_of_few_columns_too_unless_another_has_fewer(
    program: Path, head_dim: int, softcap: float, backward: set[str]
) -> None:
    others = {"fwd", "fwd_sm90", "fwd_scored_sm90", "bwd_delta", "bwd_reduce"}
    assert set(families_with(program, softcap, 64 << 20, head_dim)) - others == backward
    chain = families_with(program, softcap, 0, 32)
    assert {"bwd_dkdv", "bwd_dq_recompute"} <= set(chain)
    short = families_with(program, softcap, 64 << 20, head_dim, FLASH_DIST_SMEM_LIMIT=SMALL)
    assert not [name for name in short if name.endswith("_sm90")]


LONG: Final = {
    "seqlen_k": 32768,
    "total_q": -1,
    "left": UNBOUNDED,
    "right": 0,
    "batch_invariant": 0,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"right": 7}, True),
        ({"seqlen_k": 4096}, True),
        ({"seqlen_k": 128}, False),
        ({"right": UNBOUNDED}, False),
        ({"left": 30000}, False),
        ({"left": 30000, "right": UNBOUNDED}, False),
        ({"total_q": 32768}, False),
        ({"batch_invariant": 1}, False),
    ],
    ids=[
        "long",
        "late",
        "short",
        "one block",
        "full",
        "window",
        "left",
        "packed",
        "batch-invariant",
    ],
)
def test_causal_sequences_of_grouped_heads_begin_with_the_first_keys(
    program: Path,
    changes: dict[str, int],
    expected: bool,  # noqa: FBT001
) -> None:
    seqlen_k, total_q, *others = (LONG | changes).values()
    sizes = f"1 4096 {seqlen_k} 1 4 {total_q} {1 << 30} 1 0 -1 64 {' '.join(map(str, others))}"
    ((ran, _),) = ask(program, ("nothing", 0, 0), sizes=sizes)
    assert ran.errors == []
    assert "flash_dist_bwd_fused_sm90_bf16_d64_smem227_sm90a" in ran.launched
    assert ran.first_keys_first == expected


@pytest.mark.parametrize(
    ("heads", "budget", "backward"),
    [
        (4, 1 << 30, {"bwd_dkdv_sm90", "bwd_dq_gemm_sm90"}),
        (4, 200 << 20, {"bwd_fused_sm90"}),  # half of this budget cannot hold dS
        (16, 1 << 30, {"bwd_fused_sm90"}),
    ],
    ids=["one round", "without the memory", "more rounds"],
)
def test_one_round_of_blocks_that_wait_for_each_other_stores_ds_instead(
    program: Path, heads: int, budget: int, backward: set[str]
) -> None:
    sizes = f"1 4096 4096 {heads} 1 -1 {budget} 1 0 -1 128"
    ((ran, _),) = ask(program, ("nothing", 0, 0), sizes=sizes)
    assert ran.errors == []
    assert set(families_of(ran)) - {"fwd_sm90", "bwd_delta"} == backward


def test_a_dtype_that_there_is_not_is_refused_with_those_there_are(program: Path) -> None:
    expected = "dtype must be 0 (fp16), 1 (bf16), 2 (fp32) or 3 (ieee32), got 4"
    assert set(with_dtype(program, 4).errors) == {expected}


def test_a_budget_below_all_is_refused(program: Path) -> None:
    (sentence,) = with_budget(program, -2).errors
    assert re.fullmatch(r"budget must be at least 0 bytes, or -1 for \w+, got -2", sentence)


def test_a_part_of_a_gpu_that_holds_no_cluster_is_a_refusal(
    program: Path, undisturbed: Attempt
) -> None:
    ((first, second),) = ask(program, ("cudaOccupancyMaxActiveClusters", 1, 0))
    assert first.errors == []
    assert first.launched == second.launched != undisturbed.launched
