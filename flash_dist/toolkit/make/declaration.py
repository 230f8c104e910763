"""The table `[tool.kernels]` of pyproject.toml: what a package is built from, and for which GPUs.

    version            of the package; wheels add the CUDA version and the label of their arch set
    package            import package; by default the name of the project with `_`
    product, sets      JSON files in place of the keys below, for a package with many of them
    binding            C++ files that register torch operators on torch's stable ABI
    include            folders that #include searches
    torch_min          oldest torch, such as "2.10"; torch_tested_max: newest one that was tested
    dependencies       what wheels require beside torch and what `doctor` needs
    toolkit            CUDA version of all sets that name none
    operators          module that registers the operators; by default the binding itself is loaded
    index              address of the package index that has the releases
    source_date_epoch  time stamp of files inside wheels
    [[sources]]        `files` of CUDA, each compiled once for all `targets` of a set, with `flags`
    [dispatch]         `table` of kernels, `host` code of the kernels library, `axes`, `main_role`
    [sets]             TORCH_CUDA_ARCH_LISTs by name, or tables with archs, who, toolkit, machine,
                       label, budget_mb
    [gates]            `wheel_mb` of the largest wheel, `spills` that are allowed
    [selftest]         `cases`: a function that returns what chooses the cases

Everything is checked when it is read: nothing is downloaded or compiled for a table with an error.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..builds.linkage import REQUIREMENTS
from ..builds.published import ANYBODY
from ..errors import FlashDistError
from ..product import TABLE, package_of
from ..targets.archs import DEFAULT_MACHINE, DEFAULT_TOOLKIT, Arch, ArchSet
from ..targets.axes import Axes
from ..targets.compatibility import judge

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

PLACE: Final = f"[tool.{TABLE}]"
SPILLS_PLACE: Final = f"`spills` of [tool.{TABLE}.gates]"
EPOCH: Final = 1767225600  # 2026-01-01: of wheels whose table names no time
DISTRIBUTION: Final = "fatwheel"  # of the toolkit by itself

_VERSION: Final = re.compile(r"[0-9]+(\.[0-9]+)*((a|b|rc)[0-9]+)?(\.(post|dev)[0-9]+)*")
_RELEASE: Final = re.compile(r"[0-9]+\.[0-9]+")
_PACKAGE: Final = re.compile(r"[a-z][a-z0-9_]{0,40}")
_MODULE: Final = re.compile(r"[A-Za-z_][\w.]*(:[A-Za-z_]\w*)?")
_C_KERNEL: Final = re.compile(
    r'extern\s+"C"\s+__global__\s+(?:__launch_bounds__\s*\([^()]*\)\s+)?void\s+'
    r"(?:__launch_bounds__\s*\([^()]*\)\s+)?(\w+)"
)
# Names that mean something else to Python, torch or CUDA.
_TAKEN: Final = frozenset({"torch", "triton", "nvidia", "cuda", "numpy", "test", "tests", "csrc"})

# The type of each key, as an error names it.
_KEYS: Final[dict[str, dict[str, str]]] = {
    "": {
        "version": "a version such as `0.1.0`",
        "package": "a name such as `my_norms`",
        "product": "a path",
        "sets": "a table or a path",
        "binding": "a list of paths",
        "include": "a list of paths",
        "torch_min": "a release such as `2.10`",
        "torch_tested_max": "a release such as `2.15`",
        "dependencies": "a list of requirements",
        "toolkit": "a release such as `13.0`",
        "operators": "a module such as `ops`",
        "index": "an address",
        "source_date_epoch": "a number of seconds",
        "sources": "a list of tables",
        "dispatch": "a table",
        "gates": "a table",
        "selftest": "a table",
    },
    "sources": {
        "files": "a list of paths",
        "targets": "a list of targets such as `9.0a`",
        "flags": "a list of flags of nvcc",
    },
    "dispatch": {
        "table": "a path",
        "host": "a list of paths",
        "axes": "a list of tables",
        "main_role": "a name such as `rms`",
    },
    "gates": {"wheel_mb": "a number of MB", "spills": "a list of tables or a path"},
    "selftest": {"cases": "a function such as `selftest:load_cases`"},
    "set": {
        "archs": "a TORCH_CUDA_ARCH_LIST",
        "who": "a line of text",
        "toolkit": "a release such as `13.0`",
        "machine": "`x86_64` or `aarch64`",
        "label": "1 to 10 characters a-z or 0-9",
        "budget_mb": "a number of MB",
    },
    "spill": {
        "symbol": "a pattern of kernels",
        "spill_bytes": "a number of bytes",
        "reason": "a line of text",
    },
}


class DeclarationError(FlashDistError, ValueError):
    """A table that nothing can be built from."""


@dataclass(frozen=True)
class Plain:
    """A file of CUDA that is compiled once for all of its targets."""

    path: Path
    targets: tuple[Arch, ...] = ()  # empty: those of the set
    flags: tuple[str, ...] = ()

    @property
    def role(self) -> str:
        """The name of its kernels in reports."""
        return self.path.stem

    @property
    def family(self) -> str:
        """The same, with the first target of a file that is for some targets only."""
        return f"{self.role}_sm{self.targets[0].number}" if self.targets else self.role

    def archs_in(self, archs: Iterable[Arch]) -> tuple[Arch, ...]:
        """Return the targets of a set that it is compiled for."""
        return tuple(arch for arch in archs if not self.targets or arch in self.targets)


@dataclass(frozen=True)
class Project:
    """A package as its table declares it; paths are those of files that exist."""

    root: Path
    name: str  # the import package
    version: str
    torch_min: str
    torch_tested_max: str = ""
    source_date_epoch: int = EPOCH
    dependencies: tuple[str, ...] = ()
    sets: Path | Mapping[str, Any] = field(default_factory=dict)  # as `builds.published` reads them
    binding: tuple[Path, ...] = ()
    include: tuple[Path, ...] = ()
    plain: tuple[Plain, ...] = ()
    table: Path | None = None
    host: tuple[Path, ...] = ()
    spills: Path | tuple[Mapping[str, Any], ...] = ()
    scripts: tuple[str, ...] = ()  # lines such as `my-norms = my_norms.__main__:run`
    licenses: tuple[str, ...] = ()

    def wheel_version(self, toolkit: str, label: str) -> str:
        """Return the version of one wheel: 0.1.0+cu130.hopper."""
        return f"{self.version}+cu{toolkit.replace('.', '')}.{label}"

    @property
    def epoch(self) -> str:
        """SOURCE_DATE_EPOCH of a build: the environment's, or the one that is declared."""
        return os.environ.get("SOURCE_DATE_EPOCH", str(self.source_date_epoch))

    @property
    def requirements(self) -> tuple[str, ...]:
        """What every wheel requires, beside a CUDA runtime that is not linked statically."""
        return (f"torch>={self.torch_min}", *REQUIREMENTS, *self.dependencies)

    @property
    def compiled(self) -> tuple[Path, ...]:
        """The files and folders that the libraries are compiled from."""
        sources = (one.path for one in self.plain)
        tables = (self.table,) if self.table else ()
        return (*self.include, *self.binding, *self.host, *sources, *tables)

    def require_targets(self, archset: ArchSet) -> None:
        """Insist that each file has a target of a set.

        Raises:
            DeclarationError: One has none: the libraries of the set would lack its functions.
        """
        for one in self.plain:
            if not one.archs_in(archset.archs):
                told = ", ".join(map(str, one.targets))
                message = (
                    f"`{one.path.relative_to(self.root)}` is for {told}, and arch set "
                    f"`{archset.name}` is `{archset}`"
                )
                hint = "add a target of the file to the set, or one of the set to its `targets`"
                raise DeclarationError(message, hint=hint)


