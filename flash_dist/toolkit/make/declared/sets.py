"""The arch sets of a `[tool.kernels]` table, as `builds.published` reads them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from ...builds.published import ANYBODY, load_archsets, load_picks, load_proofs
from ...errors import ArchError
from ...product import TABLE
from ...targets.archs import (
    DEFAULT_MACHINE,
    DEFAULT_TOOLKIT,
    KNOWN_ARCHS,
    NAMED_LISTS,
    Arch,
    ArchSet,
)
from ...targets.compatibility import judge
from ...targets.devices import parse_version, toolkit_driver
from .files import find_path
from .keys import PLACE, DeclarationError, require_keys, spell

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

# Folders in dist/ and in an index that are not for sets, so no set may have these names.
RESERVED: Final = (
    "conda", "hub", "index", "packages", "provenance", "pypi", "sdist", "simple", "toolkit",
    "variants", "zipapp",
)  # fmt: skip

_NAME: Final = re.compile("[A-Za-z0-9][A-Za-z0-9_-]{0,40}")
_CROSS_CUDA: Final = 13  # the first nvcc that can compile for another CPU
_EXAMPLE: Final = (
    'a set has "label", "archs", "who", "toolkit" and "budget_mb", as in "hopper": {"label": '
    '"hopper", "archs": "9.0a", "who": "H100", "toolkit": "13.0", "budget_mb": 10}'
)
_TOOLKIT_EXAMPLE: Final = f'for example `toolkit = "{DEFAULT_TOOLKIT}"`'
_RAISE: Final = "raise `toolkit`, or leave the target out"


def read_sets(own: Mapping[str, Any], root: Path) -> Path | Mapping[str, Any]:
    """Return a table's arch sets: the path of a JSON file, or the content of such a file.

    Raises:
        DeclarationError: There is no set, a set cannot be compiled, or two sets get wheels of the
            same version.
    """
    told = own.get("sets", {})
    if isinstance(told, str):
        path = find_path(told, root, f"`sets` of {PLACE}", (".json",))
        for one in load_sets(path):
            _require_name(one.name)
        _require_picks(path)
        return path
    if not told:
        message = f"{PLACE} names no arch set"
        hint = f'`[tool.{TABLE}.sets]` with `all = "7.5;8.0+PTX;9.0a;10.0;12.0"` is for every GPU'
        raise DeclarationError(message, hint=hint)
    tables = {name: _complete(name, one, own) for name, one in told.items()}
    load_sets({"set": tables})
    return {"set": tables, "picks": dict(_choose_picks(tables))}


def load_sets(source: Path | Mapping[str, Any]) -> tuple[ArchSet, ...]:
    """Read the sets; check that each can be compiled and that their wheels differ in version.

    Raises:
        DeclarationError: A set cannot be compiled, or two sets get wheels of the same version.
    """
    try:
        found = tuple(load_archsets(source).values())
        load_proofs(source)
    except ArchError as error:
        raise _explain(error) from error
    except (TypeError, ValueError, OverflowError) as error:  # valid JSON, but not arch sets
        message = f"cannot read arch sets: {error}"
        raise DeclarationError(message, hint=_EXAMPLE) from error
    seen: dict[tuple[str, int], ArchSet] = {}
    for one in found:
        _require_toolkit(one)
        other = seen.setdefault((one.label, parse_version(one.toolkit)[0]), one)
        if other != one:
            message = (
                f"arch sets `{other.name}` and `{one.name}` have one label, `{one.label}`, and "
                f"CUDA {one.toolkit}: their wheels would have one version"
            )
            raise DeclarationError(message, hint=f"give `{one.name}` a `label` of its own")
    return found


def read_targets(texts: Iterable[str], where: str) -> tuple[Arch, ...]:
    """Read a list of targets, and return them sorted, each once.

    Raises:
        DeclarationError: A target is unknown.
    """
    found = set()
    for text in texts:
        try:
            arch = Arch.parse(text)
            ArchSet.parse(str(arch))
        except ArchError as error:
            message = f"{where} must be targets such as `9.0a`, got {spell(text)}"
            ptx = "`compute_90` is PTX of 9.0" if "+" in text else None
            raise DeclarationError(message, hint=ptx or error.hint or _known_targets()) from error
        found.add(arch)
    return tuple(sorted(found))


def _known_targets() -> str:
    return f"known are {', '.join(arch.dotted for arch in KNOWN_ARCHS if not arch.suffix)}"


def _explain(error: ArchError) -> DeclarationError:
    """Return an error with a hint for the author of the table."""
    told = error.hint or ""
    if "cannot compile" in error.message:
        return DeclarationError(error.message, hint=_RAISE)
    known = f"{_known_targets()}, {', '.join(NAMED_LISTS)}"
    return DeclarationError(
        error.message, hint=told or (known if "architecture" in error.message else _EXAMPLE)
    )


def _require_toolkit(one: ArchSet) -> None:
    major = parse_version(one.toolkit)[0]
    where = f"arch set `{one.name}`"
    if toolkit_driver(one.toolkit) is None:
        message = f"{where} names CUDA {one.toolkit}, which is newer than any that is known"
        raise DeclarationError(message, hint=_TOOLKIT_EXAMPLE)
    if one.machine != DEFAULT_MACHINE and major < _CROSS_CUDA:
        message = (
            f"{where} is for {one.machine} and CUDA {one.toolkit}; for {one.machine} it must be "
            f"CUDA {_CROSS_CUDA}.0 or newer"
        )
        raise DeclarationError(message, hint=_TOOLKIT_EXAMPLE)


def _require_name(name: str) -> None:
    if not _NAME.fullmatch(name) or name in RESERVED:
        taken = f", which {', '.join(RESERVED)} are not" if name in RESERVED else ""
        message = f"an arch set has a name such as `hopper`{taken}, got {spell(name)}"
        raise DeclarationError(message, hint="a folder has the name: use a-z, 0-9, `-` and `_`")


def _complete(name: str, told: object, own: Mapping[str, Any]) -> dict[str, Any]:
    where = f"[tool.{TABLE}.sets.{name}]"
    _require_name(name)
    given = {"archs": told} if isinstance(told, str) else told
    table = require_keys(given, "set", where, needed=("archs",))
    return {
        "label": re.sub("[^a-z0-9]", "", name.lower())[:10],
        "who": name,
        "toolkit": own.get("toolkit", DEFAULT_TOOLKIT),
        "budget_mb": own.get("gates", {}).get("wheel_mb"),
        **table,
    }


def _choose_picks(tables: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each CPU and its picks: for all clients, the set that serves the most GPUs."""
    archs = {name: ArchSet.parse(one["archs"], name=name).archs for name, one in tables.items()}
    devices = {arch.device for every in archs.values() for arch in every if not arch.ptx}
    machines = {name: str(one.get("machine", DEFAULT_MACHINE)) for name, one in tables.items()}

    def served(name: str) -> int:
        return sum(any(judge(arch, device) for arch in archs[name]) for device in devices)

    for machine in dict.fromkeys(machines.values()):
        best = max((name for name in tables if machines[name] == machine), key=served)
        yield machine, {ANYBODY: best}


