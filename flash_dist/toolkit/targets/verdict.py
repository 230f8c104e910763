"""Which kernel variant each GPU will run. Pure functions; `advice.py` puts them into words.

`compatibility.py` knows the rules for one image on one device. This module applies them to all
variants of a build the way the dispatcher does: the best code first, then the largest
shared-memory plan that fits.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal

from ..product import VARIABLES
from .compatibility import (
    ALLOWED,
    DEFAULT_ORIGIN,
    JitPolicy,
    Origin,
    RunVerdict,
    driver_refusal,
    jit_policy,
    judge,
)
from .devices import KIB, Device, Driver, format_version
from .fallbacks import FOR_TARGET, Fallbacks, role_of
from .wording import count

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from .archs import Arch, ArchSet

KernelHow = Literal[
    "native", "family", "same-major", "jit", "unverified", "none", "not-on-this-hardware"
]
Cause = Literal[
    "",
    "driver-too-old",
    "hardware-too-old",
    "jit-compiler-absent",
    "jit-variable",
    "no-kernels",
    "no-matching-code",
    "smem-limit",
]
KernelKey = tuple[str, str, int, int]  # role, dtype, head_dim, head_dim_v

_LATENT: Final = "mla"  # how roles begin that serve latent keys alone

# From best to worst. What the hardware lacks is no fault of a build.
HOW_ORDER: tuple[KernelHow, ...] = (
    "not-on-this-hardware", "native", "family", "same-major", "jit", "unverified", "none",
)  # fmt: skip

IEEE32: Final = "ieee32"  # fp32 without TF32: what kernels have for a dtype that is none of torch

# The first compute capability with the matrix instruction for a dtype.
DTYPE_FLOOR: dict[str, Device] = {
    "fp16": Device(7, 5),
    "bf16": Device(8, 0),
    "fp32": Device(7, 5),
    IEEE32: Device(7, 5),
}

NO_OPT_IN = 48 * KIB  # what a block gets without asking: plan 0
SMEM_VARIABLE = f"{VARIABLES}SMEM_LIMIT"
FLOOR = min(DTYPE_FLOOR.values())
_NO_LIMIT = 1 << 30
_LIMIT = re.compile(r"[ \t-\r]*\+?0*([1-9][0-9]{0,9})")
_MOST_LIMIT = 2**31 - 1


def read_smem_limit(text: str) -> int | None:
    """Return the bytes that SMEM_VARIABLE names; None where the dispatcher refuses it."""
    found = _LIMIT.fullmatch(text)
    limit = int(found[1]) if found else 0
    return limit if 0 < limit <= _MOST_LIMIT else None


def name_size(head_dim: int, head_dim_v: int) -> str:
    """Name the head_dims that a kernel is compiled for: `128`, `192/128`."""
    return str(head_dim) if head_dim == head_dim_v else f"{head_dim}/{head_dim_v}"


def read_size(name: str) -> tuple[int, int]:
    """Return the head_dims that `name_size` has named."""
    head_dim, _, head_dim_v = name.partition("/")
    return int(head_dim), int(head_dim_v or head_dim)


@dataclass(frozen=True)
class Variant:
    """One kernel compiled for one target, as found in a binary or declared by a manifest."""

    symbol: str
    family: str
    dtype: str
    head_dim: int
    plan: int  # KB of shared memory; 0 needs no opt-in
    arch: Arch
    origin: Origin = DEFAULT_ORIGIN
    proof: str = ""  # "native", "jit", "assembled"; empty if unknown
    head_dim_v: int | None = None  # None is head_dim

    @property
    def role(self) -> str:
        """What it is for; several families may serve it."""
        return role_of(self.family)

    @property
    def is_specific(self) -> bool:
        """Whether its family is for some targets only."""
        return self.family != self.role

    @property
    def is_scored(self) -> bool:
        """Whether its family serves calls alone whose scores are bent; any other is asked first."""
        named = FOR_TARGET.search(self.family)
        return named is not None and named[1] is not None

    @property
    def key(self) -> KernelKey:
        """The kernel this is a variant of."""
        return (self.role, self.dtype, self.head_dim, self.head_dim_v or self.head_dim)

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory that the plan reserves for a block."""
        return self.plan * KIB or NO_OPT_IN


