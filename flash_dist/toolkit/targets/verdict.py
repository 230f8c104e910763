"""Predicts the kernel variant that each GPU runs. Pure functions; `advice.py` explains verdicts.

`compatibility.py` has the rules for one image on one device. This module applies them to all
variants of a build as the dispatcher does: the best code first, then the largest shared-memory plan
that fits.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, Literal

from ..product import PRODUCT, VARIABLES
from .archs import Arch, ArchSet, own_targets
from .axes import AXES, Axes, KernelKey, Place, is_plain, smallest_size
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
from .devices import ANY_GPU, KIB, Device, Driver, format_version
from .fallbacks import Fallbacks
from .wording import count

if TYPE_CHECKING:
    from collections.abc import Mapping


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
# From best to worst. Missing hardware support is not a fault of the build.
HOW_ORDER: tuple[KernelHow, ...] = (
    "not-on-this-hardware", "native", "family", "same-major", "jit", "unverified", "none",
)  # fmt: skip

# For each word of an axis (axes.py), such as bf16: first compute capability with its instructions.
FLOORS: Final = {name: word.floor for name, word in AXES.words.items()}
OLDEST: Final = Device.parse(PRODUCT.oldest_gpu) if PRODUCT.oldest_gpu else ANY_GPU
FLOOR: Final = max(OLDEST, min(FLOORS.values(), default=OLDEST))

NO_OPT_IN = 48 * KIB  # bytes that every block may use: plan 0
SMEM_VARIABLE = f"{VARIABLES}SMEM_LIMIT"
_NO_LIMIT = 1 << 30
_LIMIT = re.compile(r"[ \t-\r]*\+?0*([1-9][0-9]{0,9})")
_MOST_LIMIT = 2**31 - 1


def read_smem_limit(text: str) -> int | None:
    """Read the bytes in a value of SMEM_VARIABLE; None if the dispatcher rejects the value."""
    found = _LIMIT.fullmatch(text)
    limit = int(found[1]) if found else 0
    return limit if 0 < limit <= _MOST_LIMIT else None


@dataclass(frozen=True)
class Variant:
    """One kernel compiled for one target, as found in a binary or declared by a manifest."""

    symbol: str
    family: str
    key: KernelKey  # the kernel of this variant
    arch: Arch
    plan: int = 0  # KB of shared memory; 0 needs no opt-in
    origin: Origin = DEFAULT_ORIGIN
    proof: str = ""  # "native", "jit", "assembled"; empty if unknown
    comes_last: bool = False  # tried after variants of other families

    @classmethod
    def of(  # noqa: PLR0913 - all that is known of it
        cls,
        symbol: str,
        family: str,
        place: Place,
        arch: Arch,
        *,
        axes: Axes = AXES,
        origin: Origin = DEFAULT_ORIGIN,
        proof: str = "",
    ) -> Variant:
        """Return the variant of a family with these values of the axes."""
        key = KernelKey(axes.role_of(family), place.words, place.sizes)
        last = axes.comes_last(family)
        return cls(symbol, family, key, arch, place.plan, origin, proof, last)

    @property
    def is_specific(self) -> bool:
        """Tell if the family of the kernel is for some targets only."""
        return self.family != self.key.role

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory that the plan reserves for a block."""
        return self.plan * KIB or NO_OPT_IN


