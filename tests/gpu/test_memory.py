"""Memory of a backward call: the formula of docs/memory.md, and offsets past 2^31."""

from __future__ import annotations

import gc
import subprocess
import sys
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from flash_dist import flash_attn_func, last_variant
from tests.gpu.packed import attend_packed, pack
from tests.gpu.running import attend, peak_of, workspace
from tests.masks import masked_problem
from tests.reference import Problem, assert_close, assert_same_bits, random_problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.gpu

TILE = 64
COMPILED = (32, 64, 96, 128, 160, 192, 224, 256, 384, 512)
COMPILED_SM90 = (64, 96, 128, 192, 256, 384, 512)


def ceil_to(size: int, step: int) -> int:
    return -(-size // step) * step


def backward_of(problem: Problem) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Return a call that runs only the backward."""
    q, k, v = (x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v))
    out = flash_attn_func(q, k, v, **problem.options)
    return lambda: torch.autograd.grad(out, (q, k, v), problem.dout, retain_graph=True)


def count_slots(problem: Problem) -> int:
    """Return the tiles of dS that one query head stores."""
    batch, seqlen_q, heads, _ = problem.q.shape
    seqlen_k = problem.k.shape[1]
    mask = problem.options.get("mask")
    if mask is not None:
        return int(mask.plan(batch, heads, seqlen_q, seqlen_k).key_slots[-1])
    queries, keys = (-(-seqlen // TILE) for seqlen in (seqlen_q, seqlen_k))
    if "window_size" in problem.options:  # same number of queries for each key tile
        left, right = problem.options["window_size"]
        return int(keys * min(queries, (left + right + 2 * TILE - 2) // TILE + 1))
    if not problem.options:
        return queries * keys
    assert problem.visible is not None
    padding = (0, -seqlen_k % TILE, 0, -seqlen_q % TILE)
    visible = torch.nn.functional.pad(problem.visible, padding)
    tiles = visible.unflatten(-1, (-1, TILE)).any(-1).unflatten(-2, (-1, TILE)).any(-2)
    return int(tiles.sum())


def is_fused(problem: Problem) -> bool:
    """Tell if the last backward of such a problem computed all gradients in one kernel."""
    columns, values = problem.q.shape[-1], problem.v.shape[-1]
    fits = columns <= 128 or (columns <= 192 and values <= 128)
    return fits and "bwd_fused" in last_variant()


def stored(problem: Problem) -> int:
    """Return the bytes that the kernels of a backward in one chunk pass to each other."""
    batch, seqlen_q, heads, _ = problem.q.shape
    if not is_fused(problem):
        return 8192 * batch * heads * count_slots(problem)
    rows = batch * heads * ceil_to(seqlen_q, 128)
    columns = next(size for size in COMPILED_SM90 if size >= problem.q.shape[-1])
    return 4 * rows * columns + ceil_to(4 * (1 + rows // TILE), 256)


def statistics(problem: Problem) -> int:
    """Return the bytes of lse and delta, including float32 normalizers."""
    batch, seqlen_q, heads, _ = problem.q.shape
    each = 12 if problem.q.dtype == torch.float32 else 8
    return ceil_to(each * batch * heads * ceil_to(seqlen_q, 128), 256)


def gradients(problem: Problem) -> int:
    """Return the bytes of dq, dk, dv."""
    return problem.q.nbytes + problem.k.nbytes + problem.v.nbytes


@pytest.mark.parametrize(
    "name", ["full", "causal", "window", "sixteen-blocks", "dense-per-batch-and-head", "tiles"]
)
def test_memory_is_what_the_formula_says(
    name: str, head_dims: tuple[int, int], half: torch.dtype
) -> None:
    problem = masked_problem(
        name,
        batch=4,
        seqlen_q=1000,
        seqlen_k=1100,
        num_heads=8,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        dtype=half,
    )
    fixed = gradients(problem) + statistics(problem)
    assert peak_of(backward_of(problem)) == fixed + stored(problem)


def test_memory_of_a_group_split_is_what_the_formula_says(
    head_dims: tuple[int, int], half: torch.dtype
) -> None:
    problem = masked_problem(
        "full",
        seqlen_q=512,
        num_heads=16,
        num_heads_kv=1,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        dtype=half,
    )
    fixed = gradients(problem) + statistics(problem)
    partial = peak_of(backward_of(problem)) - fixed - stored(problem)
    sizes = COMPILED_SM90 if "sm90" in last_variant()["fwd"]["family"] else COMPILED
    compiled = [next(size for size in sizes if size >= dim) for dim in head_dims]
    # Group splits, times query splits if fused.
    allowed = {4 * parts * 512 * sum(compiled) for parts in (2, 4, 8, 16, 32)}
    assert partial in allowed | {0}


def test_memory_without_a_workspace_is_that_of_the_statistics(
    head_dims: tuple[int, int], dtype: torch.dtype
) -> None:
    problem = random_problem(
        batch=2, seqlen_q=777, num_heads=8, num_heads_kv=2, head_dim=head_dims[0], dtype=dtype
    )
    with workspace(0):
        assert peak_of(backward_of(problem)) == gradients(problem) + statistics(problem)


@pytest.mark.parametrize("name", ["causal", "sixteen-blocks", "dense-per-head"])
@pytest.mark.parametrize("megabytes", [5, 20, 60])
def test_the_budget_is_kept(megabytes: int, name: str, dtype: torch.dtype) -> None:
    problem = masked_problem(
        name,
        batch=4,
        seqlen_q=1500,
        num_heads=8,
        num_heads_kv=2,
        head_dim=128,
        dtype=dtype,
    )
    with workspace(megabytes):
        peak = peak_of(backward_of(problem))
    fixed = gradients(problem) + statistics(problem)
    assert fixed <= peak <= fixed + (megabytes << 20) + 4 * 256


def test_memory_of_documents_follows_the_longest(half: torch.dtype) -> None:
    lengths = (300, 0, 1000, 65, 700)
    packed = pack(lengths, num_heads=8, num_heads_kv=8, head_dim=64, dtype=half)
    total = sum(lengths)
    rows = ceil_to(total + 128 * len(lengths), 128)
    with workspace(0):
        peak = peak_of(lambda: attend_packed(packed, poison=False))
    boundaries = 2 * 4 * (len(lengths) + 1)
    tensors = 4 * packed.problem.q.nbytes + 4 * 8 * total  # out, dq, dk, dv, lse
    assert peak == tensors + boundaries + ceil_to(8 * 8 * rows, 256)


def has_room(gigabytes: int) -> None:
    """Skip the test on a GPU with less memory than this."""
    total = torch.cuda.get_device_properties(0).total_memory
    if total < gigabytes << 30:
        pytest.skip(f"needs {gigabytes} GB of GPU memory")


@pytest.mark.parametrize("name", ["full", "sixteen-blocks"])
def test_offsets_past_2_to_the_31_elements_are_right(name: str, half: torch.dtype) -> None:
    has_room(30)
    problem = masked_problem(name, batch=3, seqlen_q=512, num_heads=2, dtype=half)

    def spread(x: torch.Tensor) -> torch.Tensor:
        batch, _, heads, dim = x.shape
        room = torch.empty((batch - 1) * (2**30 + 64) + x[0].numel(), dtype=half, device="cuda")
        return room.as_strided(x.shape, (2**30 + 64, heads * dim, dim, 1)).copy_(x)

    near = attend(problem)
    for what in ("q", "k", "v", "dout"):
        changed: dict[str, Any] = {what: spread(getattr(problem, what))}
        far = replace(problem, **changed)
        assert_same_bits(near, attend(far, poison=False), f"{what} near and far")


def test_results_past_2_to_the_31_elements_are_right(any_half: torch.dtype) -> None:
    has_room(60)
    batch, seqlen, heads, dim = 16400, 64, 32, 64
    assert batch * seqlen * heads * dim > 2**31
    shapes = ((heads,), (1,), (1,), (heads,))
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (
        torch.empty(batch, seqlen, *shape, dim, device="cuda", dtype=any_half).normal_(
            generator=generator
        )
        for shape in shapes
    )
    result = attend(Problem(q, k, v, dout, options={"causal": True}), poison=False)
    for entry in (0, batch - 1):
        part = slice(entry, entry + 1)
        visible = torch.ones(1, 1, seqlen, seqlen, dtype=torch.bool, device="cuda").tril()
        problem = Problem(q[part], k[part], v[part], dout[part], visible)
        assert_close({name: x[part] for name, x in result.items()}, problem)


@pytest.mark.parametrize("head_dim", [64, 128, 256], ids=lambda dim: f"d{dim}")
def test_rows_past_2_to_the_31_elements_are_right(head_dim: int, any_half: torch.dtype) -> None:
    has_room(40)
    heads, before, last = 32, 64, 300  # left window: keys before the query's own
    seqlen = 2**31 // (heads * head_dim) + last
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, dout = (
        torch.zeros(1, seqlen, *shape, head_dim, device="cuda", dtype=any_half)
        for shape in ((heads,), (1,), (1,), (heads,))
    )
    for x in (q, k, v, dout):  # only the last queries have gradients
        x[:, -last - (0 if x is dout else before) :].normal_(generator=generator)
    problem = Problem(q, k, v, dout, options={"window_size": (before, 0)})
    result = attend(problem, poison=False)
    rows = {"out": last, "lse": last, "dq": last, "dk": last + before, "dv": last + before}
    visible = torch.ones(1, 1, last, last + before, dtype=torch.bool, device="cuda")
    end = Problem(
        q[:, -last:],
        k[:, -last - before :],
        v[:, -last - before :],
        dout[:, -last:],
        visible.tril(before).triu(),
    )
    result["lse"] = result["lse"].transpose(1, 2)
    ends = {name: x[:, -rows[name] :] for name, x in result.items()}
    ends["lse"] = ends["lse"].transpose(1, 2)
    assert_close(ends, end)


def _take_blocks(size: int, taken: list[torch.Tensor]) -> None:
    with suppress(torch.OutOfMemoryError):
        while True:
            taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))


@contextmanager
def memory_left(room: int) -> Iterator[None]:
    """Limit torch's allocator to this many more bytes.

    It first uses up the blocks cached from other tests.
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    reserved = torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction(reserved / total)
    taken: list[torch.Tensor] = []
    try:
        for power in range(30, 19, -1):
            _take_blocks(1 << power, taken)
        torch.cuda.set_per_process_memory_fraction((reserved + room) / total)
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        del taken


@pytest.mark.parametrize("name", ["full", "sixteen-blocks"])
def test_no_memory_for_the_workspace_is_torchs_error_and_leaks_nothing(
    name: str, half: torch.dtype
) -> None:
    problem = masked_problem(name, batch=8, seqlen_q=2048, num_heads=16, head_dim=64, dtype=half)
    call = backward_of(problem)
    want = call()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    # The gradients, 32 MiB each, fit. dS does not: it has 8192 bytes per tile, and up to 1024 tiles
    # for each of 128 heads.
    with memory_left(gradients(problem) + (64 << 20)):
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError, match="of workspace on GPU 0") as caught:
                call()
            assert str(caught.value).startswith("CUDA out of memory. ")
            assert "FLASH_DIST_WORKSPACE_MB" in str(caught.value)
            del caught
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    assert all(torch.equal(a, b) for a, b in zip(want, call(), strict=True))