@dataclass(frozen=True)
class Build:
    """What a build contains, and which arch sets its project publishes."""

    name: str  # "NAME 0.1.0+cu130.hopper"
    variants: tuple[Variant, ...]
    archsets: tuple[ArchSet, ...] = ()
    toolkit: str | None = None
    told_fallbacks: Fallbacks | None = None  # None: its manifest does not state them

    def __hash__(self) -> int:
        """Hash little of it: it is a key of what was judged, and has a thousand variants."""
        return hash((self.name, len(self.variants)))

    @property
    def release(self) -> str:
        """The version without its arch set, `0.1.0`; a word that stands for it if not known."""
        version = self.name.partition(" ")[2].partition("+")[0]
        return version if "." in version else "VERSION"

    @property
    def archs(self) -> tuple[Arch, ...]:
        """Every target that has a kernel, old to new."""
        return tuple(sorted({variant.arch for variant in self.variants}))

    @property
    def keys(self) -> tuple[KernelKey, ...]:
        """Every kernel that the build offers on at least one target."""
        return tuple(sorted({variant.key for variant in self.variants}))

    @property
    def counts(self) -> str:
        """How many kernels it offers, and in how many variants: `117 kernels in 224 variants`."""
        kernels, variants = len(self.keys), len(self.variants)
        return f"{count(kernels, 'kernel')} in {count(variants, 'variant')}"

    @cached_property
    def fallbacks(self) -> Fallbacks:
        """What its manifest states, or what the names of its families tell."""
        return self.told_fallbacks or Fallbacks.infer({v.family for v in self.variants})

    def keys_for(self, device: Device) -> tuple[KernelKey, ...]:
        """Every kernel that a GPU may expect.

        A size that only families for other targets have is none of them: there the general family
        serves it with its own sizes.
        """
        expected = {v.key for v in self.variants if not v.is_specific}
        theirs = {v.key for v in self.variants if v.is_specific and judge(v.arch, device)}
        return tuple(sorted(expected | theirs))


@dataclass(frozen=True)
class Situation:
    """One GPU with everything around it that decides what it can load."""

    device: Device
    driver: Driver | None = None  # None: unknown, taken as new enough
    smem_limit: int = 0  # bytes; 0: what devices of this compute capability have
    jit: JitPolicy = ALLOWED
    smem_lowered: bool = False  # by the variable, not by the GPU

    @property
    def smem_bytes(self) -> int:
        """Most shared memory that a block may ask for."""
        return self.smem_limit or self.device.smem_optin

    @classmethod
    def of(
        cls,
        device: Device,
        driver: Driver | None,
        environ: Mapping[str, str],
        *,
        smem_optin: int | None = None,
    ) -> Situation:
        """Apply the variables that lower the limit or change what the driver does."""
        limit = smem_optin or device.smem_optin
        lowered = min(limit, read_smem_limit(environ.get(SMEM_VARIABLE, "")) or limit)
        return cls(device, driver, lowered, jit_policy(environ), lowered < limit)


@dataclass(frozen=True)
class KernelVerdict:
    """What one GPU will run for one kernel."""

    key: KernelKey
    how: KernelHow
    reason: str
    variant: Variant | None = None
    refused: tuple[tuple[str, str], ...] = ()  # symbol, why not

    def __bool__(self) -> bool:
        return self.how != "none"

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as plain data."""
        chosen = self.variant
        role, dtype, head_dim, head_dim_v = self.key
        return {
            "role": role,
            "family": chosen.family if chosen else role,
            "dtype": dtype,
            "head_dim": head_dim,
            "head_dim_v": head_dim_v,
            "how": self.how,
            "reason": self.reason,
            "symbol": chosen.symbol if chosen else None,
            "target": str(chosen.arch) if chosen else None,
            "plan": chosen.plan if chosen else None,
            "smem_bytes": chosen.smem_bytes if chosen else None,
            "proof": chosen.proof if chosen else None,
        }


@dataclass(frozen=True)
class DeviceVerdict:
    """What one GPU will run for every kernel of a build."""

    situation: Situation
    kernels: tuple[KernelVerdict, ...]
    cause: Cause = ""
    reason: str = ""  # why not, when there is a cause
    missing_dtypes: tuple[str, ...] = field(default=())  # the GPU could, the build has none

    def __bool__(self) -> bool:
        return not self.cause

    @property
    def how(self) -> KernelHow:
        """The worst way in which a kernel of this build gets to this GPU."""
        hows = {kernel.how for kernel in self.kernels} or {"none"}
        return max(hows, key=HOW_ORDER.index)

    @property
    def targets(self) -> tuple[Arch, ...]:
        """The targets that will be used."""
        return tuple(sorted({kernel.variant.arch for kernel in self.kernels if kernel.variant}))

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as plain data."""
        driver = self.situation.driver
        return {
            "compute_capability": str(self.situation.device),
            "driver": (driver.release or format_version(driver.cuda)) if driver else None,
            "smem_limit": self.situation.smem_bytes,
            "how": self.how,
            "targets": [str(arch) for arch in self.targets],
            "cause": self.cause or None,
            "reason": self.reason or None,
            "missing_dtypes": list(self.missing_dtypes),
            "kernels": [kernel.to_json() for kernel in self.kernels],
        }


