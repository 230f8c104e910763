"""Compute capabilities of GPUs, and CUDA versions of drivers.

Sources: CUDA toolkit release notes, table of toolkit and driver versions; CUDA Compatibility guide,
"Minor Version Compatibility" (first driver per major); PTX ISA guide, "Release Notes" (first
toolkit per PTX ISA); nvcc documentation of `--compress-mode` (zstd needs driver 550).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass

from ..errors import ArchError
from .gpus import CHIPS, OLDEST_TOOLKIT, Version

KIB = 1024

SMEM_OPTIN_KIB: dict[Version, int] = {chip.version: chip.smem_kib for chip in CHIPS}
INTEGRATED: frozenset[Version] = frozenset(chip.version for chip in CHIPS if chip.integrated)
ARM_ONLY: frozenset[Version] = frozenset(chip.version for chip in CHIPS if chip.arm_only)
RENAMED: dict[Version, Version] = {chip.version: chip.renamed for chip in CHIPS if chip.renamed}
DROPPED: dict[Version, Version] = {chip.version: chip.dropped for chip in CHIPS if chip.dropped}

# Driver release branch -> the CUDA version its `cuDriverGetVersion` reports.
DRIVER_CUDA: dict[int, Version] = {
    410: (10, 0), 418: (10, 1), 440: (10, 2),
    450: (11, 0), 455: (11, 1), 460: (11, 2), 465: (11, 3), 470: (11, 4), 495: (11, 5),
    510: (11, 6), 515: (11, 7), 520: (11, 8),
    525: (12, 0), 530: (12, 1), 535: (12, 2), 545: (12, 3), 550: (12, 4), 555: (12, 5),
    560: (12, 6), 565: (12, 7), 570: (12, 8), 575: (12, 9),
    580: (13, 0), 590: (13, 1), 595: (13, 2), 610: (13, 3), 615: (13, 4),
    620: (13, 5),
}  # fmt: skip

# PTX ISA -> first CUDA version whose driver assembles it.
PTX_ISA_CUDA: dict[Version, Version] = {
    (7, 0): (11, 0), (7, 1): (11, 1), (7, 2): (11, 2), (7, 3): (11, 3), (7, 4): (11, 4),
    (7, 5): (11, 5), (7, 6): (11, 6), (7, 7): (11, 7), (7, 8): (11, 8),
    (8, 0): (12, 0), (8, 1): (12, 1), (8, 2): (12, 2), (8, 3): (12, 3), (8, 4): (12, 4),
    (8, 5): (12, 5), (8, 6): (12, 7), (8, 7): (12, 8), (8, 8): (12, 9),
    (9, 0): (13, 0), (9, 1): (13, 1), (9, 2): (13, 2), (9, 3): (13, 3), (9, 4): (13, 4),
    (9, 5): (13, 5),
}  # fmt: skip

ZSTD_CUDA: Version = (12, 4)  # the first whose driver, 550, unpacks zstd images
CONCAT_CUDA: Version = (13, 4)  # the first whose `fatbinary --concat` packs cubins into one stream
NEWEST_CUDA: Version = max(DRIVER_CUDA.values())

# First CUDA whose driver supports a GPU. For GPUs that are newer than OLDEST_TOOLKIT, it is the
# first CUDA that compiles for them. CUDA 12 calls compute capability 11.0 by its older name, 10.1.
FIRST_CUDA: dict[Version, Version] = {
    (7, 5): (10, 0), (8, 0): (11, 0), (8, 6): (11, 1), (8, 7): (11, 4), (8, 9): (11, 8),
    (9, 0): (11, 8),
    **{chip.version: chip.first for chip in CHIPS if chip.first > OLDEST_TOOLKIT},
    (11, 0): (12, 8),
}  # fmt: skip


@dataclass(frozen=True, order=True)
class Device:
    """A GPU's compute capability, such as 8.6."""

    major: int
    minor: int

    @classmethod
    def parse(cls, text: str) -> Device:
        """Parse a compute capability such as `8.6`."""
        match = re.fullmatch(r"([1-9][0-9]?)\.([0-9])", text.strip())
        if match is None:
            message = f"a compute capability looks like `8.6`, got `{text:.60}`"
            raise ArchError(
                message, hint="`nvidia-smi --query-gpu=compute_cap --format=csv` lists yours"
            )
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"

    @property
    def number(self) -> int:
        """The decimal form in targets: 86 for 8.6."""
        return self.major * 10 + self.minor

    @property
    def version(self) -> Version:
        """The key in the tables of this module."""
        return self.major, self.minor

    @property
    def integrated(self) -> bool:
        """Tell if this is a Tegra-class GPU (Jetson, Drive, Thor)."""
        return self.version in INTEGRATED

    @property
    def arm_only(self) -> bool:
        """Tell if all machines with this GPU have Arm CPUs."""
        return self.version in ARM_ONLY

    @property
    def known(self) -> bool:
        """Tell if the tables of this module list this compute capability."""
        return self.version in SMEM_OPTIN_KIB

    @property
    def first_cuda(self) -> Version | None:
        """The CUDA version of the first driver that supports this GPU; None if unknown."""
        return FIRST_CUDA.get(self.version)

    @property
    def dropped_by(self) -> Version | None:
        """The CUDA version of the first driver that dropped this GPU; None if no driver did."""
        return DROPPED.get(self.version)

    @property
    def smem_optin(self) -> int:
        """Bytes of shared memory that a block may use (opt-in).

        An unknown GPU gets the smallest value of its major. If the major is unknown, too, it gets
        the smallest value of the known GPUs from 8.0 up to its own compute capability.
        """
        known = SMEM_OPTIN_KIB.get(self.version)
        if known is None:
            siblings = [kib for cc, kib in SMEM_OPTIN_KIB.items() if cc[0] == self.major]
            recent = [kib for cc, kib in SMEM_OPTIN_KIB.items() if (8, 0) <= cc <= self.version]
            known = min(siblings or recent, default=48)
        return known * KIB

    @property
    def renamed(self) -> Device:
        """The GPU under its newer CUDA name: CUDA 13.0 renamed 10.1 (Thor) to 11.0."""
        return Device(*RENAMED.get(self.version, self.version))


