"""Checks before any download that this machine can compile, and chooses a CUDA toolkit."""

from __future__ import annotations

import os
import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import KernelsError
from ...machine.capacity import count_cores, read_free_memory
from ...targets.devices import first_driver, parse_version
from ..project import BUILD_FOLDER, build_folder
from .nvcc import gxx_version

if TYPE_CHECKING:
    from collections.abc import Mapping

GIB = 1 << 30
MIN_DISK = 3 * GIB  # toolkit 0.3 GiB, objects 0.2 GiB per arch set, wheels, and a reserve
MIN_MEMORY = 2 * GIB
MEMORY_PER_JOB = 3 * GIB // 2  # an estimate: memory of cicc or ptxas for a large backward kernel
MIN_GCC = 9  # the first gcc with all of C++17
_OTHER_DISK = f"free some disk, or let {BUILD_FOLDER} name a folder on another one"
IN_A_CONTAINER = "build in a container: an older distribution, or `nox -s image`"

Version = tuple[int, int]


class PreflightError(KernelsError):
    """Raised if this machine cannot build. The message has the reason, the hint a remedy."""


@dataclass(frozen=True)
class Toolkit:
    """An available CUDA toolkit and the hosts that it compiles on.

    The limits follow from the toolkit's own headers. crt/host_config.h refuses newer gcc.
    crt/math_functions.h declares functions that clash with those of newer glibc: rsqrt with 2.42 in
    12.4, 13.0 and 13.1, sinpi and cospi with 2.41 in 12.4. All toolkits except 12.4 are on PyPI,
    see make/toolchain/cuda12.py.
    """

    cuda: str
    max_gcc: int  # newest major version of gcc
    max_glibc: Version | None = None  # None: any

    def refusal(self, gcc: Version, glibc: Version) -> str | None:
        """Name the part of the host that is too new for the toolkit, g++ or glibc; else None."""
        if gcc[0] > self.max_gcc:
            return f"g++ {gcc[0]}"
        if self.max_glibc is not None and glibc > self.max_glibc:
            return f"glibc {glibc[0]}.{glibc[1]}"
        return None


TOOLKITS = (
    Toolkit("12.4", 13, (2, 40)),
    Toolkit("13.0", 15, (2, 41)),
    Toolkit("13.1", 15, (2, 41)),
    Toolkit("13.2", 15),
    Toolkit("13.3", 15),
    Toolkit("13.4", 16),
    Toolkit("13.5", 16),
)


