"""Single tiles through Hopper's copy engine and the matrix instructions of warpgroups.

Compiles warpgroup_tile.cu with the machine's nvcc.
"""

from __future__ import annotations

import ctypes
import runpy
import subprocess
from typing import Final

import pytest
import torch

from tests.gpu.sources import CSRC, HERE, NEEDS_NVCC, include_flags

ELEMENTS: Final = {"Fp16": torch.float16, "Bf16": torch.bfloat16}
M, K = 64, 128
COLUMNS: Final = (64, 80, 96, 112, 128, 192, 256)  # columns of D
MODES: Final = (  # in the order of warpgroup_tile.cu: whether rows of A and of B are k
    ("by-rows", False, False),
    ("b-by-columns", False, True),
    ("a-by-columns", True, False),
    ("both-by-columns", True, True),
    ("registers", False, False),
    ("registers-b-by-columns", False, True),
)
NAMES: Final = [mode[0] for mode in MODES]
# Batches, rows, kv heads, query heads per kv head, columns.
SHAPES: Final = ((1, 64, 1, 1, 64), (2, 100, 3, 2, 80), (1, 1, 1, 4, 8), (3, 129, 2, 1, 256))

pytestmark = [
    pytest.mark.gpu,
    NEEDS_NVCC,
]


@pytest.fixture(params=list(ELEMENTS), scope="module")
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ctypes.CDLL, torch.dtype]:
    """Compile the kernels into a library."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("sm_90a code does not run on this GPU")
    folder = tmp_path_factory.mktemp(request.param)
    own = runpy.run_path(str(CSRC / "headers.py"))
    (folder / "wgmma_shapes.h").write_text(own["render_wgmma_shapes"](), encoding="utf-8")
    path = folder / "tile.so"
    command = ["nvcc", "-O1", "-std=c++17", "-shared", "-Xcompiler=-fPIC", *include_flags(folder)]
    command += [f"-DELEMENT={request.param}"]
    command += ["-gencode=arch=compute_90a,code=sm_90a", "-o", str(path)]
    command += [str(HERE / "warpgroup_tile.cu"), str(CSRC / "host" / "maps.cpp")]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(path))
    library.run_product.restype = ctypes.c_bool
    library.run_copy.restype = ctypes.c_char_p
    return library, ELEMENTS[request.param]


def pointer(x: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("mode", NAMES)
def test_a_product_of_a_warpgroup_is_exact_up_to_rounding(
    compiled: tuple[ctypes.CDLL, torch.dtype], mode: str, columns: int
) -> None:
    library, dtype = compiled
    number = NAMES.index(mode)
    _, a_by_columns, b_by_columns = MODES[number]
    stride = 264  # row stride in elements, beyond any row; NaN between rows
    memory = [torch.full((257, stride), torch.nan, device="cuda", dtype=dtype) for _ in range(2)]
    a = memory[0][: K if a_by_columns else M, : M if a_by_columns else K]
    b = memory[1][: K if b_by_columns else columns, : columns if b_by_columns else K]
    a.copy_(torch.randn(a.shape, device="cuda"))
    b.copy_(torch.randn(b.shape, device="cuda"))
    left = a.double().T if a_by_columns else a.double()
    right = b.double() if b_by_columns else b.double().T
    for twice in (False, True):
        c = torch.full((M, columns), torch.nan, device="cuda")
        torch.cuda.synchronize()
        arguments = (pointer(a), pointer(b), ctypes.c_int64(stride), pointer(c), twice)
        assert library.run_product(columns, number, *arguments)
        wanted = left @ right * (2 if twice else 1)
        assert (c.double() - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def copy(
    library: ctypes.CDLL, source: torch.Tensor, target: torch.Tensor, shape: tuple[int, ...]
) -> str | None:
    """Copy a view of five axes to another; return the reason if there is no map."""
    batches, rows, heads_kv, members, columns = shape
    strides = [(ctypes.c_int64 * 4)(*x.stride()[:4]) for x in (source, target)]
    torch.cuda.synchronize()
    problem = library.run_copy(
        pointer(source), pointer(target), *strides, batches, rows, heads_kv, members, columns
    )
    return None if problem is None else problem.decode()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda x: "x".join(map(str, x)))
@pytest.mark.parametrize("layout", ["contiguous", "heads-first", "inner-part", "one-head-for-all"])
def test_a_view_is_copied_box_by_box_and_nothing_else_is_written(
    compiled: tuple[ctypes.CDLL, torch.dtype], shape: tuple[int, ...], layout: str
) -> None:
    library, dtype = compiled
    batches, rows, heads_kv, members, columns = shape
    if layout == "heads-first":
        source = torch.randn(batches, heads_kv, members, rows, columns).permute(0, 3, 1, 2, 4)
    elif layout == "inner-part":
        source = torch.randn(batches, rows + 3, heads_kv, members + 1, columns + 16)
        source = source[:, 2 : rows + 2, :, 1:, 8 : columns + 8]
    elif layout == "one-head-for-all":
        source = torch.randn(1, rows, 1, 1, columns).expand(shape)
    else:
        source = torch.randn(shape)
    moved = torch.empty_strided(source.shape, source.stride(), dtype=dtype, device="cuda")
    source = moved.copy_(source) if layout != "one-head-for-all" else source.to("cuda", dtype)
    if layout == "one-head-for-all":
        source = source[:1, :, :1, :1].contiguous().expand(shape)
    memory = torch.full(
        (batches, rows + 2, heads_kv, members, columns + 8), 7.0, dtype=dtype, device="cuda"
    )
    target = memory[:, 1 : rows + 1, :, :, :columns]
    wanted = memory.clone()
    wanted[:, 1 : rows + 1, :, :, :columns] = source
    assert copy(library, source, target, shape) is None
    assert torch.equal(memory, wanted)


def test_views_without_a_map_are_told_apart(compiled: tuple[ctypes.CDLL, torch.dtype]) -> None:
    library, dtype = compiled
    shape = (2, 64, 2, 1, 64)
    memory = torch.zeros(2 * 65 * 2 * 72 + 64, dtype=dtype, device="cuda")
    target = torch.zeros(shape, dtype=dtype, device="cuda")

    def why(strides: tuple[int, ...], offset: int = 0) -> str | None:
        return copy(library, memory.as_strided(shape, strides, offset), target, shape)

    assert why((8192, 128, 64, 64, 1)) is None
    assert "begins at no multiple of 16" in (why((8192, 128, 64, 64, 1), 1) or "")
    assert "no multiple of 16 bytes" in (why((8192, 132, 64, 64, 1)) or "")
    assert "all the same memory" in (why((8192, 0, 64, 64, 1)) or "")