def test_no_memory_for_the_output_is_torchs_error(half: torch.dtype) -> None:
    q = torch.randn(1, 1 << 16, 16, 64, device="cuda", dtype=half)  # out: 128 MiB
    want = flash_attn_func(q, q[:, :64], q[:, :64])
    with memory_left(16 << 20), pytest.raises(torch.OutOfMemoryError, match="could not allocate"):
        flash_attn_func(q, q[:, :64], q[:, :64])
    assert torch.equal(want, flash_attn_func(q, q[:, :64], q[:, :64]))


# Allocates all GPU memory outside torch, so that the driver has none left to load a kernel. Prints
# the results and the kernels of later calls.
FIRST_LOAD = """
import ctypes, hashlib, sys
import torch
from flash_dist import flash_attn_func, last_variant

dtype = getattr(torch, sys.argv[2])
generator = torch.Generator("cuda").manual_seed(0)
q, k, v = (
    torch.randn(2, 1000, 4, 64, device="cuda", dtype=dtype, generator=generator).requires_grad_()
    for _ in range(3)
)
torch.empty(1 << 28, device="cuda", dtype=torch.uint8)  # torch's own allocations come from here
torch.cuda.synchronize()

def run():
    out = flash_attn_func(q, k, v, causal=True)
    return out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))

if sys.argv[1] == "full":
    driver = ctypes.CDLL("libcuda.so.1")
    taken = []
    for bits in range(36, 11, -1):
        while True:
            pointer = ctypes.c_uint64()
            if driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(1 << bits)):
                break
            taken.append(pointer)
    try:
        run()
        print("no error", file=sys.stderr)
    except RuntimeError as error:  # ours, or torch's own where ours were loaded
        print(error, file=sys.stderr)
    torch.cuda.synchronize()
    for pointer in taken:
        driver.cuMemFree_v2(pointer)
digest = hashlib.sha256()
for x in run():
    digest.update(x.detach().view(torch.uint8).cpu().numpy().tobytes())
kernels = sorted(one["symbol"] for one in last_variant().values())
print(digest.hexdigest(), *kernels)
"""


@pytest.mark.alone
def test_no_memory_at_the_first_load_changes_no_later_bits(half: torch.dtype) -> None:
    def run(mode: str) -> subprocess.CompletedProcess[str]:
        name = str(half).removeprefix("torch.")
        command = [sys.executable, "-c", FIRST_LOAD, mode, name]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)

    free, full = run("free"), run("full")
    assert free.returncode == 0, free.stderr
    assert full.returncode == 0, full.stderr
    assert full.stdout == free.stdout, full.stderr