def describe_gaps(source: Path | Mapping[str, Any]) -> Iterator[str]:
    """Yield an error message for each CPU without a valid default set; an index needs one."""
    for machine in dict.fromkeys(one.machine for one in load_archsets(source).values()):
        gap = _describe_gap(source, machine)
        if gap:
            yield gap


def _describe_gap(source: Path | Mapping[str, Any], machine: str) -> str:
    try:
        load_picks(source, machine)
    except ArchError as error:
        return str(error)
    return ""


def _require_picks(path: Path) -> None:
    """Check that `picks` names valid sets for each CPU that has a set, including one for pip."""
    for machine in {one.machine for one in load_archsets(path).values()}:
        try:
            picks = load_picks(path, machine)
        except ArchError as error:
            raise _explain(error) from error
        except (AttributeError, TypeError) as error:
            message = f"`picks` of `{path.name}` must be objects by CPU, of sets by client"
            raise DeclarationError(message, hint=_example_picks(machine)) from error
        if "pip" not in picks and ANYBODY not in picks:
            message = f"`picks` of `{path.name}` lacks pip for {machine}"
            raise DeclarationError(message, hint=_example_picks(machine))


def _example_picks(machine: str) -> str:
    return f'for example `"picks": {{"{machine}": {{"*": "all"}}}}`'
