"""Compile targets and sets of them: parse, print, order, gencode flags.

A GPU *has* compute capability 9.0; code is *for* `sm_90a` (SASS) or `compute_90` (PTX, compiled by
the driver). Suffix `a` binds code to one chip, `f` to one family.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from ..errors import ArchError
from ..product import NAME
from .devices import Device, parse_version
from .gpus import CHIPS

if TYPE_CHECKING:
    from collections.abc import Iterable

DEFAULT_TOOLKIT: Final = "13.0"
DEFAULT_MACHINE: Final = "x86_64"
SESSIONS: Final = {"x86_64": "build_wheels", "aarch64": "build_arm"}  # nox sessions by CPU

_ARCH = re.compile(r"(?:(sm_|compute_)?([1-9][0-9]{1,2})|([1-9][0-9]?)\.([0-9]))([af]?)")


@dataclass(frozen=True, order=True)
class Arch:
    """A compile target such as `sm_90a` (SASS) or `compute_90` (PTX)."""

    major: int
    minor: int
    suffix: str = ""  # "", "a" (this chip only) or "f" (this family)
    ptx: bool = False

    @classmethod
    def parse(cls, text: str) -> Arch:
        """Read `sm_90a`, `9.0a` or `90a`, which mean SASS, or `compute_80`, which means PTX.

        Any well-formed number is valid: a binary may hold code for GPUs newer than this package.
        """
        match = _ARCH.fullmatch(text.strip())
        if match is None:
            message = (
                f"an architecture looks like `sm_90a`, `compute_80` or `9.0a`, got `{text:.60}`"
            )
            raise ArchError(message, hint=_suggestion(text))
        prefix, number, major, minor, suffix = match.groups()
        if number is not None:
            major, minor = number[:-1], number[-1]
        return cls(int(major), int(minor), suffix, ptx=prefix == "compute_")

    def __str__(self) -> str:
        return f"{'compute' if self.ptx else 'sm'}_{self.number}{self.suffix}"

    @property
    def number(self) -> int:
        """The decimal form: 90 for `sm_90a`."""
        return self.major * 10 + self.minor

    @property
    def dotted(self) -> str:
        """The form of TORCH_CUDA_ARCH_LIST without `+PTX`, so the same for SASS and PTX: `9.0a`."""
        return f"{self.major}.{self.minor}{self.suffix}"

    @property
    def identifier(self) -> str:
        """The form for C symbols and version labels: `sm90a`, `compute80`."""
        return str(self).replace("_", "")

    @property
    def gencode(self) -> str:
        """The nvcc flag that compiles this target and nothing else."""
        return f"-gencode=arch=compute_{self.number}{self.suffix},code={self}"

    @property
    def device(self) -> Device:
        """The compute capability in the name of the target."""
        return Device(self.major, self.minor)

    @property
    def smem_optin(self) -> int:
        """Maximum bytes of shared memory per block (opt-in) on the GPU in the target's name."""
        return self.device.smem_optin


def _compiled_by(toolkit: str) -> tuple[Arch, ...]:
    version = parse_version(toolkit)
    return tuple(Arch(*chip.version, suffix) for chip in CHIPS for suffix in chip.suffixes(version))


# SASS targets of each toolkit (`nvcc --list-gpu-code`; suffixes: `nvcc --help`). Each toolkit has
# the same targets for PTX.
TOOLKIT_ARCHS: dict[str, tuple[Arch, ...]] = {
    toolkit: _compiled_by(toolkit)
    for toolkit in ("12.0", "12.8", "12.9", "13.0", "13.1", "13.2", "13.4", "13.5")
}

KNOWN_ARCHS: tuple[Arch, ...] = tuple(
    sorted({Arch(3, 5), Arch(3, 7), *(arch for archs in TOOLKIT_ARCHS.values() for arch in archs)})
)

