"""What tests/gpu compile on a machine with a GPU compiles here, too."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from csrc.headers import render_wgmma_shapes
from flash_dist.toolkit.make.project import SOURCES
from tests.readers.tools import needs, run

pytestmark = needs("nvcc")

GPU: Final = Path(__file__).resolve().parents[1] / "gpu"


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("tile_gemm.cu", ["-DTARGET=80"]),
        ("tile_gemm.cu", ["-DTARGET=90", "-DTARGET_SUFFIX='a'"]),
        ("warpgroup_tile.cu", []),
    ],
)
def test_a_source_of_the_gpu_tests_compiles(
    source: str, options: list[str], tmp_path: Path
) -> None:
    (tmp_path / "wgmma_shapes.h").write_text(render_wgmma_shapes(), encoding="utf-8")
    code = "compute_80" if "-DTARGET=80" in options else "compute_90a"
    options = [*options, "-std=c++17", "-DELEMENT=Bf16", f"-arch={code}", "-ptx"]
    run("nvcc", *options, "-I", SOURCES, "-I", tmp_path, GPU / source, "-o", tmp_path / "tile.ptx")