ANY_GPU = Device(0, 0)  # below every GPU: a floor without effect


KNOWN_DEVICES: tuple[Device, ...] = tuple(Device(*version) for version in sorted(SMEM_OPTIN_KIB))


@dataclass(frozen=True)
class Driver:
    """An NVIDIA driver: the newest CUDA version that it supports and, if known, its release.

    Verdicts use the CUDA version, because a forward-compatibility package may raise it above the
    version that belongs to the release.
    """

    cuda: Version
    release: str = ""

    @classmethod
    def parse(cls, text: str) -> Driver:
        """Read a release such as `535` or `580.65.06`."""
        release = text.strip()
        match = re.fullmatch(r"([0-9]{3,4})(\.[0-9]+)*", release)
        if match is None:
            message = f"a driver release looks like `580` or `580.65.06`, got `{text:.60}`"
            raise ArchError(
                message, hint="`nvidia-smi --query-gpu=driver_version --format=csv` shows yours"
            )
        return cls(driver_cuda(int(match[1])), release)

    @classmethod
    def from_cuda_version(cls, number: int, release: str = "") -> Driver:
        """Return the driver with this result of `cuDriverGetVersion`, such as 13000."""
        return cls((number // 1000, number % 1000 // 10), release)

    @property
    def is_newer_than_known(self) -> bool:
        """Tell if the release is newer than all known releases and judged as the newest of them."""
        branch = self.release.partition(".")[0]
        newest = max(DRIVER_CUDA)
        beyond = branch.isdecimal() and int(branch) > newest
        return beyond and self.cuda == DRIVER_CUDA[newest]

    @property
    def may_do_more(self) -> bool:
        """Tell if the driver is newer than the tables of this module, so newer images may load."""
        return self.is_newer_than_known or self.cuda > NEWEST_CUDA

    def __str__(self) -> str:
        cuda = f"CUDA {format_version(self.cuda)}"
        if self.is_newer_than_known:
            return f"driver {self.release} (newer than known: judged as {cuda}, may be better)"
        return f"driver {self.release} ({cuda})" if self.release else f"a driver for {cuda}"


def parse_version(text: str) -> Version:
    """Read a toolkit or PTX ISA version: `13.0` or `13.0.88` is (13, 0)."""
    match = re.match(r"([0-9]{1,4})\.([0-9]{1,4})(\.|$)", text)
    if match is None:
        message = f"a CUDA version looks like `13.0`, got `{text:.60}`"
        raise ArchError(message)
    return int(match[1]), int(match[2])


def format_version(version: Version) -> str:
    """Return a version as text: `13.0` for (13, 0)."""
    return f"{version[0]}.{version[1]}"


def driver_cuda(branch: int) -> Version:
    """Return the CUDA version of a driver branch, or of the last known branch before it, or 9.0."""
    known = sorted(DRIVER_CUDA)
    place = bisect_right(known, branch)
    return DRIVER_CUDA[known[place - 1]] if place else (9, 0)


def first_driver(cuda: Version) -> int | None:
    """Return the first driver branch that supports this CUDA version; None if unknown."""
    return next((branch for branch, has in sorted(DRIVER_CUDA.items()) if has >= cuda), None)


def last_driver(cuda: Version) -> int:
    """Return the last driver branch before this CUDA version."""
    return max(branch for branch, has in DRIVER_CUDA.items() if has < cuda)


def toolkit_driver(toolkit: str) -> int | None:
    """Return the first driver branch that runs SASS of this toolkit: the first for its CUDA major.

    Minor-version compatibility makes the minor irrelevant to SASS (580 for 13.x, 525 for 12.x).
    """
    return first_driver((parse_version(toolkit)[0], 0))


def toolkit_ptx_isa(toolkit: str) -> Version:
    """Return the PTX ISA that this toolkit writes; for a toolkit newer than the table, the newest.

    NOTE: `judge` does not require this ISA for such a newer toolkit.
    """
    version = parse_version(toolkit)
    return max((isa for isa, cuda in PTX_ISA_CUDA.items() if cuda <= version), default=(7, 0))


def ptx_isa_cuda(isa: Version) -> Version | None:
    """Return the first CUDA version that assembles this PTX ISA; None if unknown."""
    return next((cuda for known, cuda in sorted(PTX_ISA_CUDA.items()) if known >= isa), None)


def driver_supports_toolkit(driver: Driver, toolkit: str) -> bool:
    """Tell if this toolkit's SASS and runtime load: the driver's CUDA major must not be older."""
    return driver.cuda[0] >= parse_version(toolkit)[0]


def toolkit_compression(toolkit: str) -> str:
    """Return the compression of our builds with this toolkit: nvcc supports zstd from 12.8 on."""
    return "zstd" if parse_version(toolkit) >= (12, 8) else "lz4"
