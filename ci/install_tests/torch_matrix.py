"""Test one wheel with each pair of torch and Python in PAIRS: import it and call its operator.

The operator runs on the CPU. torch and its requirements come from uv's index, 3 to 5 GB per torch,
and are deleted afterwards.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from packaging.version import Version

from ci.install_tests.clients import call_openly, runs_here
from ci.install_tests.results import InstallError, NotRunError, Result, attempt
from flash_dist.toolkit.make.project import read_pyproject
from flash_dist.toolkit.targets.wording import format_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from flash_dist.toolkit.make.wheels.artefacts import Artefact

CLIENT: Final = "torch"
CPU: Final = "+cpu"
FREE_BYTES: Final = 9_000_000_000  # packages and environment of the largest torch take 7.7 GB
STREAM: Final = "aoti_torch_get_current_cuda_stream"

CPU_CALL: Final = Path(__file__).with_name("cpu_call.py").read_text(encoding="utf-8")

# The lookup with ctypes searches the binding and the libraries that the binding needs, as the
# dynamic linker does.
PROBE: Final = f"""{CPU_CALL}
import ctypes, json, sysconfig
print(json.dumps({{
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "python": sysconfig.get_python_version() + sys.abiflags,
    "gil": getattr(sys, "_is_gil_enabled", lambda: True)(),
    "bound": hasattr(ctypes.CDLL(str(operators.EXTENSION)), "{STREAM}"),
    "flash_dist": flash_dist.__version__,
}}))
"""


@dataclass(frozen=True)
class Pair:
    """Versions of torch and Python: `2.15` and `3.13`, or `3.14t` without the GIL."""

    torch: str
    python: str
    cpu: bool = False

    def __str__(self) -> str:
        return f"torch {self.torch}{' (CPU)' if self.cpu else ''}, Python {self.python}"

    @property
    def requirement(self) -> str:
        """The requirement for torch, which names a build without CUDA if `cpu` is True."""
        return f"torch=={self.torch}.0{CPU}" if self.cpu else f"torch=={self.torch}.*"


PAIRS: Final = (
    Pair("2.10", "3.10"),
    Pair("2.10", "3.12"),
    Pair("2.10", "3.13"),
    Pair("2.11", "3.12"),
    Pair("2.13", "3.11", cpu=True),
    Pair("2.14", "3.10"),
    Pair("2.15", "3.11"),
    Pair("2.15", "3.13"),
    Pair("2.15", "3.14"),
    Pair("2.15", "3.14t"),
    Pair("2.15", "3.15"),
    Pair("2.15", "3.15t"),
)


def try_torches(
    artefacts: Sequence[Artefact], pick: str, work: Path, most: int | None = None
) -> Iterator[Result]:
    """Test the wheel of one set with every pair of torch and Python.

    The pairs of one torch share packages.

    Args:
        artefacts: The wheels.
        pick: The set.
        work: A folder for the environments.
        most: The bytes that a pair may download; None for any number.
    """
    wheels = [one for one in artefacts if one.set_name == pick and runs_here(one)]
    for _, group in groupby(PAIRS, key=lambda pair: pair.torch):
        matrix = Matrix(work / "torch", most)
        for pair in group:
            if wheels:
                yield attempt(CLIENT, str(pair), partial(matrix.try_pair, pair, wheels[0]))
            else:
                yield Result(CLIENT, str(pair), "NOT RUN", f"no wheel of {pick} in dist/ runs here")
        shutil.rmtree(matrix.work, ignore_errors=True)


@dataclass(frozen=True)
class Matrix:
    """Environments for one torch, used one after the other, and uv's cache of its packages."""

    work: Path
    most: int | None = None  # most bytes that a pair may download; None for any number

    def try_pair(self, pair: Pair, one: Artefact) -> str:
        """Install the wheel, import it and call its operator."""
        python = find_python(pair.python)
        environment = self.work / "environment"
        try:
            self._install(pair, one, python, environment)
            return _require(pair, one, self._uv(str(environment / "bin" / "python"), "-c", PROBE))
        finally:
            shutil.rmtree(environment, ignore_errors=True)

    def _install(self, pair: Pair, one: Artefact, python: Path, environment: Path) -> None:
        """Install the wheel with all dependencies, as users do."""
        self._require_space()
        self._require_small(pair)
        self._uv("uv", "venv", "--quiet", "--python", str(python), str(environment))
        command = ["uv", "pip", "install", "--quiet", "--python", str(environment / "bin/python")]
        try:
            self._uv(*command, pair.requirement)
        except InstallError as error:
            raise NotRunError(str(error)) from error
        # torch's wheel is large, and the next pair needs a wheel for another Python.
        self._uv("uv", "cache", "clean", "--quiet", "torch")
        self._uv(*command, str(one.path))

    def _require_space(self) -> None:
        if self.work.exists():  # an earlier pair has checked the space
            return
        self.work.mkdir(parents=True)
        free = shutil.disk_usage(self.work).free
        if free < FREE_BYTES:
            message = f"{free / 1e9:.1f} GB are free in {self.work}, {FREE_BYTES / 1e9:.0f} needed"
            raise NotRunError(message)

    def _require_small(self, pair: Pair) -> None:
        """Ask the index for the sizes of torch and its requirements, before anything is downloaded.

        Raises:
            NotRunError: The packages are larger than allowed, or the index lacks a package.
        """
        if self.most is None:
            return
        wanted, lock = self.work / "torch.in", self.work / "pylock.toml"
        wanted.write_text(f"{pair.requirement}\n", encoding="utf-8")
        words = ["--quiet", "--format", "pylock.toml", "--python-version", pair.python.rstrip("t")]
        command = ["uv", "pip", "compile", *words, "--output-file", str(lock), str(wanted)]
        try:
            self._uv(*command)
        except InstallError as error:
            raise NotRunError(str(error)) from error
        size = sum_sizes(read_pyproject(lock)["packages"])
        if size > self.most:
            message = (
                f"{format_size(size)} to download, `--download` allows {format_size(self.most)}"
            )
            raise NotRunError(message)

    def _uv(self, *command: str) -> str:
        dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        kept = {name: value for name, value in os.environ.items() if name not in dropped}
        return call_openly(command, {**kept, "UV_CACHE_DIR": str(self.work / "cache")})


