"""Run a wheel on the newest Debian: its glibc, its Python, torch from the index.

mmdebstrap makes a root beside this system's, with torch and the wheel in a folder of it. All is
deleted at the end. `toolkit/make/container/smoke_test.py` tests the oldest glibc, in a container.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ci.install_tests.clients import call_openly
from ci.install_tests.results import InstallError, NotRunError
from ci.install_tests.torch_matrix import FREE_BYTES, PROBE, read_probe
from flash_dist.toolkit.make.command import command
from flash_dist.toolkit.make.project import load_project
from flash_dist.toolkit.make.wheels.artefacts import read_artefact

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flash_dist.toolkit.make.wheels.artefacts import Artefact

MIRROR: Final = "http://deb.debian.org/debian"
PACKAGES: Final = "python3,libgomp1,libstdc++6,util-linux"
SITE: Final = "opt/site"
CHECKS: Final = "system,torch,install,build,extension"
NOTHING_CHECKED: Final = 3  # doctor's exit status without a GPU


@dataclass(frozen=True)
class Root:
    """A Debian in a folder."""

    path: Path

    def make(self, suite: str) -> None:
        """Install Debian; check its signatures, but not its dates: mirrors may be snapshots."""
        fresh = '--aptopt=Acquire::Check-Valid-Until "false"'
        command = ["mmdebstrap", "--quiet", "--variant=apt", fresh, f"--include={PACKAGES}"]
        call_openly([*command, suite, str(self.path), MIRROR], os.environ)

    def install(self, *requirements: str) -> None:
        """Install with uv for the Python in the root."""
        words = ["--quiet", "--no-cache", "--target", str(self.path / SITE)]
        words += ["--python-version", self.python(), "--only-binary", ":all:"]
        call_openly(["uv", "pip", "install", *words, *requirements], os.environ)

    def python(self) -> str:
        """Return the version of its Python: `3.14.2`."""
        code = "import platform; print(platform.python_version())"
        return self.run("-c", code).strip()

    def run(self, *words: str, fine: Sequence[int] = (0,)) -> str:
        """Run its Python in it, with /proc and without a network."""
        inside = ["unshare", "--net", "--pid", "--fork", f"--root={self.path}", "--wd=/"]
        command = [*inside, "--mount-proc", "/usr/bin/python3", *words]
        environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"/{SITE}", "HOME": "/root"}
        return call_openly(command, environ, fine=fine)


def check_machine() -> None:
    """Check the requirements of the test.

    Raises:
        NotRunError: Something is missing.
    """
    if os.geteuid():
        message = "making another Debian needs root"
        raise NotRunError(message, hint="run it as root in a container or a virtual machine")
    if shutil.which("mmdebstrap") is None:
        message = "`mmdebstrap` is not on PATH"
        raise NotRunError(message, hint="apt-get install mmdebstrap")
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < FREE_BYTES:
        message = f"{free / 1e9:.1f} GB are free in {tempfile.gettempdir()}"
        raise NotRunError(message, hint=f"it takes {FREE_BYTES / 1e9:.0f} GB, TMPDIR says where")


def try_wheel(one: Artefact, root: Root, torch: str) -> None:
    """Import, call the operator, run doctor; print the results.

    Raises:
        InstallError: A result is wrong.
    """
    root.install(f"torch=={torch}.*", str(one.path))
    print(read_probe(root.run("-c", PROBE))[1])
    words = ("-m", "flash_dist", "doctor")
    loaded = root.run(*words, "--only", CHECKS, "--json", fine=(0, NOTHING_CHECKED))
    _require_ok(loaded)
    arch = next(arch for arch in one.embedded if not arch.ptx)
    _require_ok(root.run(*words, "--gpu", str(arch.device), "--driver", "580", "--json"))


def _require_ok(report: str) -> None:
    for check in json.loads(report)["checks"]:
        print(f"[{check['status']}]  {check['name']}: {check['summary']}")
        if check["status"] == "fail":
            message = f"doctor fails `{check['name']}`: {check['summary']}"
            raise InstallError(message)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="nox -s root_test --", description="Try a newer Debian.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--suite", default="sid", help="of Debian (default: %(default)s)")
    parser.add_argument("--torch", default=load_project().torch_tested_max, metavar="X.Y")
    args = parser.parse_args(argv)
    one = read_artefact(args.wheel.resolve())
    check_machine()
    with tempfile.TemporaryDirectory(prefix="flash_dist-root-") as folder:
        root = Root(Path(folder) / "debian")
        root.make(args.suite)
        release = (root.path / "etc" / "debian_version").read_text(encoding="utf-8").strip()
        print(f"Debian {release}, Python {root.python()}: {one.file_name}", flush=True)
        try_wheel(one, root, args.torch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
