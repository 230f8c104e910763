"""Run the aarch64 wheels of dist/ in an emulator: `nox -s arm_test`.

The emulator has no GPU, and torch only with --torch. The test checks that the libraries load and
answer, that doctor names the served GPUs and finds no driver, and that inspect reads the file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ci.install_tests.torch_matrix import CPU_CALL
from flash_dist.errors import FlashDistError
from flash_dist.toolkit.make.command import command
from flash_dist.toolkit.make.project import ROOT, make_once
from flash_dist.toolkit.make.toolchain.cross import TARGETS, run_tool
from flash_dist.toolkit.make.toolchain.nvcc import ToolchainError
from flash_dist.toolkit.make.wheels.artefacts import ArtefactError, find_artefacts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from flash_dist.toolkit.make.toolchain.cross import Target
    from flash_dist.toolkit.make.wheels.artefacts import Artefact

SUITE: Final = "bookworm"  # glibc 2.36, Python 3.11
PYTHON: Final = "3.11"
PACKAGES: Final = ("python3-minimal", "libpython3-stdlib", "libstdc++6")
DEBIAN_NAMES: Final = {"aarch64": "arm64"}
MACHINE: Final = "aarch64"
UNSERVED: Final = "7.5"  # compute capability that no known Arm machine has
# Checks that the library matches the manifest, and that it reports a missing driver.
LIBRARY: Final = """
import platform
from flash_dist.toolkit.builds.manifest import load_manifest
from flash_dist.toolkit.errors import ExtensionError
from flash_dist.toolkit.loading import library
found = [one["symbol"] for one in library.variants()]
declared = [one.symbol for one in load_manifest().kernels]
assert sorted(found) == sorted(declared), set(found) ^ set(declared)
try:
    library.select(0)
except ExtensionError as error:
    refusal = str(error)
else:
    raise SystemExit("a question to the driver was answered where none is")