def sum_sizes(packages: Iterable[Mapping[str, Any]]) -> int:
    """Sum the bytes of the largest wheel of each package; local packages count 0."""
    wheels = (one.get("wheels", ()) for one in packages)
    return sum(max((wheel.get("size", 0) for wheel in of), default=0) for of in wheels)


def read_probe(output: str) -> tuple[dict[str, Any], str]:
    """Return the probe's result as data and in words.

    Raises:
        InstallError: The GIL does not match the version of Python, or the stream symbol is bound
            with a torch without CUDA or not bound with a torch with CUDA.
    """
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    said = f"torch {found['torch']}, Python {found['python']}, stream symbol "
    said += "bound" if found["bound"] else "not bound"
    if found["gil"] == found["python"].endswith("t"):
        message = f"{said}, and the GIL is {'on' if found['gil'] else 'off'}"
        raise InstallError(message)
    if found["bound"] != (found["cuda"] is not None):
        message = f"{said}, and torch was built for CUDA {found['cuda']}"
        raise InstallError(message)
    return found, said


def _require(pair: Pair, one: Artefact, output: str) -> str:
    """Check the versions, and return them in words."""
    found, said = read_probe(output)
    release = Version(found["torch"])
    got = (f"{release.major}.{release.minor}", found["python"])
    if got != (pair.torch, pair.python) or pair.cpu != (found["cuda"] is None):
        message = f"asked for {pair}, got {said}"
        raise InstallError(message)
    if found["flash_dist"] != str(one.version):
        message = f"{found['flash_dist']} was imported, expected {one.version}"
        raise InstallError(message)
    return said


def find_python(version: str) -> Path:
    """Find the interpreter of one version, `3.13` or `3.13t`, without downloading.

    Raises:
        NotRunError: This machine has no such Python.
    """
    command = ["uv", "python", "find", "--no-project", "--no-python-downloads", version]
    done = subprocess.run(
        command,
        env={**os.environ, "PATH": _search_path(), "UV_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        message = f"there is no Python {version} on this machine"
        raise NotRunError(message)
    return Path(done.stdout.strip())


def _search_path() -> str:
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    folders = [str(path) for path in sorted(root.glob("versions/*/bin"))]
    return os.pathsep.join([os.environ.get("PATH", os.defpath), *folders])