def read_declaration(data: Mapping[str, Any], root: Path) -> Project:
    """Read a `pyproject.toml`.

    Args:
        data: Its content.
        root: Its folder.

    Raises:
        FlashDistError: A key is unknown or malformed, a file or target does not exist, or two
            things have one name.
    """
    project, own = data.get("project", {}), data.get("tool", {}).get(TABLE)
    if not isinstance(own, dict):
        message = f"`{root / 'pyproject.toml'}` has no table {PLACE}"
        raise DeclarationError(
            message, hint=f"`python -m {DISTRIBUTION} new NAME` writes a project with one"
        )
    _require_keys(own, "", PLACE)
    _require_dynamic(project)
    name = _read_name(own, project)
    dispatch, gates = own.get("dispatch", {}), own.get("gates", {})
    for key in ("dispatch", "gates", "selftest"):
        _require_keys(own.get(key, {}), key, f"[tool.{TABLE}.{key}]")
    if "axes" in dispatch:
        Axes.from_json(dispatch["axes"])
    if dispatch and "table" not in dispatch:
        message = f"[tool.{TABLE}.dispatch] lacks `table`, the path of a table of kernels"
        raise DeclarationError(message)
    for module in (own.get("operators", ""), own.get("selftest", {}).get("cases", "")):
        if module and not _MODULE.fullmatch(module):
            message = (
                f"a part of the package is named `module` or `module:function`, got `{module}`"
            )
            raise DeclarationError(message, hint="leave out the name of the package")
    spills = gates.get("spills", [])
    found = Project(
        root=root,
        name=name,
        version=_read_text(own, "version", _VERSION),
        torch_min=_read_text(own, "torch_min", _RELEASE),
        torch_tested_max=_read_text(own, "torch_tested_max", _RELEASE, default=""),
        source_date_epoch=own.get("source_date_epoch", EPOCH),
        dependencies=tuple(own.get("dependencies", ())),
        sets=_read_sets(own, root),
        binding=_find(own.get("binding", ()), root, "binding"),
        include=_find(own.get("include", ()), root, "include"),
        plain=tuple(_read_sources(own.get("sources", ()), root)),
        table=_find_one(dispatch["table"], root, "table") if dispatch else None,
        host=_find(dispatch.get("host", ()), root, "host"),
        spills=_find_one(spills, root, "spills")
        if isinstance(spills, str)
        else tuple(_read_spills(spills)),
        scripts=tuple(f"{key} = {value}" for key, value in project.get("scripts", {}).items()),
        licenses=tuple(_find_licenses(project, root)),
    )
    _require_content(found)
    return found


