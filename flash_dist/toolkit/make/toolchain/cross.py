"""Compile on x86_64 for another CPU: nvcc of one CUDA toolkit, headers and libraries of another."""

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

VARIABLE: Final = f"{VARIABLES}MACHINE"  # the CPU that is compiled for, as `uname -m` says it
PROGRAMS: Final = ("bin", "nvvm")  # folders of a toolkit with what runs where it is compiled


@dataclass(frozen=True)
class Target:
    """A CPU that is compiled for, and what Debian and Ubuntu call the tools for it."""

    machine: str
    folder: str  # nvcc's `--target-directory`
    triple: str
    packages: str

    @property
    def gxx(self) -> str:
        """The cross compiler."""
        return f"{self.triple}-g++"

    @property
    def emulator(self) -> tuple[str, ...]:
        """What runs a program of this CPU, with the libraries of the cross compiler."""
        return (f"qemu-{self.machine}-static", "-L", f"/usr/{self.triple}")

    @property
    def uv_options(self) -> tuple[str, ...]:
        """What lets uv install the packages of this CPU."""
        return ("--python-platform", f"{self.machine}-manylinux_2_28")

    @property
    def pip_options(self) -> tuple[str, ...]:
        """What lets pip install the packages of this CPU: it takes a tag at its word."""
        tags = [f"manylinux_2_{minor}" for minor in range(28, 16, -1)] + ["manylinux2014"]
        words = [word for tag in tags for word in ("--platform", f"{tag}_{self.machine}")]
        return (*words, "--only-binary=:all:")

    def environ(self) -> dict[str, str]:
        """Return the variables of a build for this CPU."""
        return {VARIABLE: self.machine, "CXX": self.gxx}

    def definitions(self) -> dict[str, str]:
        """Return what CMake must know."""
        return {
            "CMAKE_SYSTEM_NAME": "Linux",
            "CMAKE_SYSTEM_PROCESSOR": self.machine,
            "CMAKE_CUDA_FLAGS": f"--target-directory {self.folder}",
        }


TARGETS: Final = {
    "aarch64": Target(
        "aarch64",
        "sbsa-linux",
        "aarch64-linux-gnu",
        "g++-aarch64-linux-gnu qemu-user-static",
    )
}


def target_machine(environ: Mapping[str, str] = os.environ) -> str:
    """Return the CPU that a build is for."""
    return environ.get(VARIABLE) or DEFAULT_MACHINE


def find_target(environ: Mapping[str, str] = os.environ) -> Target | None:
    """Return what a build is for; None: CPUs like those that compile."""
    return TARGETS.get(target_machine(environ))


def require_tools(target: Target, environ: Mapping[str, str] = os.environ) -> None:
    """Insist on the programs of Debian's packages."""
    needed = (target.gxx, target.emulator[0])
    missing = [name for name in needed if shutil.which(name, path=environ.get("PATH")) is None]
    if missing:
        message = f"wheels for {target.machine} need {' and '.join(missing)}, not found on PATH"
        hint = f"`apt-get install {target.packages}` on Debian, Ubuntu; `nox -s image` has them"
        raise ToolchainError(message, hint=hint)


def assemble_home(toolkit: Path, parts: Path, target: Target) -> None:
    """Make a CUDA_HOME of what was installed for another CPU.

    Args:
        toolkit: CUDA_HOME of the same version for this CPU: nvcc, cicc and ptxas are taken.
        parts: CUDA_HOME without programs, with headers and libraries for the other.
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
    """Add the headers that come in one package with nvcc: they are the same for every CPU."""
    for path in have.iterdir():
        if path.is_file() and not (folder / path.name).exists():
            shutil.copy2(path, folder)


# The C function of the library that lists its kernels, and a program that prints what it returns.
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
    """Return the list of kernels that a library tells: from a program that an emulator runs."""
    program = library.with_name("ask")
    source = program.with_suffix(".cpp")
    source.write_text(PROGRAM, encoding="utf-8")
    command = [target.gxx, "-o", str(program), str(source), str(library), "-Wl,-rpath,$ORIGIN"]
    run_tool(command)
    return run_tool([*target.emulator, str(program)])


def run_tool(command: Sequence[str]) -> str:
    """Return what a program prints; raise with what it complains of."""
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
