"""Table of all known GPUs, from which other tables of the package and of ci/ derive.

Sources: CUDA C++ Programming Guide, appendix "Compute Capabilities" (shared memory per block,
members of a family); `nvcc --list-gpu-code` of each toolkit (first, until); CUDA 13.0 features
archive (10.1 became 11.0); NVIDIA's "CUDA GPU Compute Capability" page (products); "CUDA Toolkit,
Driver, and Architecture Matrix" of the data center drivers (dropped).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

Version = tuple[int, int]

OLDEST_TOOLKIT: Final = (12, 0)  # the oldest toolkit in this table
SPECIFIC_FROM: Final = (9, 0)  # first compute capability with suffix `a`
FAMILIES_FROM: Final = (12, 9)  # first toolkit with suffix `f`


@dataclass(frozen=True)
class Chip:
    """The GPUs of one compute capability."""

    version: Version  # the compute capability
    smem_kib: int  # maximum shared memory of one block (opt-in)
    first: Version = OLDEST_TOOLKIT  # the first CUDA that compiles for it
    until: Version | None = None  # the first CUDA that no longer compiles for it
    dropped: Version | None = None  # the first CUDA whose drivers no longer support it
    family: tuple[Version, ...] = ()  # GPUs that run code for its family, suffix `f`
    products: str = ""  # product names
    integrated: bool = False  # Tegra class: not guaranteed to run code for discrete GPUs
    arm_only: bool = False  # all machines with it have Arm CPUs
    renamed: Version | None = None  # its compute capability in a newer CUDA

    def __str__(self) -> str:
        return f"{self.version[0]}.{self.version[1]}"

    def suffixes(self, toolkit: Version) -> tuple[str, ...]:
        """Return the suffixes of this chip's targets in a CUDA release; () if it has no targets."""
        if toolkit < self.first or (self.until is not None and toolkit >= self.until):
            return ()
        specific = ("a",) if self.version >= SPECIFIC_FROM else ()
        family = ("f",) if self.family and toolkit >= FAMILIES_FROM else ()
        return ("", *specific, *family)


# Oldest first. Families are listed, because a new minor of the same major may not belong to the
# family: 10.1 is not in the family of 10.0.
_THOR: Final = ((10, 1), (11, 0))
CHIPS: Final = (
    Chip((5, 0), 48, until=(13, 0), dropped=(13, 1)),
    Chip((5, 2), 48, until=(13, 0), dropped=(13, 1)),
    Chip((5, 3), 48, until=(13, 0), dropped=(13, 1), integrated=True),
    Chip((6, 0), 48, until=(13, 0), dropped=(13, 1)),
    Chip((6, 1), 48, until=(13, 0), dropped=(13, 1)),
    Chip((6, 2), 48, until=(13, 0), dropped=(13, 1), integrated=True),
    Chip((7, 0), 96, until=(13, 0), dropped=(13, 1)),
    Chip((7, 2), 96, until=(13, 0), dropped=(13, 1), integrated=True),
    Chip((7, 5), 64, products="GeForce RTX 20 series, GTX 16 series, T4, Quadro RTX"),
    Chip((8, 0), 163, products="A100, A30"),
    Chip((8, 6), 99, products="GeForce RTX 30 series, A2, A10, A40, RTX A series"),
    Chip((8, 7), 163, products="Jetson Orin", integrated=True, arm_only=True),
    Chip((8, 8), 99, (13, 0)),
    Chip((8, 9), 99, products="GeForce RTX 40 series, L4, L40, RTX Ada"),
    Chip((9, 0), 227, products="H100, H200"),
    Chip((10, 0), 227, (12, 8), family=((10, 0), (10, 3), (10, 7)), products="B200"),
    Chip(
        (10, 1),
        227,
        (12, 8),
        until=(13, 0),
        family=_THOR,
        integrated=True,
        arm_only=True,
        renamed=(11, 0),
    ),
    Chip((10, 3), 227, (12, 9), family=((10, 3), (10, 7)), products="B300"),
    Chip((10, 7), 327, (13, 4), family=((10, 7),)),  # Rubin
    Chip(
        (11, 0), 227, (13, 0), family=_THOR, products="Jetson Thor", integrated=True, arm_only=True
    ),
    Chip(
        (12, 0),
        99,
        (12, 8),
        family=((12, 0), (12, 1)),
        products="GeForce RTX 50 series, RTX PRO Blackwell",
    ),
    Chip((12, 1), 99, (12, 9), family=((12, 1),), products="DGX Spark (GB10)", arm_only=True),
)

SOLD: Final = tuple(chip for chip in CHIPS if chip.products)
