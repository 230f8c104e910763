"""Rules that decide whether one image runs on one device with one driver.

Sources: CUDA "Compatibility" guides for Ampere, Ada and Blackwell (binary and PTX rules); NVIDIA
blog "NVIDIA Blackwell and NVIDIA CUDA 12.9 Introduce Family-Specific Architecture Features" and
CUDA Programming Guide, "Compute Capabilities" (suffixes a and f); CUDA 13.0 features archive
(sm_101 became sm_110); CUDA Compatibility guide, "Minor Version Compatibility" (drivers).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from ..product import NAME
from .devices import (
    CONCAT_CUDA,
    DRIVER_CUDA,
    NEWEST_CUDA,
    ZSTD_CUDA,
    Device,
    Driver,
    driver_supports_toolkit,
    first_driver,
    format_version,
    last_driver,
    parse_version,
    ptx_isa_cuda,
    toolkit_driver,
    toolkit_ptx_isa,
)
from .gpus import CHIPS, Version

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .archs import Arch

How = Literal["native", "family", "same-major", "jit", "unverified", "no"]

PREFERENCE: tuple[How, ...] = ("native", "family", "same-major", "jit", "unverified", "no")

_MACHINE_CODE = frozenset({"native", "family", "same-major"})

FAMILIES: dict[Version, frozenset[Version]] = {
    chip.version: frozenset(chip.family) for chip in CHIPS if chip.family
}


@dataclass(frozen=True)
class RunVerdict:
    """How code would run on a device, and why."""

    how: How
    reason: str

    def __bool__(self) -> bool:
        return self.rank < PREFERENCE.index("unverified")

    @property
    def rank(self) -> int:
        """Position in the order of preference: 0 is best."""
        return PREFERENCE.index(self.how)


def order_of_sets(hows: Iterable[str]) -> tuple[int, int, int]:
    """Return the sort key of an arch set, from how the set serves each GPU. The lowest is best.

    The best set serves the most GPUs; then the most GPUs with SASS; then the most with native code.
    Of several sets with the best key, callers choose the smallest.
    """
    hows = tuple(hows)
    served = sum(how in _MACHINE_CODE or how == "jit" for how in hows)
    compiled = sum(how in _MACHINE_CODE for how in hows)
    return -served, -compiled, -hows.count("native")


@dataclass(frozen=True)
class Origin:
    """Properties of an image that a driver checks. Unknown properties are not judged."""

    toolkit: str | None = "13.0"
    ptx_isa: Version | None = None  # of a PTX image; None: the toolkit's default
    codec: str = "none"  # "none", "lz4" or "zstd"
    in_stream: bool = False  # compressed with other images of its container (`fatbinary --concat`)


DEFAULT_ORIGIN = Origin()

# CUDA's switches for embedded code, each with two names: the first that is set decides.
FORCE_JIT = ("CUDA_FORCE_PTX_JIT", "CUDA_FORCE_JIT")
DISABLE_JIT = ("CUDA_DISABLE_PTX_JIT", "CUDA_DISABLE_JIT")


@dataclass(frozen=True)
class JitPolicy:
    """Settings that keep the driver from using embedded code. By default there are none."""

    forced: str = ""  # the variable that makes the driver ignore SASS
    disabled: str = ""  # the variable that forbids compiling PTX
    lacks_compiler: bool = False  # the driver's JIT compiler library is missing

    @property
    def variables(self) -> tuple[str, ...]:
        """The names of the variables that are on."""
        return tuple(name for name in (self.forced, self.disabled) if name)


ALLOWED = JitPolicy()


def is_set(environ: Mapping[str, str], name: str) -> bool:
    """Tell if a variable of the driver is on: empty and 0 are off."""
    return environ.get(name, "0") not in {"", "0"}


def jit_policy(environ: Mapping[str, str]) -> JitPolicy:
    """Read the CUDA variables that change what the driver does with embedded code."""
    return JitPolicy(_find_switch(environ, FORCE_JIT), _find_switch(environ, DISABLE_JIT))


def _find_switch(environ: Mapping[str, str], names: Iterable[str]) -> str:
    """Return the name of the variable that turns a switch on; empty if it is off."""
    name = next((name for name in names if environ.get(name)), "")
    return name if is_set(environ, name) else ""


def judge(
    arch: Arch,
    device: Device,
    driver: Driver | None = None,
    origin: Origin = DEFAULT_ORIGIN,
    *,
    jit: JitPolicy = ALLOWED,
) -> RunVerdict:
    """Judge whether a driver would run code for a target on a device.

    The first rule that is not met gives the verdict. The rules are, in order: the target fits the
    GPU, the driver supports the GPU, `jit` allows the code, the driver loads the image.

    Args:
        arch: The target.
        device: The GPU.
        driver: The driver of the GPU. None: judge as if the driver supported everything.
        origin: Toolkit, PTX ISA and compression of the image; default: uncompressed, CUDA 13.0.
        jit: Effect of CUDA_FORCE_PTX_JIT, CUDA_DISABLE_PTX_JIT and their newer names, and whether
            the driver lacks its JIT compiler.
    """
    return _judge(arch, device, driver, origin, jit)


@lru_cache(maxsize=1 << 14)  # a library has thousands of images for a few targets
def _judge(
    arch: Arch, device: Device, driver: Driver | None, origin: Origin, jit: JitPolicy
) -> RunVerdict:
    verdict = _judge_ptx(arch, device) if arch.ptx else _judge_sass(arch, device)
    if verdict.how == "no":
        return verdict
    objections = (
        _judge_support(device, driver) if driver else None,
        _judge_policy(arch, jit),
        _judge_driver(arch, driver, origin) if driver else None,
    )
    return next((one for one in objections if one is not None), verdict)


def choose_arch(
    archs: tuple[Arch, ...], device: Device, driver: Driver | None = None
) -> tuple[Arch, RunVerdict] | None:
    """Return the target that serves the device best, and its verdict; None if all are `no`.

    Of equally good targets, it is the one with the highest number, then with suffix `a`, then `f`.
    """
    judged = [(arch, judge(arch, device, driver)) for arch in archs]
    able = [(arch, verdict) for arch, verdict in judged if verdict.how != "no"]
    closeness = {"a": 0, "f": 1, "": 2}
    return min(
        able,
        key=lambda pair: (pair[1].rank, -pair[0].number, closeness[pair[0].suffix]),
        default=None,
    )


def _judge_sass(arch: Arch, device: Device) -> RunVerdict:
    target = arch.device.renamed
    if target == device.renamed:
        return RunVerdict("native", f"{arch} is compiled for compute capability {device}")
    if arch.suffix:
        return _judge_suffix(arch, device)
    if target.major != device.renamed.major:
        return RunVerdict("no", f"{arch} runs on compute capability {target.major}.x, not {device}")
    if target > device:
        return RunVerdict("no", f"{arch} needs compute capability {target} or newer, not {device}")
    if target.integrated != device.integrated:
        reason = f"{arch} is of the same major as {device}, but between discrete and integrated "
        return RunVerdict("unverified", f"{reason}GPUs NVIDIA does not guarantee that it runs")
    return RunVerdict("same-major", f"{arch} runs on {device}: same major, no older minor")


def _judge_ptx(arch: Arch, device: Device) -> RunVerdict:
    target = arch.device
    same = target.renamed == device.renamed
    if arch.suffix and not same:
        return _judge_suffix(arch, device)
    if device.renamed < target.renamed:
        return RunVerdict("no", f"{arch} needs compute capability {target} or newer, not {device}")
    which = "" if same else "the newer "
    return RunVerdict("jit", f"the driver compiles {arch} for {which}compute capability {device}")


def _judge_suffix(arch: Arch, device: Device) -> RunVerdict:
    """Judge an `a` or `f` target on a device of another compute capability."""
    target = arch.device
    if arch.suffix != "f":
        return RunVerdict("no", f"{arch} runs only on compute capability {target}, not {device}")
    if device.version in FAMILIES.get(target.version, frozenset()):
        how: How = "jit" if arch.ptx else "family"
        return RunVerdict(how, f"{device} belongs to the family of {arch}")
    return RunVerdict("no", f"{arch} runs only on its own family, not {device}")


def _judge_policy(arch: Arch, jit: JitPolicy) -> RunVerdict | None:
    if jit.forced and not arch.ptx:
        return RunVerdict("no", f"{jit.forced} is set, so the driver ignores {arch}")
    effect = f"so the driver does not compile {arch}"
    if jit.disabled and arch.ptx:
        cached = "(only code that is in its cache loads)"
        return RunVerdict("no", f"{jit.disabled} is set, {effect} {cached}")
    if jit.lacks_compiler and arch.ptx:
        return RunVerdict("no", f"libnvidia-ptxjitcompiler.so.1 is missing, {effect}")
    return None


def _judge_support(device: Device, driver: Driver) -> RunVerdict | None:
    needs = f"a GPU of compute capability {device} needs"
    first, dropped = device.first_cuda, device.dropped_by
    if first is not None and driver.cuda < first:
        needed = first_driver(first)
        name = f"driver {needed}" if needed else f"a driver for CUDA {format_version(first)}"
        return RunVerdict("no", f"{needs} {name} or newer, not {driver}")
    if dropped is not None and driver.cuda >= dropped:
        return RunVerdict("no", f"{needs} driver {last_driver(dropped)} or older, not {driver}")
    return None


def _judge_driver(arch: Arch, driver: Driver, origin: Origin) -> RunVerdict | None:
    refusal = driver_refusal(driver, origin)
    if refusal is not None:
        return RunVerdict("no", refusal)
    if driver.is_newer_than_known and _needs_more(driver, origin):
        name = f"code built with CUDA {origin.toolkit}"
        return RunVerdict("unverified", f"{name} is newer than this version of {NAME} knows")
    verdict = _judge_ptx_isa(driver, origin) if arch.ptx else None
    if verdict is None and origin.in_stream and driver.cuda < CONCAT_CUDA:
        packed = f"{arch} is packed with others into one stream (`fatbinary --concat`)"
        doubt = f"which drivers older than {first_driver(CONCAT_CUDA)} are not known to read"
        return RunVerdict("unverified", f"{packed}, {doubt}, got {driver}")
    return verdict


def driver_refusal(driver: Driver, origin: Origin) -> str | None:
    """Say why this driver loads no image of this origin; None if it loads such images."""
    if driver.is_newer_than_known:
        return None
    if origin.toolkit is not None and not driver_supports_toolkit(driver, origin.toolkit):
        needed = toolkit_driver(origin.toolkit)
        name = f"driver {needed}" if needed else f"a driver for CUDA {origin.toolkit}"
        return f"code built with CUDA {origin.toolkit} needs {name} or newer, not {driver}"
    if origin.codec == "zstd" and driver.cuda < ZSTD_CUDA:
        needed = first_driver(ZSTD_CUDA)
        return f"code compressed with zstd needs driver {needed} or newer, not {driver}"
    return None


def _needs_more(driver: Driver, origin: Origin) -> bool:
    """Tell if the image's toolkit has a newer major version than the driver's CUDA."""
    return origin.toolkit is not None and not driver_supports_toolkit(driver, origin.toolkit)


def _judge_ptx_isa(driver: Driver, origin: Origin) -> RunVerdict | None:
    """Judge PTX by its ISA or toolkit; None if both are unknown or the driver supports it."""
    if origin.ptx_isa is None and origin.toolkit is None:
        return None
    name, cuda = _name_ptx(origin)
    if cuda is not None and driver.cuda >= cuda:
        return None
    if cuda is not None and cuda <= NEWEST_CUDA:
        return RunVerdict("no", f"{name} needs driver {first_driver(cuda)} or newer, not {driver}")
    if driver.may_do_more:
        return RunVerdict("unverified", f"{name} is newer than this version of {NAME} knows")
    newest = f"driver {max(DRIVER_CUDA)} (CUDA {format_version(NEWEST_CUDA)})"
    return RunVerdict(
        "no",
        f"{name} needs a driver newer than {newest}, the newest known to this {NAME}, not {driver}",
    )


def _name_ptx(origin: Origin) -> tuple[str, Version | None]:
    """Return the name of the image's PTX version, and its first CUDA version (None: unknown)."""
    toolkit = parse_version(origin.toolkit) if origin.toolkit is not None else (0, 0)
    if origin.ptx_isa is None and toolkit > NEWEST_CUDA:
        return f"PTX of CUDA {origin.toolkit}", toolkit
    isa = origin.ptx_isa or toolkit_ptx_isa(format_version(toolkit))
    return f"PTX ISA {format_version(isa)}", ptx_isa_cuda(isa)
