"""Builds and environments made by hand, as the checks see them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from flash_dist.toolkit.checks.environment import Environment
from flash_dist.toolkit.findings.result import CheckResult
from flash_dist.toolkit.loading.parts import Loading
from flash_dist.toolkit.machine.install_files import InstallFiles
from flash_dist.toolkit.machine.installed import Installed
from flash_dist.toolkit.machine.libcuda import Cuda, Gpu
from flash_dist.toolkit.machine.torch_install import Torch
from flash_dist.toolkit.targets.archs import Arch, ArchSet
from flash_dist.toolkit.targets.axes import AXES, KernelKey, Place
from flash_dist.toolkit.targets.compatibility import Origin
from flash_dist.toolkit.targets.devices import Device, Driver
from flash_dist.toolkit.targets.verdict import FLOORS, Build, Variant

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from flash_dist.toolkit.make.kernels.table import Table

# The published sets, spelled out so that tests do not depend on the data file.
ALL = "7.5;8.0+PTX;9.0a;10.0;12.0"
TURING_AMPERE_ADA = "7.5;8.0;8.6;8.9+PTX"
HOPPER = "9.0a"
BLACKWELL = "10.0;12.0"

ARCHSETS = (
    ArchSet.parse(TURING_AMPERE_ADA, name="turing-ampere-ada", label="sm75to89"),
    ArchSet.parse(HOPPER, name="hopper", label="hopper"),
    ArchSet.parse(BLACKWELL, name="blackwell", label="blackwell"),
    ArchSet.parse(ALL, name="all", label="all"),
)

# family, head_dim, plan
ROWS = (
    ("fwd", 64, 64),
    ("fwd", 128, 64),
    ("fwd", 128, 99),
    ("fwd", 128, 163),
    ("bwd_delta", 64, 0),
    ("bwd_delta", 128, 0),
)


def make_key(role: str, dtype: str, *head_dims: int) -> KernelKey:
    """Return the key of a kernel."""
    return KernelKey(role, (dtype,), head_dims)


def make_variants(arch: Arch, *, toolkit: str = "13.0", proof: str = "native") -> list[Variant]:
    """Return every variant in the table of kernels for a target."""
    origin = Origin(toolkit, (9, 0) if arch.ptx else None, "zstd")
    places = (
        (family, Place((dtype,), (head_dim, head_dim), plan))
        for family, head_dim, plan in ROWS
        for dtype, floor in FLOORS.items()
        if plan * 1024 <= arch.smem_optin and arch.number >= floor.number
    )
    return [
        Variant.of(
            f"flash_dist_{family}_{AXES.spell(place)}_{arch.identifier}",
            family,
            place,
            arch,
            origin=origin,
            proof=proof,
        )
        for family, place in places
    ]


def make_build(archs: str, *, label: str = "test", proof: str = "native") -> Build:
    """Return a build for a TORCH_CUDA_ARCH_LIST."""
    variants = [
        variant
        for arch in ArchSet.parse(archs).archs
        for variant in make_variants(arch, proof=proof)
    ]
    return Build(f"flash_dist 0.1.0+cu130.{label}", tuple(variants), ARCHSETS, "13.0")


def make_table_build(table: Table, archs: str = HOPPER, *, stated: bool = True) -> Build:
    """Return the build of a table of kernels (csrc/kernels.toml).

    With stated=False its manifest does not state the fallbacks, like those of earlier versions.
    """
    variants = tuple(
        Variant.of(one.symbol, one.family.name, one.place, one.target)
        for arch in ArchSet.parse(archs).archs
        for one in table.variants(arch)
    )
    facts = table.fallbacks if stated else None
    return Build("flash_dist 0.1.0+cu130.test", variants, ARCHSETS, "13.0", facts)


def make_installed(archs: str, *, proof: str = "native") -> Installed:
    """Return a sound install."""
    return Installed(
        make_build(archs, proof=proof),
        "/opt/flash_dist/libflash_dist_kernels.so",
        torch_min="2.10",
        torch_tested_max="2.15",
    )


def make_environment(
    archs: str, *devices: str, driver: str = "580.65.06", proof: str = "native"
) -> Environment:
    """Return a healthy machine with these GPUs."""
    gpus = tuple(
        Gpu(index, f"GPU {chr(65 + index)}", Device.parse(device), 24 << 30, 82)
        for index, device in enumerate(devices)
    )
    return Environment(
        system="Debian GNU/Linux 12 (bookworm)",
        machine="x86_64",
        libc="glibc 2.36",
        python="3.11.7",
        torch=Torch("ok", "2.11.0", "13.0"),
        cuda=Cuda("ok", Driver.parse(driver), gpus),
        installed=make_installed(archs, proof=proof),
        loading=Loading("ok"),
        files=InstallFiles("recorded", "/opt", 200),
    )


def make_what_if(archs: str, *devices: str, driver: str | None = "580") -> Environment:
    """Return a build for GPUs that are not here, as with `doctor --gpu`."""
    environment = make_environment(archs, *devices)
    gpus = tuple(replace(gpu, name="", memory_bytes=None) for gpu in environment.cuda.gpus)
    cuda = Cuda("ok", Driver.parse(driver) if driver else None, gpus)
    return replace(environment, cuda=cuda, what_if=True, loading=Loading("not-tried"))


class Passes:
    """A selftest without findings."""

    def side_by_side(self, gpus: Iterable[Gpu]) -> AbstractContextManager[None]:
        del gpus
        return nullcontext()

    def run(self, gpu: Gpu) -> CheckResult:
        return CheckResult("ok", f"bit-equal on {gpu.name}")

    def compare_gpus(self) -> CheckResult | None:
        return None