def judge_variant(variant: Variant, situation: Situation) -> RunVerdict:
    """Say how this variant would run there, shared memory included; plan 0 fits everywhere."""
    verdict = judge(
        variant.arch, situation.device, situation.driver, variant.origin, jit=situation.jit
    )
    if verdict.how != "no" and variant.plan and variant.smem_bytes > situation.smem_bytes:
        return RunVerdict(
            "no",
            f"its plan needs {variant.smem_bytes} bytes of shared memory per block, "
            f"the limit is {situation.smem_bytes}",
        )
    return verdict


def variants_meant(key: KernelKey, build: Build) -> list[Variant]:
    """Return those that the dispatcher tries for a kernel (csrc/host/dispatch.cpp, is_meant).

    They are of the smallest size of each family that holds the head_dims. Some families leave calls
    that would fill half of their columns, or less, to the general family.
    """
    role, dtype, *head_dims = key
    families: defaultdict[str, list[Variant]] = defaultdict(list)
    for variant in build.variants:
        if variant.key[:2] == (role, dtype):
            families[variant.family].append(variant)
    meant = []
    for family, members in families.items():
        size = smallest_size((v.key[2:] for v in members), (head_dims[0], head_dims[1]))
        leaves = family in build.fallbacks.leaves_half_filled
        if size and not (leaves and 2 * head_dims[0] <= size[0]):
            meant += [v for v in members if v.key[2:] == size]
    return meant


def smallest_size(
    sizes: Iterable[tuple[int, int]], head_dims: tuple[int, int]
) -> tuple[int, int] | None:
    """Return the compiled size that serves head_dim and head_dim_v of a call; None: none does."""
    holding = (
        size
        for size in sizes
        if all(own >= asked for own, asked in zip(size, head_dims, strict=True))
    )
    return min(holding, key=_columns_in_all, default=None)


def size_of_role(
    role: str, sizes: Collection[tuple[int, int]], head_dims: tuple[int, int]
) -> tuple[int, int] | None:
    """Return the same among the sizes of a role: one of latent keys serves no other head_dims."""
    if role.startswith(_LATENT):
        return head_dims if head_dims in sizes else None
    return smallest_size(sizes, head_dims)


def _columns_in_all(size: tuple[int, int]) -> tuple[int, int]:
    """Rank sizes: the fewest columns in all, among equals the fewest of v."""
    head_dim, head_dim_v = size
    return head_dim + head_dim_v, head_dim_v


def judge_kernel(key: KernelKey, build: Build, situation: Situation) -> KernelVerdict:
    """Choose the variant of one kernel as the dispatcher does and keep why others were refused."""
    dtype = key[1]
    floor = DTYPE_FLOOR.get(dtype)
    if floor is not None and situation.device < floor:
        reason = f"{dtype} needs compute capability {floor} or newer, not {situation.device}"
        return KernelVerdict(key, "not-on-this-hardware", reason)
    judged = [(v, judge_variant(v, situation)) for v in variants_meant(key, build)]
    judged.sort(key=lambda pair: (pair[1].rank, *_closeness(pair[0])))
    refused = tuple((v.symbol, verdict.reason) for v, verdict in judged if verdict.how == "no")
    if not judged:
        return KernelVerdict(key, "none", "not built")
    best, verdict = judged[0]
    if verdict.how == "no":
        reason = _closest_refusal(judged, situation.device) or verdict.reason
        return KernelVerdict(key, "none", reason, refused=refused)
    return KernelVerdict(key, verdict.how, verdict.reason, best, refused)


