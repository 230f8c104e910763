"""A Debian root for another CPU, in which an emulator runs Python; nothing is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from flash_dist.toolkit.make.project import make_once
from flash_dist.toolkit.make.toolchain.cross import run_tool
from flash_dist.toolkit.make.toolchain.nvcc import ToolchainError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from flash_dist.toolkit.make.toolchain.cross import Target

SUITE: Final = "bookworm"  # glibc 2.36, Python 3.11
PYTHON: Final = "3.11"
PACKAGES: Final = ("python3-minimal", "libpython3-stdlib", "libstdc++6")
DEBIAN_NAMES: Final = {"aarch64": "arm64"}


@dataclass(frozen=True)
class Done:
    """Result of a program in the emulator."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Root:
    """The folder, and its emulator."""

    folder: Path
    emulator: str

    def python(self, *words: str, places: tuple[Path, ...], timeout: float = 600) -> Done:
        """Run its Python with some folders on sys.path."""
        python = self.folder / "usr" / "bin" / f"python{PYTHON}"
        command = [self.emulator, "-L", str(self.folder), str(python), *words]
        kept: Mapping[str, str] = {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C.UTF-8"}
        seen = os.pathsep.join(str(place.resolve()) for place in places)
        environ = {**kept, "PYTHONPATH": seen, "COLUMNS": "200"}
        environ["PYTHONDONTWRITEBYTECODE"] = "1"
        done = subprocess.run(
            command,
            env=environ,
            cwd=self.folder,  # without the source tree's own flash_dist
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
        )
        return Done(done.returncode, done.stdout, done.stderr)


def make_root(folder: Path, target: Target) -> Root:
    """Unpack the packages once, without running their programs."""
    root = Root(folder, target.emulator[0])
    with make_once(folder) as missing:
        if missing:
            _unpack(root, target)
    return root


def _unpack(root: Root, target: Target) -> None:
    folder = root.folder
    programs = ("debootstrap", "dpkg-deb", root.emulator)
    absent = [name for name in programs if shutil.which(name) is None]
    if absent:
        message = f"a root for {target.machine} needs {', '.join(absent)}, not found on PATH"
        raise ToolchainError(message, hint="`apt-get install debootstrap qemu-user-static`")
    folder.parent.mkdir(parents=True, exist_ok=True)
    options = [f"--arch={DEBIAN_NAMES[target.machine]}", "--foreign", "--variant=minbase"]
    run_tool(["debootstrap", *options, f"--include={','.join(PACKAGES)}", SUITE, str(folder)])
    archives = sorted((folder / "var/cache/apt/archives").glob("*.deb"))
    for path in archives:
        run_tool(["dpkg-deb", "-x", str(path), str(folder)])
        path.unlink()