# The names allowed in TORCH_CUDA_ARCH_LIST, with PyTorch's meaning (torch.utils.cpp_extension).
NAMED_LISTS: dict[str, str] = {
    "Kepler+Tesla": "3.7",
    "Kepler": "3.5+PTX",
    "Maxwell": "5.0;5.2+PTX",
    "Maxwell+Tegra": "5.3",
    "Pascal": "6.0;6.1+PTX",
    "Volta": "7.0+PTX",
    "Volta+Tegra": "7.2",
    "Turing": "7.5+PTX",
    "Ampere": "8.0;8.6+PTX",
    "Ampere+Tegra": "8.7",
    "Ada": "8.9+PTX",
    "Hopper": "9.0+PTX",
    "Blackwell": "10.0;10.3;12.0;12.1+PTX",
    "Blackwell+Tegra": "11.0",
    "Rubin": "10.7+PTX",
}
_NAMED_LISTS = {name.lower(): archs for name, archs in NAMED_LISTS.items()}


@dataclass(frozen=True)
class ArchSet:
    """Targets that are compiled into one wheel."""

    name: str
    label: str  # goes into the wheel's version: X+cu130.<label>
    archs: tuple[Arch, ...]  # oldest first, SASS before PTX of the same number
    who: str = ""  # GPUs or drivers that the set is for, in words
    toolkit: str = DEFAULT_TOOLKIT
    machine: str = field(default=DEFAULT_MACHINE, kw_only=True)  # in the form of `uname -m`
    budget_bytes: int | None = field(default=None, kw_only=True)  # maximum bytes of the wheel
    wheel_bytes: int | None = field(default=None, kw_only=True)  # bytes of the last built wheel

    @classmethod
    def parse(cls, text: str, *, name: str = "custom", label: str | None = None) -> ArchSet:
        """Read a TORCH_CUDA_ARCH_LIST: targets or names such as `Ampere`, in any order.

        Blanks or semicolons separate them. `8.9+PTX` means SASS and PTX for 8.9, `compute_89` means
        only PTX.

        Args:
            text: The list.
            name: Name of the set in messages.
            label: Label of the wheel's version. None: made from the targets, as in `sm75.sm86`.
        """
        archs: set[Arch] = set()
        for token in re.split(r"[;\s]+", text.strip("; \t\n")):
            archs.update(_parse_token(token, text, name))
        targets = tuple(sorted(archs))
        return cls(name, label or ".".join(arch.identifier for arch in targets), targets)

    def __str__(self) -> str:
        tokens = []
        for arch in self.archs:
            has_twin = replace(arch, ptx=not arch.ptx) in self.archs
            if not arch.ptx:
                tokens.append(f"{arch.dotted}+PTX" if has_twin else arch.dotted)
            elif not has_twin:
                tokens.append(str(arch))
        return ";".join(tokens)

    def pin(self, release: str, project: str = NAME) -> str:
        """Return the requirement that pins the wheel of a release: `NAME==0.1.0+cu130.hopper`."""
        return f"{project}=={release}+cu{self.toolkit.replace('.', '')}.{self.label}"

    @property
    def session(self) -> str:
        """The nox session that builds the set."""
        return SESSIONS[self.machine]

    @property
    def gencode_flags(self) -> tuple[str, ...]:
        """The nvcc flags, one per target."""
        return tuple(arch.gencode for arch in self.archs)

    def to_json(self) -> dict[str, str]:
        """Return the set as plain data, as in the build manifest."""
        return {
            "name": self.name,
            "label": self.label,
            "archs": str(self),
            "who": self.who,
            "toolkit": self.toolkit,
            "machine": self.machine,
        }