@dataclass(frozen=True)
class Build:
    """The contents of a build, and the arch sets that its project publishes."""

    name: str  # "NAME 0.1.0+cu130.hopper"
    variants: tuple[Variant, ...]
    archsets: tuple[ArchSet, ...] = ()
    toolkit: str | None = None
    told_fallbacks: Fallbacks | None = None  # None: its manifest does not state them
    axes: Axes = AXES
    oldest: Device = OLDEST  # the lowest compute capability that the kernels are for
    index: str = PRODUCT.index  # address of the package index with the releases

    def __hash__(self) -> int:
        """Hash only two values: a build is a cache key, and may have a thousand variants."""
        return hash((self.name, len(self.variants)))

    @property
    def release(self) -> str:
        """The version without its arch set, `0.1.0`; a placeholder if unknown."""
        version = self.name.partition(" ")[2].partition("+")[0]
        return version if "." in version else "VERSION"

    @property
    def project(self) -> str:
        """The name of the package."""
        return self.name.partition(" ")[0]

    @property
    def floor(self) -> Device:
        """The oldest GPU that any build of the package can serve."""
        words = (word.floor for word in self.axes.words.values())
        return max(self.oldest, min(words, default=self.oldest))

    @property
    def own_targets(self) -> tuple[Arch, ...]:
        """The SASS targets with a suffix in the published sets."""
        return own_targets(self.archsets)

    @property
    def archs(self) -> tuple[Arch, ...]:
        """Every target that has a kernel, oldest first."""
        return tuple(sorted({variant.arch for variant in self.variants}))

    @property
    def counts(self) -> str:
        """Counts of the build's kernels: `117 kernels in 224 variants`, `8 kernels of 2 files`."""
        plain = [one for one in self.variants if is_plain(one.key)]
        listed = [one for one in self.variants if not is_plain(one.key)]
        told = []
        if listed or not plain:
            kernels = len({one.key for one in listed})
            told.append(f"{count(kernels, 'kernel')} in {count(len(listed), 'variant')}")
        if plain:
            kernels, files = len({one.symbol for one in plain}), len({one.key for one in plain})
            told.append(f"{count(kernels, 'kernel')} of {count(files, 'file')}")
        return " and ".join(told)

    @cached_property
    def fallbacks(self) -> Fallbacks:
        """The manifest's fallbacks, or fallbacks inferred from families and their roles."""
        return self.told_fallbacks or Fallbacks.infer({v.family: v.key.role for v in self.variants})

    def keys_for(self, device: Device) -> tuple[KernelKey, ...]:
        """Return the keys of all kernels that a GPU should be able to run.

        Sizes that only families for other targets have are left out: for calls of these sizes, the
        general family uses its own sizes.
        """
        expected = {v.key for v in self.variants if not v.is_specific}
        theirs = {v.key for v in self.variants if v.is_specific and judge(v.arch, device)}
        return tuple(sorted(expected | theirs))


@dataclass(frozen=True)
class Situation:
    """One GPU with everything that decides which code it can load."""

    device: Device
    driver: Driver | None = None  # None: unknown, counts as new enough
    smem_limit: int = 0  # bytes; 0: the default of this compute capability
    jit: JitPolicy = ALLOWED
    smem_lowered: bool = False  # SMEM_VARIABLE sets the limit, not the GPU

    @property
    def smem_bytes(self) -> int:
        """Maximum shared memory of a block."""
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
        """Return the situation of a GPU, with the smem limit and JIT policy from `environ`."""
        limit = smem_optin or device.smem_optin
        lowered = min(limit, read_smem_limit(environ.get(SMEM_VARIABLE, "")) or limit)
        return cls(device, driver, lowered, jit_policy(environ), lowered < limit)


@dataclass(frozen=True)
class KernelVerdict:
    """Verdict for one kernel on one GPU."""

    key: KernelKey
    how: KernelHow
    reason: str
    variant: Variant | None = None
    refused: tuple[tuple[str, str], ...] = ()  # pairs of symbol and reason

    def __bool__(self) -> bool:
        return self.how != "none"

    def to_json(self, axes: Axes) -> dict[str, Any]:
        """Return the verdict as plain data."""
        chosen = self.variant
        plan = {axes.plan: chosen.plan if chosen else None} if axes.plan else {}
        return {
            "role": self.key.role,
            "family": chosen.family if chosen else self.key.role,
            **axes.describe(self.key),
            "how": self.how,
            "reason": self.reason,
            "symbol": chosen.symbol if chosen else None,
            "target": str(chosen.arch) if chosen else None,
            **plan,
            "smem_bytes": chosen.smem_bytes if chosen else None,
            "proof": chosen.proof if chosen else None,
        }


