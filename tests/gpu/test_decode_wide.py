"""Multi-row decode on Hopper: the bits of the general kernel, which low shared memory selects."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch

from flash_dist import flash_attn_func, flash_attn_varlen_func, last_variant
from tests.gpu.running import workspace
from tests.kvcache import Problem
from tests.reference import DEVICE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor

LIMIT: Final = "FLASH_DIST_SMEM_LIMIT"
SHORT: Final = "166911"  # bytes of shared memory, too few for the Hopper kernels
DTYPES: Final = (torch.float16, torch.bfloat16)

LONG: Final = Problem(seqlens=(3000, 1, 777), capacity=3008, seqlen_q=70, head_dim=128, causal=True)
PROBLEMS: Final = {
    "long": LONG,
    "all keys": replace(LONG, causal=False, head_dim=64),
    "one row too many": replace(LONG, seqlen_q=65),
    "half a tile": replace(LONG, heads=4, heads_kv=2, seqlen_q=9),
    "odd rows of a group": replace(LONG, heads=10, heads_kv=2, seqlen_q=37, head_dim=64),
    "many tiles": replace(LONG, seqlens=(3000,), seqlen_q=1000, heads=4, heads_kv=1),
    "pages": replace(LONG, page=16),
    "large pages": replace(LONG, page=752, head_dim=64),
    "left padding": replace(LONG, leftpad=(100, 0, 700)),
    "entries": replace(LONG, entries=5, batch_idx=(4, 0, 2), head_dim=64),
    "new keys": replace(LONG, seqlens=(2900, 0, 500), seqlen_new=70, rotary_dim=32),
    "window": replace(LONG, window=(300, -1)),
    "window to both sides": replace(LONG, causal=False, window=(100, 40), head_dim=64),
    "soft cap": replace(LONG, softcap=5.0),
    "slopes and sinks": replace(LONG, alibi=True, sinks=True, head_dim=64),
    "few columns": replace(LONG, head_dim=40, head_dim_v=24),
    "more columns than 64": replace(LONG, head_dim=96),
}
BUDGETS: Final = (1536, 1, 0)  # MB of workspace: decides which blocks share a sequence
ENDS: Final = ((0, 5, 5, 21, 36), (0, 1100, 2200, 4200, 8300))  # cu_seqlens of queries and keys


def calls() -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """Yield the results of each call, by name. Few queries on many keys use the same kernels."""
    for dtype in DTYPES:
        for name, problem in PROBLEMS.items():
            for megabytes in BUDGETS:
                with workspace(megabytes):
                    yield (
                        f"{name}, {dtype}, {megabytes} MB",
                        problem.call(problem.make(dtype, DEVICE)),
                    )
        generator = torch.Generator(DEVICE).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)  # noqa: B023

        q, k, v = normal(2, 64, 4, 128), normal(2, 16384, 2, 128), normal(2, 16384, 2, 128)
        yield f"few queries, {dtype}", flash_attn_func(q, k, v, causal=True, return_lse=True)
        cu_q, cu_k = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ENDS)
        q, k, v = normal(36, 8, 64), normal(8300, 2, 64), normal(8300, 2, 64)
        packed = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 16, 4100, causal=True, return_lse=True)
        yield f"packed, {dtype}", packed


def save(path: Path) -> None:
    """Write the results, and the family that ran."""
    results = {name: tuple(x.cpu() for x in values) for name, values in calls()}
    torch.save({"family": last_variant()["decode_wide"]["family"], "results": results}, path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of both kernels."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Hopper's families are for compute capability 9.0")
    unlimited = {name: value for name, value in os.environ.items() if name != LIMIT}
    found = {}
    for name, limit in (("native", {}), ("short", {LIMIT: SHORT})):
        path = tmp_path_factory.mktemp(name) / "results.pt"
        done = subprocess.run(
            [sys.executable, "-m", "tests.gpu.test_decode_wide", str(path)],
            cwd=Path(__file__).parents[2],
            env={**unlimited, **limit},
            capture_output=True,
            text=True,
            check=False,
        )
        if name == "short" and f"unset {LIMIT}" in done.stderr:
            pytest.skip("this wheel has no general forward for 9.0")
        assert done.returncode == 0, done.stderr
        found[name] = torch.load(path)
    if found["native"]["family"] == "decode_wide":
        pytest.skip("this wheel has no code for 9.0a")
    return found


def test_each_kernel_ran_where_it_should(runs: dict[str, Any]) -> None:
    assert runs["native"]["family"] == "decode_wide_sm90"
    assert runs["short"]["family"] == "decode_wide"


def test_both_kernels_have_the_same_bits(runs: dict[str, Any]) -> None:
    faults = []
    for name, expected in runs["short"]["results"].items():
        for kind, x, y in zip(
            ("out", "lse"), expected, runs["native"]["results"][name], strict=True
        ):
            bits = torch.int16 if x.element_size() == 2 else torch.int32
            differs = x.contiguous().view(bits) != y.contiguous().view(bits)
            if not differs.any():
                continue
            place = tuple(differs.nonzero()[0].tolist())
            faults.append(
                f"{name}: {kind} differs in {int(differs.sum())} of {differs.numel()} elements, "
                f"first at {place}: {y[place].item()!r} instead of {x[place].item()!r}"
            )
    assert not faults, "\n".join(faults[:12])


def check_chunks(problem: Problem, dtype: torch.dtype, ends: Iterable[int]) -> None:
    """Compare chunks of queries, each to the end of its keys, with all queries at once."""
    tensors = problem.make(dtype, DEVICE)
    out, lse = problem.call(tensors)
    begin = 0
    for end in ends:
        seqlens = tensors.seqlens - (problem.seqlen_q - end)
        chunk = tensors._replace(q=tensors.q[:, begin:end], seqlens=seqlens)
        part, part_lse = problem.call(chunk)
        assert torch.equal(part, out[:, begin:end])
        assert torch.equal(part_lse, lse[:, :, begin:end])
        begin = end


@pytest.mark.parametrize("head_dim", [64, 128])
def test_chunks_of_a_prefill_have_the_bits_of_the_prefill(head_dim: int, half: torch.dtype) -> None:
    """Chunks of up to 16 rows, of up to 64 rows and of more rows run on different kernels."""
    problem = Problem((1900,), 1904, 300, 1, 1, head_dim, causal=True)
    check_chunks(problem, half, (16, 80, 300))


@pytest.mark.parametrize("window", [(-1, -1), (300, -1)])
def test_a_prefill_of_many_tiles_has_the_bits_of_its_chunks(
    window: tuple[int, int], half: torch.dtype
) -> None:
    """With many tiles, each tile computes only its own visible keys.

    In a chunk, each tile computes all keys that any tile of the chunk sees.

    On Hopper this happens only without workspace. With workspace, the forward kernel computes
    prefill and chunks.
    """
    problem = Problem((2000, 1700), 2000, 2000, 32, 8, 128, causal=True, window=window)
    check_chunks(problem, half, range(250, 2001, 250))
    tensors = problem.make(half, DEVICE)
    out, lse = problem.call(tensors)
    with workspace(0):
        tiled, tiled_lse = problem.call(tensors)
    assert torch.equal(out, tiled)
    assert torch.equal(lse, tiled_lse)


if __name__ == "__main__":
    save(Path(sys.argv[1]))
