"""Compiles on x86_64 for another CPU: with nvcc for x86_64, and libraries for the other CPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...product import SYMBOLS, VARIABLES
from ...targets.archs import DEFAULT_MACHINE
from .nvcc import ToolchainError, complete_links

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

VARIABLE: Final = f"{VARIABLES}MACHINE"  # the target CPU, as in `uname -m`
PROGRAMS: Final = ("bin", "nvvm")  # folders of a toolkit with programs, which run on x86_64


@dataclass(frozen=True)
class Target:
    """A target CPU, and the names of its tools in Debian and Ubuntu."""

    machine: str
    folder: str  # nvcc's `--target-directory`
    triple: str  # prefix of the names of tools
    packages: str  # packages with the tools, separated by blanks

    @property
    def gxx(self) -> str:
        """The name of the cross compiler."""
        return f"{self.triple}-g++"

    @property
    def emulator(self) -> tuple[str, ...]:
        """The emulator for programs of this CPU, with the libraries of the cross compiler."""
        return (f"qemu-{self.machine}-static", "-L", f"/usr/{self.triple}")

    @property
    def uv_options(self) -> tuple[str, ...]:
        """Options of uv for packages of this CPU."""
        return ("--python-platform", f"{self.machine}-manylinux_2_28")

    @property
    def pip_options(self) -> tuple[str, ...]:
        """Options of pip for packages of this CPU; pip needs the CPU's exact tags."""
        tags = [f"manylinux_2_{minor}" for minor in range(28, 16, -1)] + ["manylinux2014"]
        words = [word for tag in tags for word in ("--platform", f"{tag}_{self.machine}")]
        return (*words, "--only-binary=:all:")

    def environ(self) -> dict[str, str]:
        """Return the environment variables of a build for this CPU."""
        return {VARIABLE: self.machine, "CXX": self.gxx}

    def definitions(self) -> dict[str, str]:
        """Return the definitions for CMake."""
        return {
            "CMAKE_SYSTEM_NAME": "Linux",
            "CMAKE_SYSTEM_PROCESSOR": self.machine,
            "CMAKE_CUDA_FLAGS": f"--target-directory {self.folder}",
        }


TARGETS: Final = {
    "aarch64": Target(
        "aarch64", "sbsa-linux", "aarch64-linux-gnu", "g++-aarch64-linux-gnu qemu-user-static"
    )
}


def target_machine(environ: Mapping[str, str] = os.environ) -> str:
    """Return the target CPU of a build."""
    return environ.get(VARIABLE) or DEFAULT_MACHINE


def find_target(environ: Mapping[str, str] = os.environ) -> Target | None:
    """Return the target CPU of a cross build; None if the build is for x86_64."""
    return TARGETS.get(target_machine(environ))


def require_tools(target: Target, environ: Mapping[str, str] = os.environ) -> None:
    """Check that the cross compiler and the emulator are on PATH."""
    needed = (target.gxx, target.emulator[0])
    missing = [name for name in needed if shutil.which(name, path=environ.get("PATH")) is None]
    if missing:
        message = f"wheels for {target.machine} need {' and '.join(missing)}, not found on PATH"
        hint = f"`apt-get install {target.packages}` on Debian, Ubuntu; `nox -s image` has them"
        raise ToolchainError(message, hint=hint)


def assemble_home(toolkit: Path, parts: Path, target: Target) -> None:
    """Complete a CUDA_HOME that compiles on x86_64 for another CPU.

    Args:
        toolkit: CUDA_HOME of the same version for x86_64, which has nvcc, cicc and ptxas.
        parts: The CUDA_HOME to complete, with headers and libraries for the other CPU.
        target: The other CPU.
    """
    for name in PROGRAMS:
        shutil.rmtree(parts / name, ignore_errors=True)
        shutil.copytree(toolkit / name, parts / name, symlinks=True)
    _add_headers(toolkit / "include", parts / "include")
    complete_links(parts)
    place = parts / "targets" / target.folder
    place.parent.mkdir(exist_ok=True)
    if not place.exists():
        place.symlink_to("..")
    for info in toolkit.parents[1].glob("nvidia_nvvm-*.dist-info"):
        shutil.copytree(info, parts / "dist-info" / info.name, dirs_exist_ok=True)


def _add_headers(have: Path, folder: Path) -> None:
    """Add missing headers from nvcc's package, which are the same for all CPUs."""
    for path in have.iterdir():
        if path.is_file() and not (folder / path.name).exists():
            shutil.copy2(path, folder)


# The library's C function that lists its kernels, and a program that prints its result.
ASKED: Final = f"{SYMBOLS}variants_json"
PROGRAM: Final = f"""\
#include <cstdint>
#include <cstdio>
#include <vector>
extern "C" int64_t {ASKED}(char*, int64_t);
int main() {{
  std::vector<char> text({ASKED}(nullptr, 0) + 1);
  {ASKED}(text.data(), text.size());
  std::puts(text.data());
}}
"""


def ask_foreign(library: Path, target: Target) -> str:
    """Return a library's list of kernels, from a program that an emulator runs."""
    program = library.with_name("ask")
    source = program.with_suffix(".cpp")
    source.write_text(PROGRAM, encoding="utf-8")
    command = [target.gxx, "-o", str(program), str(source), str(library), "-Wl,-rpath,$ORIGIN"]
    run_tool(command)
    return run_tool([*target.emulator, str(program)])


def run_tool(command: Sequence[str]) -> str:
    """Return the output of a program; if it fails, raise an error with its error output."""
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except FileNotFoundError as error:
        message = f"`{command[0]}` is not installed"
        raise ToolchainError(message) from error
    if done.returncode:
        said = done.stderr.strip() or "it says nothing"
        message = f"`{Path(command[0]).name}` failed with exit code {done.returncode}: {said}"
        raise ToolchainError(message)
    return done.stdout