def _require_dynamic(project: Mapping[str, Any]) -> None:
    for key in ("version", "dependencies"):
        if key in project:
            got = f"`{project[key]!s:.60}`"
            message = f"`{key}` of [project] must be dynamic, as it differs by wheel, got {got}"
            hint = f'put `dynamic = ["version", "dependencies"]` there, and `{key}` into {PLACE}'
            raise DeclarationError(message, hint=hint)


def _read_name(own: Mapping[str, Any], project: Mapping[str, Any]) -> str:
    name = str(own.get("package") or package_of(str(project.get("name", ""))))
    if not _PACKAGE.fullmatch(name):
        message = f"`package` of {PLACE} must be a name such as `my_norms`, got `{name:.60}`"
        raise DeclarationError(message)
    if project.get("name") and package_of(str(project["name"])) != name:
        message = f"`package` of {PLACE} is `{name}`, and the project is named `{project['name']}`"
        raise DeclarationError(message, hint="the wheel and its package have one name: rename one")
    if name in _TAKEN or name in sys.stdlib_module_names:
        message = f"`package` of {PLACE} is `{name}`, which is the name of another module"
        raise DeclarationError(message, hint="symbols and variables begin with it: choose your own")
    return name


def _find_licenses(project: Mapping[str, Any], root: Path) -> list[str]:
    """Return the files that setuptools packs as licences."""
    patterns = project.get("license-files", ("LICEN[CS]E*", "COPYING*", "NOTICE*", "AUTHORS*"))
    return sorted({one.relative_to(root).as_posix() for p in patterns for one in root.glob(p)})


def _require_keys(table: object, kind: str, where: str) -> None:
    """Insist on known keys with values of their types."""
    if not isinstance(table, dict):
        message = f"{where} must be a table, got `{table!r:.60}`"
        raise DeclarationError(message)
    known = _KEYS[kind]
    for key, value in table.items():
        if key not in known:
            near = get_close_matches(key, known, 1)
            hint = f"did you mean `{near[0]}`?" if near else f"it knows {', '.join(known)}"
            message = f"{where} has an unknown key `{key}`"
            raise DeclarationError(message, hint=hint)
        if not _is_of(value, known[key]):
            message = f"`{key}` of {where} must be {known[key]}, got `{value!r:.60}`"
            raise DeclarationError(message)


def _is_of(value: object, kind: str) -> bool:
    if kind.startswith("a list of tables"):
        alike = isinstance(value, list) and all(isinstance(one, dict) for one in value)
        return alike or (kind.endswith("path") and isinstance(value, str))
    if kind.startswith("a list"):
        return isinstance(value, list) and all(isinstance(one, str) for one in value)
    if kind.startswith("a table"):
        return isinstance(value, dict) or (kind.endswith("path") and isinstance(value, str))
    if kind.startswith("a number"):
        kinds = (int,) if kind.endswith(("seconds", "bytes")) else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool) and value >= 0
    return isinstance(value, str)


def _read_text(
    own: Mapping[str, Any], key: str, allowed: re.Pattern[str], default: str | None = None
) -> str:
    value = own.get(key, default)
    if value is None:
        message = f"{PLACE} lacks `{key}`, {_KEYS[''][key]}"
        raise DeclarationError(message)
    if value and not allowed.fullmatch(value):
        message = f"`{key}` of {PLACE} must be {_KEYS[''][key]}, got `{value:.60}`"
        raise DeclarationError(message)
    return str(value)


