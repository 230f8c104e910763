"""One-tile products and stores per operand mode, head_dim, dtype and target.

Compiles tile_gemm.cu with the machine's nvcc; other targets than the GPU's own run as JIT-compiled
PTX.
"""

from __future__ import annotations

import ctypes
import subprocess
from itertools import product
from typing import Final

import pytest
import torch

from tests.gpu.sources import HERE, NEEDS_NVCC, include_flags

ELEMENTS: Final = {"Fp16": torch.float16, "Bf16": torch.bfloat16}
ROWS: Final = 32
HEAD_DIMS: Final = (32, 64, 96, 128, 160, 192, 224, 256)
MODES: Final = (  # in the order of tile_gemm.cu
    "a-bt",
    "a-bt-8-columns",
    "registers-b",
    "transposed-b",
    "two-warps",
    "two-warps-8-columns",
)
SCORES: Final = MODES[:2]  # only the first product; other modes round S for a second product
TARGETS: Final = {
    "ptx-7.5-fp16": (75, "", "compute_75", "Fp16"),
    "ptx-8.0-fp16": (80, "", "compute_80", "Fp16"),
    "ptx-8.0-bf16": (80, "", "compute_80", "Bf16"),
    "sass-9.0a-fp16": (90, "a", "sm_90a", "Fp16"),
    "sass-9.0a-bf16": (90, "a", "sm_90a", "Bf16"),
}
SPANS: Final = {  # rows that exist, and missing columns
    "whole": (0, 32, 0),
    "first-rows": (0, 17, 0),
    "inner-rows": (5, 29, 0),
    "first-columns": (0, 32, 24),
    "inner-part": (9, 23, 8),
}

pytestmark = [
    pytest.mark.gpu,
    NEEDS_NVCC,
    pytest.mark.parametrize("head_dim", HEAD_DIMS),
]


@pytest.fixture(params=list(TARGETS.values()), ids=list(TARGETS), scope="module")
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ctypes.CDLL, torch.dtype]:
    """Compile the kernels for one target into a library."""
    number, suffix, code, element = request.param
    if suffix and torch.cuda.get_device_capability() != (number // 10, number % 10):
        pytest.skip(f"{code} code does not run on this GPU")
    folder = tmp_path_factory.mktemp(f"{code}_{element}")
    path = folder / "tile.so"
    command = ["nvcc", "-O1", "-std=c++17", "-shared", "-Xcompiler=-fPIC", *include_flags(folder)]
    command += [f"-DTARGET={number}", f"-DELEMENT={element}"]
    command += [f"-gencode=arch=compute_{number}{suffix},code={code}"]
    if suffix:
        command.append(f"-DTARGET_SUFFIX='{suffix}'")
    subprocess.run([*command, "-o", str(path), str(HERE / "tile_gemm.cu")], check=True)
    library = ctypes.CDLL(str(path))
    library.run_gemm.restype = library.run_store.restype = ctypes.c_bool
    return library, ELEMENTS[element]


def pointer(x: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def multiply(
    compiled: tuple[ctypes.CDLL, torch.dtype], mode: str, head_dim: int, span: tuple[int, int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a mode's product and float64's; absent elements are NaN in memory."""
    library, dtype = compiled
    first, end, absent = span
    exists = torch.zeros(ROWS, head_dim, dtype=torch.bool, device="cuda")
    exists[first:end, : head_dim - absent] = True
    drawn = [torch.randn(ROWS, head_dim, device="cuda").to(dtype) for _ in range(3)]
    given = [x.masked_fill(~exists, torch.nan) for x in drawn]
    left, right, last = (x.masked_fill(~exists, 0).double() for x in drawn)
    wanted = left @ right.T
    if mode not in SCORES:
        scores = wanted.float().to(dtype).double()
        wanted = (scores.T if mode == "transposed-b" else scores) @ last

    c = torch.full(wanted.shape, torch.nan, device="cuda")
    torch.cuda.synchronize()
    numbers = (head_dim, MODES.index(mode), first, end, head_dim - absent)
    assert library.run_gemm(*numbers, *map(pointer, (*given, c)))
    return c.double(), wanted


@pytest.mark.parametrize("mode", MODES)
def test_a_tile_product_is_exact_up_to_rounding(
    compiled: tuple[ctypes.CDLL, torch.dtype], mode: str, head_dim: int
) -> None:
    tolerance = 1e-4 if mode in SCORES else 4 * torch.finfo(compiled[1]).eps
    for name, span in SPANS.items():
        found, wanted = multiply(compiled, mode, head_dim, span)
        assert (found - wanted).abs().max() <= tolerance * wanted.abs().max(), name


@pytest.mark.parametrize("by_two", [False, True], ids=["one-warp", "two-warps"])
def test_stored_rows_are_rounded_and_no_others_are_touched(
    compiled: tuple[ctypes.CDLL, torch.dtype], *, head_dim: int, by_two: bool
) -> None:
    library, dtype = compiled
    c = torch.randn(ROWS, head_dim, device="cuda")
    for rows, columns in product((32, 17, 7), (head_dim, head_dim - 24)):
        dst = torch.full((ROWS, head_dim), 7.0, device="cuda", dtype=dtype)
        want = dst.clone()
        want[:rows, :columns] = c[:rows, :columns].to(dtype)
        torch.cuda.synchronize()
        assert library.run_store(head_dim, by_two, rows, columns, pointer(c), pointer(dst))
        assert torch.equal(dst, want), f"{rows} rows, {columns} columns"