@dataclass(frozen=True)
class Host:
    """The machine's properties that a build depends on."""

    system: str
    machine: str
    gxx: str  # $CXX or g++
    gcc: Version | None
    glibc: Version | None  # None if the C library is not glibc
    disk: int  # free bytes
    memory: int  # free bytes
    cores: int  # number of CPU cores, or MAX_JOBS if it is set
    folder: Path = Path()  # the build folder, on the disk with `disk` free bytes

    @property
    def jobs(self) -> int:
        """Parallel compilations: one per core, limited by memory."""
        return max(1, min(self.cores, self.memory // MEMORY_PER_JOB))


@dataclass(frozen=True)
class Preflight:
    """A host that can build, and the toolkit to use."""

    host: Host
    toolkit: str
    notes: tuple[str, ...] = ()
    is_own: bool = False  # CUDA_HOME names the toolkit

    def __str__(self) -> str:
        gcc, glibc = self.host.gcc or (0, 0), self.host.glibc or (0, 0)
        line = (
            f"preflight: CUDA {self.toolkit}, g++ {gcc[0]}.{gcc[1]}, glibc {glibc[0]}.{glibc[1]}, "
            f"{self.host.disk / GIB:.0f} GiB of disk and {self.host.memory / GIB:.0f} GiB of "
            f"memory free, {self.host.jobs} jobs"
        )
        return "\n".join([line, *(f"preflight: {note}" for note in self.notes)])


def read_host(environ: Mapping[str, str], root: Path = Path("/")) -> Host:
    """Describe this machine; unknown memory counts as enough for one job.

    Args:
        environ: CXX, MAX_JOBS, and NAME_BUILD_DIR, a folder whose disk needs room for objects.
        root: Folder with /proc and /sys.
    """
    memory = read_free_memory(root)
    folder = build_folder(environ)
    gxx = environ.get("CXX") or "g++"
    return Host(
        system=platform.system(),
        machine=platform.machine(),
        gxx=gxx,
        gcc=_gcc_version(gxx),
        glibc=_glibc_version(),
        disk=shutil.disk_usage(_existing(folder)).free,
        memory=MIN_MEMORY if memory is None else memory,
        cores=_wanted_jobs(environ) or count_cores(root),
        folder=folder,
    )


def _existing(folder: Path) -> Path:
    """Return the folder, or its nearest existing parent."""
    return next(one for one in (folder, *folder.absolute().parents) if one.is_dir())


def check(host: Host, *, cuda_home_version: str | None = None, wanted: str = "13.0") -> Preflight:
    """Return the toolkit to compile with, or raise with a hint.

    Args:
        host: The machine.
        cuda_home_version: Version of the toolkit in CUDA_HOME; None: choose one of TOOLKITS.
        wanted: The oldest acceptable toolkit, whose code runs on the oldest drivers. A newer one
            of the same major version may replace it.
    """
    gcc, glibc = _require_host(host)
    if cuda_home_version is not None:
        notes = _judge_own(cuda_home_version, wanted, gcc, glibc)
        return Preflight(host, cuda_home_version, notes, is_own=True)
    candidates = [t for t in TOOLKITS if _can_replace(t.cuda, wanted)]
    if not candidates:
        known = ", ".join(toolkit.cuda for toolkit in TOOLKITS)
        message = f"CUDA {wanted} cannot be downloaded, available are {known}"
        hint = "name one of them in `toolkit`; a native build also takes the one of CUDA_HOME"
        raise PreflightError(message, hint=hint)
    refusals = {toolkit.cuda: toolkit.refusal(gcc, glibc) for toolkit in candidates}
    fit = next((cuda for cuda, refusal in refusals.items() if refusal is None), None)
    if fit is None:
        newest = candidates[-1]
        major = parse_version(wanted)[0]
        message = f"no CUDA {major} toolkit compiles here: {refusals[newest.cuda]} is too new"
        hint = f"install an older g++ and name it: `CXX=g++-{newest.max_gcc}`"
        raise PreflightError(message, hint=hint if gcc[0] > newest.max_gcc else IN_A_CONTAINER)
    if fit == wanted:
        return Preflight(host, fit)
    refusal = refusals.get(wanted)
    reason = f"does not compile with {refusal}" if refusal else "cannot be downloaded"
    note = f"CUDA {wanted} {reason}, CUDA {fit} is taken; {_driver_note(fit)}"
    return Preflight(host, fit, (note,))


def _require_host(host: Host) -> tuple[Version, Version]:
    if (host.system, host.machine) != ("Linux", "x86_64"):
        message = f"wheels are built on Linux x86_64, this is {host.system} {host.machine}"
        raise PreflightError(message, hint="build on a Linux x86_64 machine or in a container")
    if host.glibc is None:
        message = "the C library here is not glibc, and neither nvcc nor torch runs on musl"
        raise PreflightError(message, hint="build in a Debian, Ubuntu, Fedora or RHEL root")
    if host.gcc is None:
        message = f"no C++ compiler `{host.gxx}` was found"
        raise PreflightError(message, hint="install g++ (`apt-get install g++`) or name one in CXX")
    if host.gcc[0] < MIN_GCC:
        message = f"g++ {MIN_GCC} or newer is needed, {host.gxx} is {host.gcc[0]}.{host.gcc[1]}"
        raise PreflightError(message, hint="install a newer g++ and name it: `CXX=g++-12`")
    for name, free, least, place, hint in (
        ("disk", host.disk, MIN_DISK, f" in `{host.folder}`", _OTHER_DISK),
        ("memory", host.memory, MIN_MEMORY, "", "free some memory"),
    ):
        if free < least:
            needed = f"{least / GIB:.0f} GiB of {name} are needed{place}"
            message = f"{needed}, {free / GIB:.1f} GiB are free"
            raise PreflightError(message, hint=hint)
    return host.gcc, host.glibc


def _can_replace(cuda: str, wanted: str) -> bool:
    """Tell if a toolkit may replace the wanted one: not older, and of the same major version."""
    found, least = parse_version(cuda), parse_version(wanted)
    return found[0] == least[0] and found >= least


def _judge_own(cuda: str, wanted: str, gcc: Version, glibc: Version) -> tuple[str, ...]:
    """Check the toolkit in CUDA_HOME against `wanted` and TOOLKITS; return a note on it."""
    if not _can_replace(cuda, wanted):
        major = parse_version(wanted)[0]
        message = f"CUDA {wanted} or a newer {major} is needed, CUDA_HOME holds {cuda}"
        raise PreflightError(message, hint="unset CUDA_HOME: the build then brings its own nvcc")
    known = next((t for t in TOOLKITS if t.cuda == cuda), None)
    refusal = known.refusal(gcc, glibc) if known else None
    if refusal:
        message = f"CUDA {cuda} of CUDA_HOME does not compile with {refusal}"
        raise PreflightError(message, hint="unset CUDA_HOME: the build then takes one that does")
    return (f"CUDA {cuda} is the one CUDA_HOME names; {_driver_note(cuda)}",)


def _driver_note(cuda: str) -> str:
    driver = first_driver(parse_version(cuda))
    needed = f"driver {driver}" if driver else f"a driver whose CUDA version is {cuda}"
    return f"PTX of CUDA {cuda} needs {needed} or newer"


def _wanted_jobs(environ: Mapping[str, str]) -> int:
    text = environ.get("MAX_JOBS", "").strip()
    if not re.fullmatch(r"[0-9]*", text):
        message = f"MAX_JOBS is the number of compilers that run at a time, got `{text}`"
        raise PreflightError(message, hint="unset MAX_JOBS: cores and memory then say how many")
    return int(text or 0)


def _gcc_version(gxx: str) -> Version | None:
    if shutil.which(gxx) is None:
        return None
    match = re.match(r"(\d+)\.(\d+)", gxx_version({"CXX": gxx}))
    return (int(match[1]), int(match[2])) if match else None


def _glibc_version() -> Version | None:
    try:
        text = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):  # musl does not know this name
        return None
    match = re.fullmatch(r"glibc (\d+)\.(\d+).*", text)
    return (int(match[1]), int(match[2])) if match else None
