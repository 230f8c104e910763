"""Install a wheel on a bare Debian with pip, uv and conda, and run its doctor: `nox -s root_test`.

mmdebstrap makes a Debian root with its own glibc and Python, and nothing from this machine. All
packages come from a local index on this machine, where the wheel's version has no label such as
`+cu130.all`. The test deletes everything at its end. `toolkit/make/container/smoke_test.py` tests
the oldest glibc, in a container.
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

from packaging.tags import sys_tags
from packaging.utils import parse_wheel_filename

from ci.install_tests.clients import call_openly, find_files, serve
from ci.install_tests.conda import CUDA, MACHINE
from ci.install_tests.conda_client import Request, ask
from ci.install_tests.conda_stubs import write_stubs
from ci.install_tests.results import InstallError, NotRunError
from ci.install_tests.torch_matrix import FREE_BYTES, PROBE, read_probe
from flash_dist.toolkit.indexes.index import PROJECT
from flash_dist.toolkit.make.command import command
from flash_dist.toolkit.make.conda.check import recipe_of
from flash_dist.toolkit.make.conda.pack import write_channel
from flash_dist.toolkit.make.project import load_project
from flash_dist.toolkit.make.release.index import write_files
from flash_dist.toolkit.make.release.pypi import make_plain, name_plain
from flash_dist.toolkit.make.wheels.artefacts import read_artefact

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flash_dist.toolkit.make.wheels.artefacts import Artefact

MIRROR: Final = "http://deb.debian.org/debian"
VENV: Final = "/opt/venv"
PREFIX: Final = "/opt/conda"
CHECKS: Final = "system,install,build"
WITH_TORCH: Final = f"{CHECKS},torch,extension"
JUDGED: Final = (0, 1, 3)  # doctor's exit statuses; 1: a check fails, 3: no GPU
INSTALL: Final = {
    "pip": (f"{VENV}/bin/pip", "install", "--no-cache-dir"),
    "uv": (f"{VENV}/bin/uv", "pip", "install", "--no-cache", "--python", VENV),
}


@dataclass(frozen=True)
class Root:
    """A Debian system in a folder."""

    path: Path
    python: str  # name of the system's Python program and package

    def make(self, suite: str) -> None:
        """Install Debian; check its signatures but not their dates, as mirrors may be snapshots."""
        fresh = '--aptopt=Acquire::Check-Valid-Until "false"'
        command = ["mmdebstrap", "--quiet", "--variant=apt", fresh]
        command += [f"--include={self.python},{self.python}-venv", suite, str(self.path), MIRROR]
        call_openly(command, os.environ)

    def version(self) -> str:
        """Return the version of the system's Python: `3.14.2`."""
        code = "import platform; print(platform.python_version())"
        return self.run(self.python, "-c", code).strip()

    def run(self, *words: str, network: bool = False, fine: Sequence[int] = (0,)) -> str:
        """Run a program in the system with /proc, and with the network if `network` is True."""
        apart = ["unshare", "--pid", "--fork", *([] if network else ["--net"])]
        inside = [*apart, f"--root={self.path}", "--wd=/", "--mount-proc"]
        environ = {"PATH": "/usr/bin:/bin", "HOME": "/root"}
        return call_openly([*inside, *words], environ, fine=fine)


