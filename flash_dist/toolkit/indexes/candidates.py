"""The candidates of an index: local wheels judged by their manifest, other wheels by their name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version

from ..builds.contents import read_manifest
from ..builds.manifest import declare_build
from ..builds.published import MACHINES, known_sets, pick_for
from ..errors import ArchError, KernelsError
from ..product import NAME
from ..targets.archs import DEFAULT_MACHINE, Arch
from .digests import require_digest
from .index import IndexedWheel, ask_size
from .patience import Patience
from .selection import Candidate, make_build

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .index import Index


@dataclass(frozen=True)
class Offer:
    """The candidates of an index, and the reasons why other files are not candidates."""

    candidates: tuple[Candidate, ...]
    problems: tuple[str, ...] = ()


def read_offer(index: Index, *, machine: str = "", python: str = "", here: bool = True) -> Offer:
    """Read the candidates that an index offers.

    Args:
        index: The index.
        machine: Drop wheels for CPUs of another kind; empty to keep all.
        python: Drop wheels that a Python of this version cannot install; empty to keep all.
        here: True if wheels must install into the running Python on this system. False for a Python
            on another Linux machine.
    """
    meant = [wheel for wheel in index.wheels if not machine or wheel.runs_on(machine)]
    fitting = [wheel for wheel in meant if not python or wheel.fits(python, here=here)]
    unfit = len(meant) - len(fitting)
    whom = "this Python or system" if here else f"Python {python}"
    left_out = f"{unfit} of {len(index.wheels)} wheels are not for {whom}"
    read = [_read_if_possible(wheel) for wheel in _with_sizes(fitting)]
    candidates = [one for one in read if isinstance(one, Candidate)]
    labelled = {_release(one) for one in candidates if _has_label(one)}
    return Offer(
        tuple(  # if a release has labelled wheels, drop its unlabelled ones
            one for one in candidates if _has_label(one) or _release(one) not in labelled
        ),
        (*([left_out] if unfit else []), *(one for one in read if isinstance(one, str))),
    )


def _with_sizes(wheels: Sequence[IndexedWheel]) -> list[IndexedWheel]:
    """Ask the servers for the sizes of the newest wheels if a page omits them."""
    newest = max((Version(wheel.version.public) for wheel in wheels), default=None)
    patience = Patience()
    return [
        ask_size(wheel, patience) if Version(wheel.version.public) == newest else wheel
        for wheel in wheels
    ]


def _has_label(one: Candidate) -> bool:
    return one.version is None or one.version.local is not None


def _release(one: Candidate) -> tuple[str, str]:
    return one.name, str(one.version).partition("+")[0]


def _read_if_possible(wheel: IndexedWheel) -> Candidate | str:
    """Return a candidate, or the reason why the wheel cannot be one."""
    try:
        return _read_candidate(wheel)
    except KernelsError as error:
        return f"{wheel.file_name} is not judged: {error.message}"


def _read_candidate(wheel: IndexedWheel) -> Candidate:
    if wheel.is_local:
        require_digest(Path(wheel.location), wheel.digest, wheel.file_name)
        manifest = read_manifest(wheel.location)
        build, name = declare_build(manifest), manifest.arch_set.name
    else:
        name, archs, toolkit = _read_label(wheel)
        build = make_build(f"{NAME} {wheel.version}", archs, toolkit)
    return Candidate(name, build, wheel.size, wheel.version, wheel)


def _read_label(wheel: IndexedWheel) -> tuple[str, tuple[Arch, ...], str]:
    """Return the arch set, targets and toolkit that a wheel's version names.

    The label of the version names a published set, or lists targets: `sm75.sm86`. A version without
    a label, as on PyPI, means the default set for the wheel's CPU.
    """
    label = wheel.label
    if wheel.version.local is None:
        default = pick_for("pip", machine=next(filter(wheel.runs_on, MACHINES), DEFAULT_MACHINE))
        return default.name, default.archs, default.toolkit
    if not label or not wheel.toolkit:
        message = f"a version tells the arch set as `+cu130.hopper` does, got `{wheel.version}`"
        raise ArchError(message)
    for archset in known_sets():
        if archset.label == label:
            return archset.name, archset.archs, wheel.toolkit
    try:
        archs = tuple(sorted(_parse_identifier(part) for part in label.split(".")))
    except ArchError:
        message = f"`{label}` is no arch set that this version of {NAME} knows"
        raise ArchError(message) from None
    return label, archs, wheel.toolkit


def _parse_identifier(text: str) -> Arch:
    """Parse the identifier of a target: `sm90a` or `compute80`."""
    return Arch.parse(text.replace("sm", "sm_", 1).replace("compute", "compute_", 1))
