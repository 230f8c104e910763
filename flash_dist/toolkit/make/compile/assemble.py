"""Assembles the PTX of a wheel offline for every GPU that might compile it at run time.

The build itself never assembles PTX, so only this step predicts the registers and spills of the
driver's compiler. PTX is assembled for the SASS target with its own number, and for every newer
published target whose GPUs run no SASS of the build. At newer targets, a kernel counts only if its
shared-memory plan is the largest that fits the target's GPUs.
"""

from __future__ import annotations

import hashlib
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...errors import KernelsError
from ...gpucode.fatbin import open_fatbin
from ...targets.compatibility import judge
from ...targets.devices import KIB

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from ...targets.archs import Arch, ArchSet
    from ...targets.axes import Place
    from ...targets.devices import Device

# Kernels are compiled with -O3, the default of nvcc and of ptxas. -v prints registers and spills.
_FLAGS = ("-O3", "-v")


class AssembleError(KernelsError):
    """Raised for PTX that does not assemble."""


@dataclass(frozen=True)
class Ptx:
    """The PTX of one object file: one kernel of a table, or all kernels of a plain file."""

    arch: Arch
    text: bytes
    symbols: tuple[str, ...]


def read_ptx(objects: Iterable[Path]) -> list[Ptx]:
    """Extract the PTX from object files, exactly as shipped."""
    found = []
    for path in objects:
        with open_fatbin(path) as fatbin:
            for entry in fatbin.report.entries:
                if entry.kind == "ptx" and entry.arch is not None:
                    names = tuple(kernel.name for kernel in fatbin.kernels(entry))
                    text = fatbin.payload(entry).rstrip(b"\0")
                    found.append(Ptx(entry.arch, text, names))
    return found


def targets_of(ptx: Arch, published: Iterable[ArchSet], built: Iterable[Arch] = ()) -> list[Arch]:
    """Return the SASS targets that a PTX target is assembled for.

    These are the target with the same number and, unless the PTX target has a suffix, the newer
    targets of published sets. Newer targets whose GPUs run SASS of `built` are left out, because
    these GPUs never use the PTX.
    """
    own = replace(ptx, ptx=False)
    if ptx.suffix:
        return [own]
    sass = [arch for arch in built if not arch.ptx]
    every = {arch for one in published for arch in one.archs if not arch.ptx}
    newer = (arch for arch in every if arch.number > ptx.number)
    return sorted({own} | {arch for arch in newer if not _runs_any(arch.device, sass)})


def _runs_any(device: Device, sass: Iterable[Arch]) -> bool:
    return any(judge(arch, device) for arch in sass)


def is_taken(symbol: str, target: Arch, places: Mapping[str, tuple[str, Place]]) -> bool:
    """Tell if a target's GPUs use a kernel: they use the largest shared-memory plan that fits.

    Kernels of plain files have no plan, so they are always used.

    Args:
        symbol: The kernel.
        target: The target of the GPUs.
        places: Family and axis values of each kernel of a table, by symbol.
    """
    if symbol not in places:
        return True
    family, mine = places[symbol]
    fitting = [
        place.plan
        for its_family, place in places.values()
        if (its_family, place._replace(plan=mine.plan)) == (family, mine)
        and place.plan * KIB <= target.smem_optin
    ]
    return mine.plan == max(fitting, default=None)


class Assembler:
    """Runs ptxas, and stores its output for each PTX text and target in `cache`."""

    def __init__(self, ptxas: str, version: str, cache: Path) -> None:
        self._ptxas = ptxas
        self._version = version
        self._cache = cache

    def recall(self, ptx: Ptx, target: Arch) -> str | None:
        """Look up the stored output; None if this PTX was never assembled for this target."""
        kept = self._kept(ptx, target)
        return kept.read_text(encoding="utf-8") if kept.is_file() else None

    def run(self, ptx: Ptx, target: Arch) -> str:
        """Return the output of `ptxas -v`, from the cache if it is there."""
        known = self.recall(ptx, target)
        if known is not None:
            return known
        kept = self._kept(ptx, target)
        command = [self._ptxas, *_FLAGS, f"-arch={target}", "-o", "/dev/null", "-"]
        done = subprocess.run(
            command, input=ptx.text, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        text = done.stdout.decode(errors="replace")
        if done.returncode:
            message = f"PTX of {ptx.arch} does not assemble for {target}: {text.strip()}"
            raise AssembleError(message)
        self._cache.mkdir(parents=True, exist_ok=True)
        part = kept.with_suffix(f".{target}.part")
        part.write_text(text, encoding="utf-8")
        part.replace(kept)
        return text

    def _kept(self, ptx: Ptx, target: Arch) -> Path:
        key = hashlib.sha256(b"\0".join([self._version.encode(), str(target).encode(), ptx.text]))
        return self._cache / f"{key.hexdigest()}.txt"


def assemble(work: Sequence[tuple[Ptx, Arch]], assembler: Assembler, jobs: int) -> list[str]:
    """Assemble each PTX for its target, and return the output of `ptxas -v` for each."""
    new = [job for job in work if assembler.recall(*job) is None]
    with ThreadPoolExecutor(jobs) as pool:
        done = pool.map(lambda job: assembler.run(*job), new)
        for number, _ in enumerate(done, 1):
            if number == len(new) or number % 25 == 0:
                print(f"[{number}/{len(new)}] Assembling PTX offline", flush=True)
    return [assembler.run(*job) for job in work]
