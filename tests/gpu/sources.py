"""Sources of the kernels, for tests that compile parts of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

import pytest

HERE: Final = Path(__file__).resolve().parent
CSRC: Final = HERE.parents[1] / "csrc"
TOOLKIT: Final = HERE.parents[1] / "flash_dist" / "toolkit"
NEEDS_NVCC: Final = pytest.mark.skipif(
    shutil.which("nvcc") is None or not (CSRC.is_dir() and TOOLKIT.is_dir()),
    reason="needs nvcc and the source tree",
)


def include_flags(folder: Path) -> list[str]:
    """Write the generated header that all sources need; return the flags of nvcc."""
    (folder / "product.h").write_text("#define KERNEL_NAMESPACE flash_dist\n", encoding="utf-8")
    return [f"-I{path}" for path in (CSRC, TOOLKIT, folder)]
