"""One-tile products per operand mode, dtype and target: the ptx wrappers on their own.

Compiles tile_gemm.cu with the machine's nvcc; targets other than the GPU's own run through the JIT
of their PTX.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest
import torch

HERE: Final = Path(__file__).resolve().parent
CSRC: Final = HERE.parents[1] / "csrc"
ELEMENTS: Final = {"Fp16": torch.float16, "Bf16": torch.bfloat16}
ROWS, DEPTH = 32, 64
TARGETS: Final = {
    "ptx-7.5-fp16": (75, "", "compute_75", "Fp16"),
    "ptx-8.0-fp16": (80, "", "compute_80", "Fp16"),
    "ptx-8.0-bf16": (80, "", "compute_80", "Bf16"),
    "sass-9.0a-fp16": (90, "a", "sm_90a", "Fp16"),
    "sass-9.0a-bf16": (90, "a", "sm_90a", "Bf16"),
}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        shutil.which("nvcc") is None or not CSRC.is_dir(), reason="needs nvcc and the source tree"
    ),
]


@pytest.fixture(params=list(TARGETS.values()), ids=list(TARGETS), scope="module")
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ctypes.CDLL, str]:
    """Compile the kernels for one target into a library, with a host function per kernel."""
    number, suffix, code, element = request.param
    if suffix and torch.cuda.get_device_capability() != (number // 10, number % 10):
        pytest.skip(f"{code} code does not run on this GPU")
    folder = tmp_path_factory.mktemp(f"{code}_{element}")
    source = folder / "launch.cu"
    source.write_text(
        f'#include "{HERE / "tile_gemm.cu"}"\n'
        'extern "C" int run_gemm(int mode, int rows, void* a, void* b, void* d, void* c) {\n'
        "  tile_gemm<<<1, 128>>>(\n"
        "      mode, rows, (uint16_t*)a, (uint16_t*)b, (uint16_t*)d, (float*)c);\n"
        "  return cudaDeviceSynchronize();\n}\n"
        'extern "C" int run_store(int rows, void* c, void* dst) {\n'
        "  tile_store<<<1, 32>>>(rows, (float*)c, (uint16_t*)dst);\n"
        "  return cudaDeviceSynchronize();\n}\n"
    )
    library = folder / "tile.so"
    command = [
        "nvcc",
        "-O1",
        "-std=c++17",
        "-shared",
        "-Xcompiler=-fPIC",
        f"-I{CSRC}",
        f"-DTARGET={number}",
    ]
    command += [f"-DELEMENT={element}", f"-gencode=arch=compute_{number}{suffix},code={code}"]
    if suffix:
        command.append(f"-DTARGET_SUFFIX='{suffix}'")
    subprocess.run([*command, "-o", str(library), str(source)], check=True)
    return ctypes.CDLL(str(library)), element


def pointer(x: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


@pytest.mark.parametrize("rows", [32, 17], ids=["whole", "zero-filled"])
@pytest.mark.parametrize("mode", [0, 1, 2], ids=["a-bt", "registers-b", "transposed-b"])
def test_a_tile_product_is_exact_up_to_rounding(
    compiled: tuple[ctypes.CDLL, str], mode: int, rows: int
) -> None:
    library, element = compiled
    dtype = ELEMENTS[element]
    a, b, d = (torch.randn(ROWS, DEPTH, device="cuda").to(dtype) for _ in range(3))
    for x in (a, b, d):
        x[rows:] = torch.nan
    c = torch.full((ROWS, ROWS if mode == 0 else DEPTH), torch.nan, device="cuda")
    torch.cuda.synchronize()
    assert library.run_gemm(mode, rows, pointer(a), pointer(b), pointer(d), pointer(c)) == 0
    left, right, last = (
        torch.where(torch.arange(ROWS, device="cuda")[:, None] < rows, x, 0).double()
        for x in (a, b, d)
    )
    product = left @ right.T
    if mode:
        inner = product.float().to(dtype).double()
        product = (inner if mode == 1 else inner.T) @ last
    tolerance = 1e-4 if mode == 0 else 4 * torch.finfo(dtype).eps
    assert (c.double() - product).abs().max() <= tolerance * product.abs().max()


@pytest.mark.parametrize("rows", [32, 17])
def test_stored_rows_are_rounded_and_no_others_are_touched(
    compiled: tuple[ctypes.CDLL, str], rows: int
) -> None:
    library, element = compiled
    c = torch.randn(ROWS, DEPTH, device="cuda")
    dst = torch.full((ROWS, DEPTH), 7.0, device="cuda", dtype=ELEMENTS[element])
    torch.cuda.synchronize()
    assert library.run_store(rows, pointer(c), pointer(dst)) == 0
    assert torch.equal(dst[:rows], c[:rows].to(dst.dtype))
    assert (dst[rows:] == 7).all()
