"""The arch sets that the project publishes, and how far their code was proven: `archsets.json`.

set     label      goes into the wheel's version, X+cu130.<label>: at most 10 of a-z 0-9
        archs      a TORCH_CUDA_ARCH_LIST; `+PTX` applies to its own entry only
        who        one line: for which GPUs
        toolkit    CUDA version that compiles it, the oldest suitable version of its major
        machine    CPU that runs it: x86_64, the default, or aarch64
        budget_mb  largest wheel that passes the audit, in MB of 10^6 bytes
        wheel_mb   size of the last built wheel; may be absent
proof   how far code of a target was proven on real hardware: `native` (it ran there), `jit` (its
        PTX ran on a newer GPU); a target not listed was assembled only
picks   by machine and client, the set for a client that asks for none: it must serve every GPU for
        which a set of this machine has SASS; `*` means every other client

Builds and the installed package read the same file. It is JSON, which every Python can parse.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from ..errors import ArchError, KernelsError
from ..product import (
    IMPORTED_AS,
    PRODUCT,
    PROGRAM,
    PROJECT_FOLDER,
    PROJECT_VARIABLE,
    TABLE,
)
from ..targets.archs import DEFAULT_MACHINE, Arch, ArchSet, require_supported
from ..targets.compatibility import judge
from .package import DATA

if TYPE_CHECKING:
    from pathlib import Path

    Source = Path | Mapping[str, Any]  # a file, or its content in parsed form

Proof = Literal["native", "jit", "assembled"]

FILE_NAME: Final = "archsets.json"
ANYBODY: Final = "*"  # stands for every client that has no entry
MACHINES: Final = ("x86_64", "aarch64")

_LABEL = re.compile(r"[a-z0-9]{1,10}")
_MEGA = 1_000_000


def load_archsets(path: Source | None = None) -> dict[str, ArchSet]:
    """Read the arch sets of a file, by default the package's; return them by name, in file order.

    Raises:
        ArchError: The file cannot be read, or holds a set that cannot be built.
    """
    tables = _section(path, "set")
    archsets = {name: _read_set(name, table, path) for name, table in tables.items()}
    if not archsets:
        message = f"`{_name(path)}` defines no arch set"
        raise ArchError(message)
    return archsets


@cache
def published_sets() -> tuple[ArchSet, ...]:
    """Return the arch sets in which this version of the package is published."""
    return tuple(load_archsets().values())


def known_sets() -> tuple[ArchSet, ...]:
    """Return the published sets; empty if the file is unreadable, which `check_install` reports."""
    try:
        return published_sets()
    except ArchError:
        return ()


def load_proofs(path: Source | None = None) -> dict[Arch, Proof]:
    """Read how far code of each target was proven on real hardware.

    `native` code ran on its GPU; `jit` code ran after the driver compiled it for a newer GPU. A
    target that is not in the table was only `assembled`.

    Raises:
        ArchError: The file cannot be read, or has an unknown target or proof.
    """
    proofs: dict[Arch, Proof] = {}
    for target, proof in _section(path, "proof").items():
        if proof not in ("native", "jit", "assembled"):
            where = _name(path)
            message = f"proof of `{target}` in `{where}` is native, jit or assembled, got `{proof}`"
            raise ArchError(message)
        proofs[Arch.parse(target)] = cast("Proof", proof)
    return proofs


def load_picks(path: Source | None = None, machine: str = DEFAULT_MACHINE) -> dict[str, ArchSet]:
    """Read which set each client gets from the default index or channel, by the client's name.

    Raises:
        ArchError: A client's set is not for this machine, or lacks code for GPUs of other sets.
    """
    archsets = {k: one for k, one in load_archsets(path).items() if one.machine == machine}
    picks: dict[str, ArchSet] = {}
    for client, name in _section(path, "picks").get(machine, {}).items():
        if name not in archsets:
            message = (
                f"`{client}` on {machine} gets `{name}`, which is none of {', '.join(archsets)}"
            )
            raise ArchError(message)
        picks[client] = archsets[name]
        _require_all_gpus(client, picks[client], archsets)
    return picks


def pick_for(client: str, path: Source | None = None, machine: str = DEFAULT_MACHINE) -> ArchSet:
    """Return the set for a client that asks for no set.

    Raises:
        ArchError: The file names no set for this client and machine, or `load_picks` rejects it.
    """
    picks = load_picks(path, machine)
    found = picks.get(client) or picks.get(ANYBODY)
    if found is None:
        message = f"`{_name(path)}` names no arch set for `{client}` on {machine}"
        raise ArchError(message)
    return found


def _require_all_gpus(client: str, pick: ArchSet, archsets: dict[str, ArchSet]) -> None:
    devices = {arch.device for one in archsets.values() for arch in one.archs if not arch.ptx}
    for device in sorted(devices):
        if not any(judge(arch, device) for arch in pick.archs):
            whom = "a client that names no arch set" if client == ANYBODY else f"`{client}`"
            message = f"{whom} gets `{pick.name}`, which has no code for {device}"
            every = {arch for one in archsets.values() for arch in one.archs}
            whole = ArchSet(pick.name, pick.label, tuple(sorted(every)))
            hint = f"no set serves every GPU that the sets are for: add one such as `{whole}`"
            raise ArchError(message, hint=hint)


def _name(path: Source | None) -> object:
    in_table = isinstance(path, Mapping) or (path is None and not IMPORTED_AS)
    return "pyproject.toml" if in_table else path or FILE_NAME


def _find_own() -> Any:  # noqa: ANN401 - a Source, or a file in a zip file
    """Return the file of the package, or for a stand-alone toolkit the sets of its project."""
    if IMPORTED_AS:
        return DATA.joinpath(FILE_NAME)
    if PROJECT_FOLDER is None:
        message = f"the current folder has no `pyproject.toml` with a table [tool.{TABLE}.sets]"
        hint = f"run it in the folder of a project, or let {PROJECT_VARIABLE} name one"
        raise ArchError(message, hint=hint)
    try:
        return PRODUCT.load("make.project:ARCHSETS")
    except KernelsError as error:
        raise ArchError(error.message, hint=error.hint) from error


def _section(path: Source | None, name: str) -> dict[str, Any]:
    source = _find_own() if path is None else path
    if isinstance(source, Mapping):
        return dict(source.get(name, {}))
    try:
        data = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        message = f"cannot read arch sets from `{source}`: {reason}"
        own = f"`{PROGRAM} doctor` says what is wrong with the install"
        raise ArchError(message, hint=own if path is None else None) from error
    section = data.get(name, {}) if isinstance(data, dict) else None
    if not isinstance(section, dict):
        message = f"cannot read arch sets from `{source}`: `{name}` is not an object"
        raise ArchError(message)
    return section


def _read_set(name: str, table: Any, path: Source | None) -> ArchSet:  # noqa: ANN401 - JSON
    where = f"arch set `{name}` of `{_name(path)}`"
    given = table if isinstance(table, dict) else {}
    missing = {"label", "archs", "who", "toolkit", "budget_mb"} - given.keys()
    if missing:
        message = f"{where} lacks {', '.join(sorted(missing))}"
        raise ArchError(message)
    label = str(given["label"])
    if _LABEL.fullmatch(label) is None:
        message = f"the label of {where} is 1 to 10 characters a-z or 0-9, got `{label}`"
        raise ArchError(message)
    archset = replace(
        ArchSet.parse(str(given["archs"]), name=name, label=label),
        who=str(given["who"]),
        toolkit=str(given["toolkit"]),
        machine=_read_machine(given.get("machine", DEFAULT_MACHINE), where),
        budget_bytes=_read_bytes(given["budget_mb"], f"budget_mb of {where}"),
        wheel_bytes=_read_bytes(given.get("wheel_mb"), f"wheel_mb of {where}"),
    )
    return require_supported(archset, archset.toolkit)


def _read_machine(machine: object, where: str) -> str:
    if machine not in MACHINES:
        message = f"machine of {where} is {' or '.join(MACHINES)}, got `{machine}`"
        raise ArchError(message)
    return str(machine)


def _read_bytes(megabytes: object, what: str) -> int | None:
    if megabytes is None:
        return None
    if isinstance(megabytes, bool) or not isinstance(megabytes, int | float) or megabytes <= 0:
        message = f"{what} is a number of MB, got `{megabytes}`"
        raise ArchError(message)
    return int(megabytes * _MEGA)
