"""Installs nvcc in a container, from PyPI: cibuildwheel's before-all step.

nvcc stays in the build folder, which outlives the container; /opt/cuda links to it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ...builds.published import load_archsets
from ..building.choose import NAMED, toolkits_of
from ..command import command
from ..project import ARCHSETS, build_folder
from ..toolchain.cross import find_target, require_tools
from ..toolchain.install import install_toolkit
from ..toolchain.nvcc import tool_version
from ..toolchain.preflight import check, read_host

HOME = Path("/opt/cuda")


def _install(folder: Path, *words: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
    subprocess.run([*command, *words], check=True)


def wanted_toolkit() -> str:
    """Return the CUDA version for the set to build."""
    names = os.environ.get(NAMED, "").split()
    return toolkits_of(names, os.environ, load_archsets(ARCHSETS))[0]


@command
def main() -> int:
    """Run the command and return its exit status."""
    target = find_target()
    if target:
        require_tools(target)
    found = check(read_host(os.environ), wanted=wanted_toolkit())
    print(found, flush=True)
    cuda, folder = found.toolkit, build_folder() / f"cuda-{found.toolkit}"
    options = target.pip_options if target else ()
    home = install_toolkit(cuda, folder, _install, target, options)
    HOME.symlink_to(home)
    print(f"nvcc {tool_version(home, 'nvcc')} in {HOME}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