@dataclass(frozen=True)
class DeviceVerdict:
    """Verdicts for all kernels of a build on one GPU."""

    situation: Situation
    kernels: tuple[KernelVerdict, ...]
    cause: Cause = ""
    reason: str = ""  # empty without a cause
    missing_words: tuple[str, ...] = ()  # dtypes that the GPU supports but the build lacks
    axes: Axes = AXES

    def __bool__(self) -> bool:
        return not self.cause

    @property
    def how(self) -> KernelHow:
        """The worst `how` of the kernels, in HOW_ORDER; `none` if there are no kernels."""
        hows = {kernel.how for kernel in self.kernels} or {"none"}
        return max(hows, key=HOW_ORDER.index)

    @property
    def targets(self) -> tuple[Arch, ...]:
        """The targets of the chosen variants."""
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
            "missing_dtypes": list(self.missing_words),
            "kernels": [kernel.to_json(self.axes) for kernel in self.kernels],
        }


def judge_variant(variant: Variant, situation: Situation) -> RunVerdict:
    """Judge how a variant would run on a GPU, and whether its plan fits; plan 0 always does."""
    verdict = judge(
        variant.arch, situation.device, situation.driver, variant.origin, jit=situation.jit
    )
    if verdict.how != "no" and variant.plan and variant.smem_bytes > situation.smem_bytes:
        needs = f"its plan needs {variant.smem_bytes} bytes of shared memory per block"
        return RunVerdict("no", f"{needs}, the limit is {situation.smem_bytes}")
    return verdict


def variants_meant(key: KernelKey, build: Build) -> list[Variant]:
    """Return the variants that the dispatcher tries for a kernel (native/dispatch.cpp, is_meant).

    Of each family, these are the variants with the smallest sizes that hold the sizes of the call.
    Some families leave a call to the general family if it would fill at most half of their first
    size.
    """
    families: defaultdict[str, list[Variant]] = defaultdict(list)
    for variant in build.variants:
        if variant.key[:2] == key[:2]:
            families[variant.family].append(variant)
    meant = []
    for family, members in families.items():
        sizes = smallest_size((v.key.sizes for v in members), key.sizes)
        if sizes is None:
            continue
        leaves = family in build.fallbacks.leaves_half_filled
        if not (leaves and 2 * key.sizes[0] <= sizes[0]):
            meant += [v for v in members if v.key.sizes == sizes]
    return meant


def judge_kernel(key: KernelKey, build: Build, situation: Situation) -> KernelVerdict:
    """Choose the variant of one kernel as the dispatcher does, and keep the refusals."""
    floors = ((word, floor_of(word, build.axes)) for word in key.words)
    for what, floor in ((build.project, build.oldest), *floors):
        if situation.device < floor:
            reason = f"{what} needs compute capability {floor} or newer, not {situation.device}"
            return KernelVerdict(key, "not-on-this-hardware", reason)
    judged = [(v, judge_variant(v, situation)) for v in variants_meant(key, build)]
    judged.sort(key=lambda pair: (pair[1].rank, *_closeness(pair[0])))
    refused = tuple((v.symbol, verdict.reason) for v, verdict in judged if verdict.how == "no")
    if not judged:
        return KernelVerdict(key, "none", "not built")
    best, verdict = judged[0]
    if verdict.how == "no":
        device = situation.device
        if reason := _lacks_room(key, build.axes, device):
            return KernelVerdict(key, "not-on-this-hardware", reason)
        # If the driver refuses a variant that the GPU itself could run, report the refusal.
        able = (no.reason for one, no in judged if judge(one.arch, device, None, one.origin))
        return KernelVerdict(key, "none", next(able, verdict.reason), refused=refused)
    return KernelVerdict(key, verdict.how, verdict.reason, best, refused)