def _closest_refusal(judged: list[tuple[Variant, RunVerdict]], device: Device) -> str:
    """Why not the variant that the GPU itself could run; empty if there is none."""
    for variant, verdict in judged:
        if judge(variant.arch, device, None, variant.origin):
            return verdict.reason
    return ""


def _closeness(variant: Variant) -> tuple[int, int, bool, int, bool]:
    """Order variants that run equally well: newest target, bound to the chip, made for it, plan.

    Of equal plans, the one that serves most calls.
    """
    arch = variant.arch
    suffix = ("a", "f", "").index(arch.suffix)
    return (-arch.number, suffix, not variant.is_specific, -variant.plan, variant.is_scored)


def judge_device(build: Build, situation: Situation) -> DeviceVerdict:
    """Judge every kernel of a build on one GPU."""
    return _judge_device(build, situation)


@lru_cache(maxsize=256)  # advice tries the same drivers for every GPU
def _judge_device(build: Build, situation: Situation) -> DeviceVerdict:
    if not build.variants:
        reason = f"{build.name} contains no kernel"
        return DeviceVerdict(situation, (), "no-kernels", reason)
    judged = (judge_kernel(key, build, situation) for key in build.keys_for(situation.device))
    kernels = tuple(one for one in judged if one or one.key[0] not in build.fallbacks.stand_ins)
    if not any(kernel.how != "not-on-this-hardware" for kernel in kernels):
        oldest = min(kernels, key=lambda kernel: DTYPE_FLOOR[kernel.key[1]])
        return DeviceVerdict(situation, kernels, "hardware-too-old", oldest.reason)
    refusal = _refuse_driver(build, situation)
    if refusal:
        kernels = tuple(
            KernelVerdict(key, "none", refusal) for key in build.keys_for(situation.device)
        )
        return DeviceVerdict(situation, kernels, "driver-too-old", refusal)
    missing = _missing_dtypes(build, situation)
    failed = next((kernel for kernel in kernels if not kernel), None)
    if failed is None:
        return DeviceVerdict(situation, kernels, missing_dtypes=missing)
    cause, reason = _find_cause(build, situation, failed.key)
    return DeviceVerdict(situation, kernels, cause, reason or failed.reason, missing)


def _refuse_driver(build: Build, situation: Situation) -> str:
    """Why the driver loads nothing at all of this build; empty if it loads something."""
    if situation.driver is None:
        return ""
    refusals = [driver_refusal(situation.driver, variant.origin) for variant in build.variants]
    return refusals[0] or "" if all(refusals) else ""


def _missing_dtypes(build: Build, situation: Situation) -> tuple[str, ...]:
    """Return the dtypes that this GPU could compute with, for which the build has no kernel."""
    built = {variant.dtype for variant in build.variants}
    able = (dtype for dtype, floor in DTYPE_FLOOR.items() if floor <= situation.device)
    return tuple(dtype for dtype in able if dtype not in built | {IEEE32})


def _find_cause(build: Build, situation: Situation, key: KernelKey) -> tuple[Cause, str]:
    """Find the one thing that, were it different, would let this kernel run."""
    lacking = JitPolicy(lacks_compiler=situation.jit.lacks_compiler)
    relaxed: tuple[tuple[Cause, Situation], ...] = (
        ("driver-too-old", replace(situation, driver=None)),
        ("jit-variable", replace(situation, jit=lacking)),
        ("jit-compiler-absent", replace(situation, jit=ALLOWED)),
        ("jit-variable", replace(situation, driver=None, jit=lacking)),
        ("smem-limit", replace(situation, smem_limit=_NO_LIMIT)),
    )
    for cause, other in relaxed:
        verdict = judge_kernel(key, build, other)
        if verdict.variant is not None:
            return cause, judge_variant(verdict.variant, situation).reason
    return "no-matching-code", ""
