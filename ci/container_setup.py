"""Bring nvcc into a container, from PyPI: cibuildwheel's before-all step.

It stays in the build folder, which outlives the container; /opt/cuda leads there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from ci.choose import toolkits_of
from ci.cuda12 import CUDA as CUDA_12
from ci.cuda12 import PACKAGES
from ci.preflight import check, read_host
from ci.project import ARCHSETS, ROOT, build_folder
from ci.toolchain import complete_links, tool_version
from flash_dist.errors import FlashDistError
from flash_dist.published import load_archsets

HOME = Path("/opt/cuda")


def install_toolkit(cuda: str, folder: Path) -> Path:
    """Install the compiler once, and return its CUDA_HOME."""
    complete = folder / "complete"
    home = folder / "home" if cuda == CUDA_12 else folder / "nvidia" / "cu13"
    if complete.is_file():
        return home
    shutil.rmtree(folder, ignore_errors=True)
    if cuda == CUDA_12:
        for name, packages in PACKAGES.items():
            _install(folder / name, "--no-deps", *packages)
        command = [sys.executable, "-m", "ci.cuda12", str(folder), str(home)]
        subprocess.run(command, check=True)
    else:
        _install(folder, f"cuda-toolkit[nvcc,cccl]=={cuda}.*")
        complete_links(home)
    complete.touch()
    return home


def _install(folder: Path, *words: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
    subprocess.run([*command, *words], check=True)


def wanted_toolkit() -> str:
    """Return the CUDA version of the set that is built."""
    names = os.environ.get("FLASH_DIST_ARCH_SET", "").split()
    return toolkits_of(names, os.environ, load_archsets(ARCHSETS))[0]


def main() -> int:
    """Command line."""
    try:
        found = check(read_host(ROOT, os.environ), wanted=wanted_toolkit())
    except FlashDistError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(found, flush=True)
    home = install_toolkit(found.toolkit, build_folder() / f"cuda-{found.toolkit}")
    HOME.symlink_to(home)
    print(f"nvcc {tool_version(home, 'nvcc')} in {HOME}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