print(f"{platform.machine()}: {len(found)} kernels as declared; without a driver: {refusal}")
"""


@dataclass(frozen=True)
class Root:
    """An unpacked Debian for another CPU, whose Python runs in an emulator."""

    folder: Path
    emulator: str

    def python(self, *words: str, places: tuple[Path, ...]) -> subprocess.CompletedProcess[str]:
        """Run the Python of this Debian with `places` on sys.path."""
        python = self.folder / "usr" / "bin" / f"python{PYTHON}"
        command = [self.emulator, "-L", str(self.folder), str(python), *words]
        environ = {
            "PATH": os.environ.get("PATH", ""),
            "LC_ALL": "C.UTF-8",
            "PYTHONPATH": os.pathsep.join(str(place.resolve()) for place in places),
            "PYTHONDONTWRITEBYTECODE": "1",
            "COLUMNS": "200",
        }
        return subprocess.run(
            command,
            env=environ,
            cwd=self.folder,  # outside the source tree, so that its flash_dist is not imported
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )


def make_root(folder: Path, target: Target) -> Root:
    """Unpack the Debian packages once, without running their install scripts."""
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


class ArmTestError(FlashDistError):
    """A wheel fails in the emulator."""


class WheelTest:
    """An unpacked wheel, which runs with the dependencies in `site`."""

    def __init__(self, one: Artefact, root: Root, site: Path, folder: Path) -> None:
        self.one = one
        self.root = root
        self.package = folder / "flash_dist"
        self.places = (folder, site)
        shutil.unpack_archive(one.path, folder, "zip")

    def steps(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """Yield the name and the function of each step that needs no torch."""
        yield "library", self.try_library
        numbers = sorted({str(arch.device) for arch in self.one.embedded}, key=float)
        yield "doctor --gpu", partial(self.try_gpus, numbers)
        yield f"doctor --gpu {UNSERVED}", self.try_unserved
        yield "doctor, no GPU", self.try_doctor
        yield "inspect", self.try_inspect

    def try_library(self) -> str:
        """Load the kernel library and call it."""
        return self._run("-c", LIBRARY)

    def try_gpus(self, numbers: list[str]) -> str:
        """Ask doctor about imaginary GPUs that the wheel was built for."""
        checks = self._ask_doctor(",".join(numbers), code=0)
        found = [f"{one['data']['compute_capability']} {one['data']['how']}" for one in checks]
        if len(found) != len(numbers):
            message = f"doctor was asked about {', '.join(numbers)}, it answers {', '.join(found)}"
            raise ArmTestError(message)
        return ", ".join(found)

    def try_unserved(self) -> str:
        """Ask doctor about an imaginary GPU that the wheel has no code for."""
        (check,) = self._ask_doctor(UNSERVED, code=1)
        if check["status"] != "fail":
            message = f"doctor says {check['status']} of {UNSERVED}: {check['summary']}"
            raise ArmTestError(message)
        return str(check["summary"])

    def _ask_doctor(self, gpus: str, *, code: int) -> list[dict[str, Any]]:
        words = ["--gpu", gpus, "--driver", "580", "--only", "build,driver,gpu", "--json"]
        report = json.loads(self._run("-m", "flash_dist", "doctor", *words, code=code))
        return [one for one in report["checks"] if one["name"].startswith("gpu")]

    def try_doctor(self) -> str:
        """Ask doctor about this machine: an emulated CPU without a driver."""
        words = ("-m", "flash_dist", "doctor", "--no-selftest", "--json")
        report = json.loads(self._run(*words, code=None))
        names = {check["name"]: check["status"] for check in report["checks"]}
        told = ", ".join(f"{name} {status}" for name, status in names.items())
        machine = report["environment"]["machine"]
        if (machine, names["build"], names["driver"]) != (MACHINE, "ok", "skip"):
            message = f"doctor says of this {machine} machine: {told}"
            raise ArmTestError(message)
        return f"exit code {report['exit_code']}: {told}"

    def try_inspect(self) -> str:
        """List the GPU code of the library."""
        library = str(self.package / "libflash_dist_kernels.so")
        said = self._run("-m", "flash_dist", "inspect", library)
        targets = [str(arch) for arch in self.one.embedded]
        lacking = [target for target in targets if target not in said]
        if lacking:
            message = f"inspect does not list {', '.join(lacking)}"
            raise ArmTestError(message)
        return ", ".join(targets)

    def try_torch(self) -> str:
        """Import the binding, call the operator on the CPU, and provoke an error."""
        return self._run("-c", CPU_CALL)

    def _run(self, *words: str, code: int | None = 0) -> str:
        done = self.root.python(*words, places=self.places)
        if code is not None and done.returncode != code:
            told = (done.stderr.strip() or done.stdout.strip())[-600:]
            command = " ".join(words[:6])[:60]
            message = f"`python {command}` ended with {done.returncode}: {told}"
            raise ArmTestError(message)
        return done.stdout.strip()


def find_wheels(dist: Path) -> list[Artefact]:
    """Return the wheels of dist/ for the emulated CPU.

    Raises:
        FlashDistError: There is no such wheel.
    """
    found = [one for one in find_artefacts(dist) if one.manifest.arch_set.machine == MACHINE]
    if not found:
        message = f"there is no wheel for {MACHINE} in the folders of `{dist}`"
        raise ArtefactError(message, hint="`nox -s build_arm` makes them")
    return found


def try_wheel(test: WheelTest, *, torch: bool) -> bool:
    """Print the result of every step; return whether all passed."""
    passed = True
    steps = [*test.steps(), *([("torch", test.try_torch)] if torch else [])]
    for name, action in steps:
        start = time.monotonic()
        try:
            outcome, said = "ok", action()
        except (FlashDistError, OSError, ValueError) as error:
            outcome, said, passed = "FAIL", str(error), False
        print(f"{outcome:<5} {name:<18} {said} ({time.monotonic() - start:.1f} s)", flush=True)
    return passed


@command
def main(args: Sequence[str] | None = None) -> int:
    """Run the command; `args` are the folder of the wheels' dependencies, and options."""
    parser = argparse.ArgumentParser(prog="nox -s arm_test --", description="Try aarch64 wheels.")
    parser.add_argument("--site", type=Path, required=True, help="packages for aarch64")
    parser.add_argument("--torch", action="store_true", help="import torch, too: minutes")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of the wheels")
    given = parser.parse_args(args)
    wheels = find_wheels(given.dist)
    root = make_root(ROOT / "build" / f"root-{MACHINE}", TARGETS[MACHINE])
    passed = True
    for one in wheels:
        print(f"{one.file_name}", flush=True)
        with tempfile.TemporaryDirectory(prefix="flash_dist-") as folder:
            test = WheelTest(one, root, given.site, Path(folder))
            passed &= try_wheel(test, torch=given.torch)
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
