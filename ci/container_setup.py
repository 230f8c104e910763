"""Bring nvcc into a container, from PyPI: cibuildwheel's before-all step.

It stays in the build folder, which outlives the container; /opt/cuda leads there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from ci.preflight import check, read_host
from ci.project import ROOT, build_folder
from ci.toolchain import complete_links, tool_version
from flash_dist.errors import FlashDistError

HOME = Path("/opt/cuda")


def install_toolkit(cuda: str, folder: Path) -> Path:
    """Install the compiler once, and return its CUDA_HOME."""
    home, complete = folder / "nvidia" / "cu13", folder / "complete"
    if not complete.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        packages = f"cuda-toolkit[nvcc,cccl]=={cuda}.*"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
        subprocess.run([*command, packages], check=True)
        complete_links(home)
        complete.touch()
    return home


def main() -> int:
    """Command line."""
    try:
        found = check(read_host(ROOT, os.environ))
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