def _lacks_room(key: KernelKey, axes: Axes, device: Device) -> str:
    """Say which size a GPU has no room for; empty if it has room for all sizes."""
    for axis, size in zip(axes.of("holds"), key.sizes, strict=False):
        floor = axis.floor_of(size)
        if device < floor:
            return f"{axis.name} {size} needs compute capability {floor} or newer, not {device}"
    return ""


def _closeness(variant: Variant) -> tuple[int, int, bool, int, bool]:
    """Return a sort key, best first, for variants that run equally well.

    Newest target, then suffix `a` before `f` before none, then families that are only for some
    targets, then the largest plan, then variants that do not come last.
    """
    arch = variant.arch
    suffix = ("a", "f", "").index(arch.suffix)
    return (-arch.number, suffix, not variant.is_specific, -variant.plan, variant.comes_last)


def judge_device(build: Build, situation: Situation) -> DeviceVerdict:
    """Judge every kernel of a build on one GPU."""
    return _judge_device(build, situation)


@lru_cache(maxsize=256)  # advice asks about the same drivers for every GPU
def _judge_device(build: Build, situation: Situation) -> DeviceVerdict:
    make_verdict = partial(DeviceVerdict, situation, axes=build.axes)
    if not build.variants:
        return make_verdict((), "no-kernels", f"{build.name} contains no kernel")
    judged = (judge_kernel(key, build, situation) for key in build.keys_for(situation.device))
    kernels = tuple(one for one in judged if one or one.key.role not in build.fallbacks.stand_ins)
    if not any(kernel.how != "not-on-this-hardware" for kernel in kernels):
        oldest = min(kernels, key=lambda one: _floor_of_key(one.key, build.axes))
        return make_verdict(kernels, "hardware-too-old", oldest.reason)
    refusal = _refuse_driver(build, situation)
    if refusal:
        kernels = tuple(
            KernelVerdict(key, "none", refusal) for key in build.keys_for(situation.device)
        )
        return make_verdict(kernels, "driver-too-old", refusal)
    missing = _missing_words(build, situation)
    failed = next((kernel for kernel in kernels if not kernel), None)
    if failed is None:
        return make_verdict(kernels, missing_words=missing)
    cause, reason = _find_cause(build, situation, failed.key)
    return make_verdict(kernels, cause, reason or failed.reason, missing)


def _refuse_driver(build: Build, situation: Situation) -> str:
    """Return the reason why the driver loads nothing of this build; empty if it loads something."""
    if situation.driver is None:
        return ""
    refusals = [driver_refusal(situation.driver, variant.origin) for variant in build.variants]
    return refusals[0] or "" if all(refusals) else ""


def _missing_words(build: Build, situation: Situation) -> tuple[str, ...]:
    """Return the words, such as dtypes, that this GPU supports but the build has no kernel for.

    A word that is part of another word is omitted.
    """
    built = {word for variant in build.variants for word in variant.key.words}
    words = (word for word in build.axes.words.values() if not word.part_of)
    able = (word.name for word in words if floor_of(word.name, build.axes) <= situation.device)
    return tuple(name for name in able if name not in built)


def floor_of(word: str, axes: Axes = AXES) -> Device:
    """Return the first compute capability with the instructions for a word, 0.0 if unknown."""
    known = axes.words.get(word)
    return known.floor if known else ANY_GPU


def _floor_of_key(key: KernelKey, axes: Axes) -> Device:
    return max((floor_of(word, axes) for word in key.words), default=ANY_GPU)


def _find_cause(build: Build, situation: Situation, key: KernelKey) -> tuple[Cause, str]:
    """Return the first obstacle without which this kernel would run, and its reason.

    If there is no such obstacle, return `no-matching-code` without a reason.
    """
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
