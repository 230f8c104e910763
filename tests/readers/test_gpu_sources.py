"""Sources that tests/gpu compile on a machine with a GPU also compile here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from csrc.headers import render_wgmma_shapes
from tests.gpu.sources import HERE, include_flags
from tests.readers.tools import needs, run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = needs("nvcc")


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
    flags = [*options, *include_flags(tmp_path)]
    run("nvcc", *flags, HERE / source, "-o", tmp_path / "tile.ptx")