def _parse_token(token: str, text: str, name: str) -> tuple[Arch, ...]:
    where = f"in arch set `{name}` (`{text}`)"
    if not token:
        message = f"no architecture {where}"
        raise ArchError(message, hint="write a list such as `8.0;9.0a+PTX`")
    named = _NAMED_LISTS.get(token.lower())
    if named is not None:
        return ArchSet.parse(named, name=token).archs
    number, with_ptx = (token[:-4], True) if token.upper().endswith("+PTX") else (token, False)
    if _ARCH.fullmatch(number) is None or (with_ptx and "_" in number):
        message = f"malformed architecture `{token}` {where}"
        raise ArchError(message, hint=_suggestion(token))
    arch = Arch.parse(number)
    if replace(arch, ptx=False) not in KNOWN_ARCHS:
        message = f"unknown architecture `{token}` {where}"
        raise ArchError(message, hint=_suggestion(token))
    return (arch, replace(arch, ptx=True)) if with_ptx else (arch,)


def _suggestion(text: str) -> str | None:
    """Suggest the known architecture or list with the most similar spelling, if any."""
    spellings = {name.lower(): name for name in NAMED_LISTS}
    for arch in KNOWN_ARCHS:
        forms = (arch.dotted, str(arch), str(replace(arch, ptx=True)))
        spellings.update(zip(forms, forms, strict=True))
    near = difflib.get_close_matches(text.strip().lower(), spellings, n=1, cutoff=0.5)
    return f"did you mean `{spellings[near[0]]}`?" if near else None


def own_targets(archsets: Iterable[ArchSet]) -> tuple[Arch, ...]:
    """Return the `a` and `f` SASS targets of sets, which GPUs use instead of plain targets."""
    every = {arch for one in archsets for arch in one.archs}
    return tuple(sorted(arch for arch in every if arch.suffix and not arch.ptx))


def describe_plain(archset: ArchSet, own: Iterable[Arch]) -> str:
    """Say which targets of a set, such as `sm_90`, lack kernels that need a suffix; empty if none.

    Args:
        archset: The set to build.
        own: Targets with a suffix, such as `sm_90a`, that have kernels of their own.
    """
    plain = [
        (replace(one, suffix=""), one)
        for one in own
        if one not in archset.archs and replace(one, suffix="") in archset.archs
    ]
    return "; ".join(
        f"{arch} has none of the kernels that are only for {one}: `{one.dotted}` builds these"
        for arch, one in plain
    )


def unsupported(archset: ArchSet, toolkit: str) -> tuple[Arch, ...]:
    """Return the targets of a set that this toolkit cannot compile.

    A toolkit that is not in the table counts as the newest known toolkit before it.

    Raises:
        ArchError: The toolkit is older than all toolkits in the table.
    """
    version = parse_version(toolkit)
    known = [name for name in TOOLKIT_ARCHS if parse_version(name) <= version]
    if not known:
        oldest = min(TOOLKIT_ARCHS, key=parse_version)
        message = f"the toolkit must be CUDA {oldest} or newer, got CUDA {toolkit}"
        raise ArchError(message, hint=f"the default is {DEFAULT_TOOLKIT}")
    able = TOOLKIT_ARCHS[max(known, key=parse_version)]
    return tuple(arch for arch in archset.archs if replace(arch, ptx=False) not in able)


def require_supported(archset: ArchSet, toolkit: str, *, skip_unsupported: bool = False) -> ArchSet:
    """Return the set; if `skip_unsupported`, without targets that the toolkit cannot compile.

    Raises:
        ArchError: The toolkit cannot compile a target and `skip_unsupported` is false, or it cannot
            compile any target.
    """
    refused = unsupported(archset, toolkit)
    if not refused:
        return archset
    kept = tuple(arch for arch in archset.archs if arch not in refused)
    names = ", ".join(f"`{arch}`" for arch in refused)
    message = f"CUDA {toolkit} cannot compile {names} of arch set `{archset.name}` (`{archset}`)"
    if not kept:
        raise ArchError(message, hint="choose an arch set this toolkit knows, such as `all`")
    if not skip_unsupported:
        raise ArchError(message, hint="`--skip-unsupported` builds the rest")
    ad_hoc = archset.label == ".".join(arch.identifier for arch in archset.archs)
    label = ".".join(arch.identifier for arch in kept) if ad_hoc else archset.label
    return replace(archset, archs=kept, label=label)
