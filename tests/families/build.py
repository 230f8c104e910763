"""Builds the libraries with one family more: `python -m tests.families.build FOLDER TORCH_HEADERS`.

FOLDER/flash_dist is a package that runs it on a GPU of compute capability 9.0 (tests/gpu), in
which only bfloat16 of head_dim 64 is compiled.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from ci.project import ROOT
from ci.toolchain.nvcc import find_toolchain
from flash_dist.builds.package import BINDING, KERNELS

HERE: Final = Path(__file__).resolve().parent


def write_table(folder: Path) -> Path:
    """Write the table of kernels with the family added."""
    table = folder / "kernels.toml"
    real = (ROOT / "csrc" / "kernels.toml").read_text(encoding="utf-8")
    table.write_text(real + (HERE / "fwd_sm90.toml").read_text(encoding="utf-8"), encoding="utf-8")
    return table


def build(folder: Path, torch_headers: Path | None = None) -> Path:
    """Compile into FOLDER/build and return it; without headers of torch, without the binding."""
    toolchain = find_toolchain()
    out = folder / "build"
    options = {
        "ARCHS": "9.0a",
        "HEAD_DIMS": "64",
        "DTYPES": "bf16",
        "TABLE": write_table(folder),
        "TORCH_INCLUDE": torch_headers or "",
    }
    command = ["cmake", "-S", ROOT / "csrc", "-B", out, "-G", "Ninja"]
    command += [f"-DFLASH_DIST_{name}={value}" for name, value in options.items()]
    command += [
        f"-DCMAKE_CUDA_COMPILER={toolchain.tool('nvcc')}",
        f"-DPython3_EXECUTABLE={sys.executable}",
    ]
    for words in (command, ["cmake", "--build", out]):
        subprocess.run([str(word) for word in words], check=True, stdout=subprocess.DEVNULL)
    return out


def pack(folder: Path, torch_headers: Path) -> Path:
    """Put the libraries into a copy of the package."""
    built = build(folder, torch_headers)
    package = folder / "flash_dist"
    shutil.copytree(ROOT / "flash_dist", package, dirs_exist_ok=True)
    for name in (KERNELS, BINDING):
        shutil.copy2(built / name, package)
    return package


if __name__ == "__main__":
    pack(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