def check_machine() -> None:
    """Check the requirements of the test.

    Raises:
        NotRunError: A requirement is missing.
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


def list_small(one: Artefact) -> list[str]:
    """Return the requirements of a wheel, except torch and optional ones."""
    needed = (req for req in one.metadata.requirements if req.name != "torch")
    return [str(req) for req in needed if "extra" not in str(req.marker)]


def write_pypi(folder: Path, one: Artefact, torch: str, python: str) -> None:
    """Write a local index: the wheel without a label, its dependencies for one Python, and uv."""
    write_files(folder, {name_plain(one): make_plain(one)})
    wheel, listed = folder / PROJECT / name_plain(one), folder / "requirements.txt"
    wanted = [str(wheel), f"torch=={torch}.*"] if torch else list_small(one)
    listed.write_text("\n".join(["uv", *wanted]), encoding="utf-8")
    minor = f"--python-version={python.rpartition('.')[0]}"
    resolve = ["uv", "pip", "compile", "--quiet", "--no-header", "--only-binary=:all:", minor]
    call_openly([*resolve, "--output-file", str(listed), str(listed)], os.environ)
    tags = sorted({tag.platform for tag in sys_tags()})
    get = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    get += [minor, *(f"--platform={tag}" for tag in tags), "--dest", str(folder)]
    call_openly([*get, "--requirement", str(listed)], os.environ)
    (folder / wheel.name).unlink(missing_ok=True)
    for path in folder.glob("*.whl"):  # a folder of wheels serves as an index
        project = folder / parse_wheel_filename(path.name)[0]
        project.mkdir()
        path.rename(project / path.name)


def try_clients(one: Artefact, root: Root, url: str, checks: str) -> None:
    """Install by name alone, with pip and then with uv; uninstalling must leave no file.

    Raises:
        InstallError: A result is wrong.
    """
    root.run(root.python, "-m", "venv", VENV)
    source, alone = ("--quiet", "--index-url", url), checks == CHECKS
    small = list_small(one) if alone else []
    root.run(*INSTALL["pip"], *source, "uv", *small, network=True)
    for client, install in INSTALL.items():
        root.run(*install, *source, *(["--no-deps"] if alone else []), PROJECT, network=True)
        print(f"{client} install {PROJECT}", flush=True)
        if not alone:
            print(read_probe(root.run(f"{VENV}/bin/python", "-c", PROBE))[1])
        require_healthy(one, root, checks, f"{VENV}/bin/{PROJECT}")
        root.run(f"{VENV}/bin/pip", "uninstall", "--quiet", "--yes", PROJECT)
        left = find_files(root.path / VENV[1:])
        if left:
            message = f"uninstalling what {client} installed leaves {list(map(str, left))}"
            raise InstallError(message)


def try_conda(one: Artefact, root: Root, work: Path, checks: str) -> None:
    """Install with conda's solver; a stub starts the Python that pip and uv used."""
    recipe, gpu = recipe_of(one), next(arch for arch in one.embedded if not arch.ptx).device
    write_channel(work / "conda", [one], epoch=load_project().epoch)
    write_stubs(work / "stubs", [recipe], f"{VENV}/bin/python", root.version())
    channels = [(work / name).as_uri() for name in ("conda", "stubs")]
    virtual = {**MACHINE, "__cuda": CUDA, "__cuda_arch": str(gpu)}
    prefix, cache = str(root.path / PREFIX[1:]), str(work / "cache")
    ask(Request(channels, [PROJECT], recipe.subdir, virtual, prefix, cache))
    print(f"conda install {PROJECT}: {recipe.build}")
    require_healthy(one, root, checks, f"{PREFIX}/bin/python", "-m", "flash_dist")


def require_healthy(one: Artefact, root: Root, checks: str, *program: str) -> None:
    """Ask doctor about the installation, and about a GPU that the wheel has code for."""
    _require_ok(root.run(*program, "doctor", "--only", checks, "--json", fine=JUDGED))
    arch = next(arch for arch in one.embedded if not arch.ptx)
    words = ("doctor", "--gpu", str(arch.device), "--driver", "580", "--json")
    _require_ok(root.run(*program, *words, fine=JUDGED))


def _require_ok(report: str) -> None:
    for check in json.loads(report)["checks"]:
        print(f"[{check['status']}]  {check['name']}: {check['summary']}")
        if check["status"] == "fail":
            message = f"doctor fails `{check['name']}`: {check['summary']}"
            raise InstallError(message)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="nox -s root_test --", description="Try a bare Debian.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--suite", default="sid", help="of Debian (default: %(default)s)")
    parser.add_argument("--python", default="3", help="3.15 for another of its Pythons")
    parser.add_argument(
        "--torch",
        default=load_project().torch_tested_max,
        metavar="X.Y[.Z]",
        help="of the index (default: %(default)s); empty: install without torch",
    )
    args = parser.parse_args(argv)
    one = read_artefact(args.wheel.resolve())
    check_machine()
    with tempfile.TemporaryDirectory(prefix="flash_dist-root-") as folder:
        work = Path(folder)
        root = Root(work / "debian", f"python{args.python}")
        root.make(args.suite)
        release = (root.path / "etc" / "debian_version").read_text(encoding="utf-8").strip()
        print(f"Debian {release}, Python {root.version()}: {name_plain(one)}", flush=True)
        write_pypi(work / "pypi", one, args.torch, root.version())
        checks = WITH_TORCH if args.torch else CHECKS
        with serve(work / "pypi") as url:
            try_clients(one, root, url, checks)
        try_conda(one, root, work, checks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
