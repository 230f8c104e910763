"""Small shared libraries made by the C compiler, without any of the system's."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")


def define(*names: str) -> str:
    """Return C that defines functions."""
    return "".join(f"void {name}(void) {{}}\n" for name in names)


def call(*names: str) -> str:
    """Return C that calls functions of others."""
    declared = "".join(f"void {name}(void);\n" for name in names)
    return declared + "void calls(void) {" + "".join(f"{name}();" for name in names) + "}\n"


@dataclass(frozen=True)
class Lab:
    """A folder to build in."""

    folder: Path

    def build(
        self,
        name: str,
        source: str,
        *options: str,
        needs: tuple[Path, ...] = (),
        version: str = "",
        soname: str = "",
    ) -> Path:
        """Compile a library into a path below the folder.

        Args:
            name: The path.
            source: C.
            options: For the linker.
            needs: Libraries that it shall need.
            version: The symbol version of everything that it defines.
            soname: Its own name; that of the file when empty.
        """
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        code = self.folder / "code.c"
        code.write_text(source or "extern int nothing;\n")
        script = self.folder / "versions"
        script.write_text(f"{version} {{ global: *; }};\n")
        command = ["gcc", "-shared", "-fPIC", "-nostdlib", "-w", str(code), "-o", str(path)]
        command += [f"-Wl,-soname,{soname or path.name}", "-Wl,--no-as-needed", *map(str, needs)]
        command += [f"-Wl,--version-script={script}"] if version else []
        subprocess.run([*command, *options], check=True)
        return path