def _find(patterns: Iterable[str], root: Path, key: str) -> tuple[Path, ...]:
    """Return the files, or folders, that patterns name, each once."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        escaping = Path(pattern).is_absolute() or ".." in Path(pattern).parts
        matching = [] if escaping or not pattern else sorted(root.glob(pattern))
        if not matching:
            message = f"`{key}` names `{pattern}`, and there is no such file in {root}"
            outside = (
                "files must lie in the folder of pyproject.toml: the sources are packed from it"
            )
            raise DeclarationError(message, hint=outside if escaping else _near_file(pattern, root))
        found.update(dict.fromkeys(matching))
    return tuple(found)


def _near_file(pattern: str, root: Path) -> str | None:
    """Name the file that a path may have meant."""
    suffix = Path(pattern).suffix
    names = [path.relative_to(root).as_posix() for path in root.glob(f"*/**/*{suffix}")][:500]
    near = get_close_matches(pattern, names, 1, cutoff=0.5)
    return f"did you mean `{near[0]}`?" if near else None


def _find_one(name: str, root: Path, key: str) -> Path:
    (*_, found) = _find([name], root, key)
    return found


def _read_sources(tables: Iterable[Mapping[str, Any]], root: Path) -> Iterator[Plain]:
    where = f"[[tool.{TABLE}.sources]]"
    for table in tables:
        _require_keys(table, "sources", where)
        if not table.get("files"):
            message = f"{where} lacks `files`, a list of paths such as `csrc/*.cu`"
            raise DeclarationError(message)
        targets = tuple(sorted(map(Arch.parse, table.get("targets", ()))))
        for path in _find(table["files"], root, "files"):
            yield Plain(path, targets, tuple(table.get("flags", ())))


def _read_spills(tables: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    where = SPILLS_PLACE
    for table in tables:
        _require_keys(table, "spill", where)
        lacking = _KEYS["spill"].keys() - table.keys()
        if lacking:
            message = f"{where} lacks {', '.join(sorted(lacking))}"
            raise DeclarationError(message, hint="a kernel that spills needs a reason")
        yield table


def _read_sets(own: Mapping[str, Any], root: Path) -> Path | Mapping[str, Any]:
    """Return arch sets as `builds.published` reads them: a file, or the same made of the table."""
    told = own.get("sets", {})
    if isinstance(told, str):
        return _find_one(told, root, "sets")
    if not told:
        message = f"{PLACE} names no arch set"
        hint = f'`[tool.{TABLE}.sets]` with `all = "7.5;8.0+PTX;9.0a;10.0;12.0"` is for every GPU'
        raise DeclarationError(message, hint=hint)
    tables = {name: _complete_set(name, one, own) for name, one in told.items()}
    return {"set": tables, "picks": dict(_choose_picks(tables))}


def _complete_set(name: str, told: object, own: Mapping[str, Any]) -> dict[str, Any]:
    given = {"archs": told} if isinstance(told, str) else told
    where = f"[tool.{TABLE}.sets.{name}]"
    _require_keys(given, "set", where)
    assert isinstance(given, dict)  # noqa: S101 - for mypy; the line above has refused others
    if "archs" not in given:
        message = f"{where} lacks `archs`, a TORCH_CUDA_ARCH_LIST"
        raise DeclarationError(message)
    return {
        "label": re.sub("[^a-z0-9]", "", name.lower())[:10],
        "who": name,
        "toolkit": own.get("toolkit", DEFAULT_TOOLKIT),
        "budget_mb": own.get("gates", {}).get("wheel_mb"),
        **given,
    }


def _choose_picks(tables: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, str]]]:
    """Choose for each CPU the set that serves most GPUs: clients get it that ask for none."""
    archs = {
        name: ArchSet.parse(str(one["archs"]), name=name).archs for name, one in tables.items()
    }
    devices = {arch.device for every in archs.values() for arch in every if not arch.ptx}
    machines = {name: str(one.get("machine", DEFAULT_MACHINE)) for name, one in tables.items()}

    def served(name: str) -> int:
        return sum(any(judge(arch, device) for arch in archs[name]) for device in devices)

    for machine in dict.fromkeys(machines.values()):
        best = max((name for name in tables if machines[name] == machine), key=served)
        yield machine, {ANYBODY: best}


def _require_content(project: Project) -> None:
    """Insist on something to compile, and on one thing of each name."""
    if not (project.plain or project.table):
        message = f"{PLACE} names nothing to compile"
        hint = f'`[[tool.{TABLE}.sources]]` with `files = ["csrc/*.cu"]` names files of CUDA'
        raise DeclarationError(message, hint=hint)
    roles = Counter(one.role for one in project.plain)
    for role, count in roles.items():
        if count > 1:
            paths = [one.path for one in project.plain if one.role == role]
            named = " and ".join(f"`{path.relative_to(project.root)}`" for path in paths)
            message = f"{count} files of CUDA have the name `{role}`: {named}"
            raise DeclarationError(message, hint="reports name kernels by their file: rename one")
    owners: dict[str, Path] = {}
    for one in project.plain:
        for kernel in _C_KERNEL.findall(one.path.read_text(encoding="utf-8", errors="replace")):
            other = owners.setdefault(kernel, one.path)
            if other != one.path:
                message = (
                    f"two files define the kernel `{kernel}`: `{other.name}` and `{one.path.name}`"
                )
                raise DeclarationError(message, hint="rename one, or give it a namespace")
