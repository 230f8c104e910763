"""Mutated binaries through every reader: only our own error may come out, quickly.

    python -m tests.fuzz.readers [--cases 100000] [--seed 0]

Each case is a small valid file of some kind with bytes flipped, cut out, repeated or made large;
the same seed gives the same cases. Exit status 1 at the first that raises anything else, takes
longer than 2 s of CPU time or more than 1 GB.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import resource
import struct
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from flash_dist.binaries.symbols import SharedObject
from flash_dist.errors import FatbinError
from flash_dist.gpucode.inspection import LEVELS, Choice, inspect_libraries
from flash_dist.gpucode.libraries import open_libraries
from tests.unit.made.dynamic_builder import make_shared
from tests.unit.made.fatbin_builder import (
    LTO,
    PTX,
    SASS,
    Kernel,
    container,
    cubin,
    entry,
    library,
    ptx,
)
from tests.unit.made.pe_builder import pe

if TYPE_CHECKING:
    from collections.abc import Callable

SLOWEST: Final = 2.0  # seconds for one case
MOST_MEMORY: Final = 1 << 30  # bytes of the process
SPECIAL: Final = (0, 1, 0x7F, 0x80, 0xFF)
_SYMBOL_TABLES: Final = (
    *("needed", "soname", "rpath", "runpath"),
    *("undefined", "versions_needed", "versions_defined"),
)
LARGE: Final = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)


def make_seeds() -> dict[str, bytes]:
    """Return a valid file of each kind, by suffix."""
    image = cubin(Kernel("alpha", externs=("vprintf",)), Kernel("_ZN1a4betaEv", smem=1024))
    images = container(
        entry(SASS, 80, image),
        entry(SASS, 90, image, suffix="a", codec="zstd"),
        entry(SASS, 75, image, codec="lz4"),
        entry(PTX, 80, ptx("alpha"), codec="zstd"),
        entry(LTO, 80, b"x" * 64),
    )
    shared = library(images, container(entry(SASS, 80, image)), wrappers=1)
    member = b"lib.o/          0           0     0     100644  " + b"%-10d`\n" % len(shared)
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("pkg/lib.so", shared)
    return {
        "library.so": shared,
        "dynamic.so": make_shared(defined=tuple(f"function_{number}" for number in range(9))),
        "library.dll": pe((".text", b"\xc3" * 16), (".nv_fatb", images)),
        "images.fatbin": images,
        "image.cubin": image,
        "archive.a": b"!<arch>\n" + member + shared,
        "pkg.whl": wheel.getvalue(),
    }


def flip(data: bytearray, chance: random.Random) -> None:
    """Change some bytes."""
    for _ in range(chance.randint(1, 8)):
        place = chance.randrange(len(data))
        data[place] = chance.choice((*SPECIAL, chance.randrange(256)))


def enlarge(data: bytearray, chance: random.Random) -> None:
    """Put a number that is special where one may stand."""
    form = chance.choice(("<I", "<Q"))
    size = struct.calcsize(form)
    place = chance.randrange(max(1, len(data) - size)) // 4 * 4
    data[place : place + size] = struct.pack(form, chance.choice(LARGE) % 256**size)


def cut(data: bytearray, chance: random.Random) -> None:
    """Leave something out, mostly the end."""
    first = chance.randrange(len(data))
    del data[first : chance.choice((len(data), first + chance.randint(1, 64)))]


def repeat(data: bytearray, chance: random.Random) -> None:
    """Copy a part over another place."""
    size = chance.randint(1, 128)
    source, target = chance.randrange(len(data)), chance.randrange(len(data))
    data[target : target + size] = data[source : source + size]


MUTATIONS: Final[tuple[Callable[[bytearray, random.Random], None], ...]] = (
    flip,
    flip,
    enlarge,
    cut,
    repeat,
)


def mutate(data: bytes, chance: random.Random) -> bytes:
    """Return the file with one to four mutations."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        if changed:
            chance.choice(MUTATIONS)(changed, chance)
    return bytes(changed)


def read_everything(path: Path) -> None:
    """Read a file at every level; our own error is an answer."""
    for level in LEVELS:
        with contextlib.suppress(FatbinError):
            inspections, _ = inspect_libraries(open_libraries(path), Choice(level))
            for inspection in inspections:
                inspection.to_json()
    with contextlib.suppress(FatbinError):
        read_symbols(SharedObject(path.read_bytes()))


def read_symbols(shared: SharedObject) -> None:
    """Read what the dynamic linker reads; each table, whatever became of the others."""
    for name in _SYMBOL_TABLES:
        with contextlib.suppress(FatbinError):
            getattr(shared, name)
    for number in range(16):
        with contextlib.suppress(FatbinError):
            shared.defines(f"function_{number}")
    with contextlib.suppress(FatbinError):
        list(shared.defined())


def run_case(path: Path) -> tuple[str, float]:
    """Read one file; return what is wrong with how that went, and the seconds."""
    start = time.process_time()  # a busy machine is no finding
    try:
        read_everything(path)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
        return f"{type(error).__name__}: {error}", 0.0
    seconds = time.process_time() - start
    return f"{seconds:.1f} s" if seconds > SLOWEST else "", seconds


def run(cases: int, seed: int) -> str:
    """Run the cases and return what is wrong with the first bad one; empty if none is."""
    seeds = make_seeds()
    slowest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(cases):
            chance = random.Random(f"{seed} {number}")  # noqa: S311 - no secret
            name = chance.choice(sorted(seeds))
            path = Path(folder) / name
            path.write_bytes(mutate(seeds[name], chance))
            problem, seconds = run_case(path)
            if problem:
                return f"case {number} of seed {seed} ({name}): {problem}"
            slowest = max(slowest, seconds)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    if memory > MOST_MEMORY:
        return f"{cases} cases of seed {seed} took {memory:,} bytes of memory"
    print(f"{cases} cases, slowest {slowest:.3f} s, {memory >> 20} MiB")  # noqa: T201 - a program
    return ""


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="mutated binaries through every reader")
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    problem = run(args.cases, args.seed)
    if problem:
        print(problem, file=sys.stderr)  # noqa: T201
    return int(bool(problem))


if __name__ == "__main__":
    sys.exit(main())
