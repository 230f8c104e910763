"""Chooses the arch sets to build: named sets, TORCH_CUDA_ARCH_LIST, or else all published sets."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ...errors import ArchError
from ...machine.libcuda import read_cuda
from ...product import NAME, VARIABLES
from ...targets.archs import SESSIONS, ArchSet, describe_plain, own_targets, require_supported
from ...targets.devices import parse_version
from ...targets.needs import list_targets
from ...targets.verdict import FLOOR
from ..project import can_read_toml, load_project
from ..toolchain.cross import target_machine

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ...machine.libcuda import Cuda
    from ...targets.archs import Arch

SKIP_UNSUPPORTED = "--skip-unsupported"
NAMED = f"{VARIABLES}ARCH_SET"  # the variable that names a published set
VARIABLE = "TORCH_CUDA_ARCH_LIST"
NATIVE = "native"  # value of TORCH_CUDA_ARCH_LIST: build for the GPUs of this machine


@dataclass(frozen=True)
class Choice:
    """The arch sets of one build and the reason for them."""

    sets: tuple[ArchSet, ...]
    reason: str

    def __str__(self) -> str:
        names = "; ".join(f"{one.name} = {one}" for one in self.sets)
        lines = [f"arch sets: {names} ({self.reason})"]
        return "\n".join([*lines, *(f"warning: {note}" for note in self.notes)])

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each set with a plain target that lacks kernels of a suffixed target."""
        return tuple(note for one in self.sets if (note := describe_lacking(one)))


def choose_sets(
    args: Sequence[str],
    environ: Mapping[str, str],
    published: Mapping[str, ArchSet],
    toolkit: str | None = None,
) -> Choice:
    """Choose the sets, and drop or reject targets that the toolkit cannot compile.

    Args:
        args: Names of published sets, and possibly `--skip-unsupported`.
        environ: Variables, which may include TORCH_CUDA_ARCH_LIST and the target CPU.
        published: The published sets by name.
        toolkit: CUDA version that compiles all sets of the same major version; None: each set is
            compiled with its own version.
    """
    skip = SKIP_UNSUPPORTED in args
    names = list(dict.fromkeys(arg for arg in args if arg != SKIP_UNSUPPORTED))
    choice = _choose(names, environ, published)
    choice = replace(choice, sets=tuple(_require_floor(one, skip=skip) for one in choice.sets))
    able = [
        require_supported(one, _compiling(one, toolkit), skip_unsupported=skip)
        for one in choice.sets
    ]
    # A set from the environment is named after its targets. Rename it if targets were dropped.
    sets = tuple(one if one.name in published else replace(one, name=one.label) for one in able)
    return Choice(sets, choice.reason)


def toolkits_of(
    args: Sequence[str], environ: Mapping[str, str], published: Mapping[str, ArchSet]
) -> list[str]:
    """Return the CUDA versions that the sets of a build need, the newest first."""
    names = [arg for arg in args if arg != SKIP_UNSUPPORTED]
    wanted = {one.toolkit for one in _choose(names, environ, published).sets}
    return sorted(wanted, key=parse_version, reverse=True)


def same_major(one: str, other: str) -> bool:
    """Tell if two CUDA versions have the same major version, such as 13.0 and 13.2."""
    return parse_version(one)[0] == parse_version(other)[0]


def _compiling(archset: ArchSet, toolkit: str | None) -> str:
    """Return the CUDA version that compiles a set.

    It is `toolkit`, or the set's own version if `toolkit` is None or has another major version.
    """
    if toolkit is None or not same_major(archset.toolkit, toolkit):
        return archset.toolkit
    return toolkit


def _choose(
    names: Sequence[str], environ: Mapping[str, str], published: Mapping[str, ArchSet]
) -> Choice:
    listed = environ.get(VARIABLE, "").strip()
    machine = target_machine(environ)
    if names:
        ignored = f"; {VARIABLE} = `{listed}` is not used" if listed else ""
        sets = tuple(_require_machine(_find(name, published), machine) for name in names)
        return Choice(sets, f"named on the command line{ignored}")
    if listed:
        own = own_targets(published.values())
        parsed = list_of_gpus(own) if listed == NATIVE else ArchSet.parse(listed, name=VARIABLE)
        who = f"{VARIABLE} = {listed}"
        ad_hoc = ArchSet(parsed.label, parsed.label, parsed.archs, who, machine=machine)
        return Choice((ad_hoc,), f"{VARIABLE} = `{listed}`, no set named on the command line")
    every = tuple(one for one in published.values() if one.machine == machine)
    if not every:
        named = ", ".join(f"`{one.name}` ({one.machine})" for one in published.values())
        message = f"no arch set is for {machine}, published are {named}"
        raise ArchError(message, hint=f'a set with `machine = "{machine}"` is built for it')
    reason = f"no set named, {VARIABLE} not set: all published for {machine}"
    return Choice(every, reason)


def _require_floor(archset: ArchSet, *, skip: bool) -> ArchSet:
    """Reject targets older than FLOOR; with `skip`, drop them unless no target would be left."""
    kept = tuple(arch for arch in archset.archs if arch.device >= FLOOR)
    if len(kept) == len(archset.archs):
        return archset
    if kept and skip:
        label = ".".join(arch.identifier for arch in kept)
        return replace(archset, name=label, label=label, archs=kept)
    old = ", ".join(f"`{arch}`" for arch in archset.archs if arch not in kept)
    message = f"{NAME} starts at {FLOOR}, `{archset.who or archset.name}` asks for {old}"
    rest, others = f"`{SKIP_UNSUPPORTED}` builds the rest", f"`{VARIABLE}='7.5;8.6'` names others"
    raise ArchError(message, hint=rest if kept else others)


def describe_lacking(archset: ArchSet) -> str:
    """Describe the plain targets of a set that lack kernels of a suffixed target; empty if none."""
    return describe_plain(archset, load_project().own_targets) if can_read_toml() else ""


def list_of_gpus(own: tuple[Arch, ...], ask_driver: Callable[[], Cuda] = read_cuda) -> ArchSet:
    """Return the targets of this machine's GPUs, for `native`.

    Args:
        own: Targets with a suffix, which GPUs use instead of plain targets.
        ask_driver: Returns the GPUs.
    """
    cuda = ask_driver()
    found = list_targets((gpu.device for gpu in cuda.gpus), own)
    if not found.archs:
        reason = f" ({cuda.reason})" if cuda.reason else ""
        message = f"{VARIABLE} is `{NATIVE}`, and there is no GPU here to build for{reason}"
        raise ArchError(message, hint=f"name the GPUs, as in `{VARIABLE}='8.6;9.0a'`")
    return replace(found, label=".".join(arch.identifier for arch in found.archs))


def _require_machine(archset: ArchSet, machine: str) -> ArchSet:
    if archset.machine != machine:
        message = f"arch set `{archset.name}` is for {archset.machine}, this builds for {machine}"
        session = SESSIONS[archset.machine]
        raise ArchError(message, hint=f"`nox -s {session} -- {archset.name}` builds it")
    return archset


def _find(name: str, published: Mapping[str, ArchSet]) -> ArchSet:
    if name in published:
        return published[name]
    near = difflib.get_close_matches(name, published, n=1)
    message = f"unknown arch set `{name}`, published are {', '.join(published)}"
    hint = f"did you mean `{near[0]}`?" if near else f"for a list of your own set {VARIABLE}"
    raise ArchError(message, hint=hint)
