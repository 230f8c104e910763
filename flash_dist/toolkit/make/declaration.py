"""The table `[tool.kernels]` of pyproject.toml: the sources of a package, and its GPUs.

    version            the package's version; wheels append the CUDA version and their set's label
    namespace          C++ namespace of the toolkit's functions; by default the package's name
    package            import package; by default the name of the project with `_`
    product, sets      JSON files in place of the keys below, for a package with many of them;
                       `product` is for a package that contains this toolkit
    binding            C++ files that register torch operators on torch's stable ABI
    include            folders that #include searches
    torch_min          oldest torch, such as "2.10"; torch_tested_max: newest one that was tested
    dependencies       requirements of wheels, in addition to torch and what `doctor` needs
    toolkit            CUDA version of all sets that name none
    oldest_gpu         lowest compute capability that the code supports, such as "8.0"
    operators          module that registers the operators; by default the binding itself is loaded
    index              address of the package index with the releases
    source_date_epoch  time stamp of files inside wheels
    hub_card           Markdown file that explains the package on its page on the hub
    [[sources]]        CUDA `files`, each compiled once for all its `targets` in a set, with `flags`
    [dispatch]         `table` of kernels, `host` code of the kernels library, `axes`, `main_role`
    [sets]             TORCH_CUDA_ARCH_LISTs by name, or tables with archs, who, toolkit, machine,
                       label, budget_mb
    [gates]            `wheel_mb` of the largest wheel, `spills` that are allowed, `tests` that need
                       no GPU: programs, and folders for pytest; by default the folder `tests`, if
                       there is a dependency group `test`
    [selftest]         `cases`: a function that returns the chooser of cases

Paths are relative to pyproject.toml and lie below it. In a pattern, `*` stands for any name and
`**` for any folders; hidden folders, `build/`, `dist/` and virtual environments are left out.

Everything is checked when it is read: nothing is downloaded or compiled for a table with an error.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ..builds.linkage import REQUIREMENTS
from ..errors import KernelsError
from ..product import IMPORTED_AS, NAME, TABLE
from ..targets.archs import Arch
from ..targets.axes import AXES, Axes
from ..targets.devices import ANY_GPU, Device
from .declared.cxx_text import find_c_kernels
from .declared.dispatch import read_axes, read_table, require_main_role
from .declared.files import CUDA, CXX, FOLDERS, MARKDOWN, PYTHON, find_path, find_paths
from .declared.keys import (
    FIRST_SECOND,
    KEYS,
    LAST_SECOND,
    PLACE,
    DeclarationError,
    read_json_file,
    read_toml_file,
    require_keys,
    spell,
)
from .declared.modules import find_package, require_commands, require_modules, require_room
from .declared.names import DISTRIBUTION, read_name, require_namespace
from .declared.project_table import (
    find_licenses,
    list_functions,
    read_dependencies,
    read_project,
    require_releases,
)
from .declared.sets import load_sets, read_sets, read_targets

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from ..targets.archs import ArchSet

__all__ = ["DISTRIBUTION", "PLACE", "DeclarationError", "Plain", "Project", "read_declaration"]

SPILLS_PLACE: Final = f"`spills` of [tool.{TABLE}.gates]"
TESTS_PLACE: Final = f"`tests` of [tool.{TABLE}.gates]"
SOURCES_PLACE: Final = f"[[tool.{TABLE}.sources]]"
EPOCH: Final = 1767225600  # 2026-01-01, for wheels whose table sets no time

# Flags that the build itself sets, or that need a device link step, which the build lacks.
_OWN_FLAG: Final = re.compile(
    r"--?(gpu-architecture|gpu-code|generate-code|arch|code|gencode)(=.*)?|--?arch=.*|-gencode.*"
    r"|-o|--output-file(=.*)?|-c|--compile|-(rdc|dc|dlto|lto)(=.*)?"
    r"|--(relocatable-device-code|device-c|dlink-time-opt)(=.*)?"
)


@dataclass(frozen=True)
class Plain:
    """A CUDA file that is compiled once for all of its targets."""

    path: Path
    targets: tuple[Arch, ...] = ()  # empty: all targets of the set
    flags: tuple[str, ...] = ()

    @property
    def role(self) -> str:
        """The name of this file's kernels in reports."""
        return self.path.stem

    @property
    def family(self) -> str:
        """The role, plus the first target if the file is for some targets only."""
        return f"{self.role}_sm{self.targets[0].number}" if self.targets else self.role

    def archs_in(self, archs: Iterable[Arch]) -> tuple[Arch, ...]:
        """Return the targets of a set that the file is compiled for."""
        return tuple(arch for arch in archs if not self.targets or arch in self.targets)


@dataclass(frozen=True)
class Project:
    """A package as declared by its table; every path is an existing file or folder."""

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
    table: Path | None = None  # the table of kernels, if there is one
    host: tuple[Path, ...] = ()  # C++ files of the library of kernels
    spills: Path | tuple[Mapping[str, Any], ...] = ()  # exceptions, or the file that lists them
    tests: tuple[Path, ...] = ()  # tests that need no GPU: programs, and folders for pytest
    scripts: tuple[str, ...] = ()  # lines such as `my-norms = my_norms.__main__:run`
    # Entry points of plug-ins by group: lines of the same form as `scripts`.
    entry_points: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    licenses: tuple[str, ...] = ()
    hub_card: Path | None = None

    def wheel_version(self, toolkit: str, label: str) -> str:
        """Return the version of one wheel, such as 0.1.0+cu130.hopper."""
        return f"{self.version}+cu{toolkit.replace('.', '')}.{label}"

    @property
    def epoch(self) -> str:
        """SOURCE_DATE_EPOCH of a build: the environment's value, or the declared value.

        Raises:
            DeclarationError: The value in the environment is not a valid time for a zip file.
        """
        told = os.environ.get("SOURCE_DATE_EPOCH", "").strip() or str(self.source_date_epoch)
        number = int(told) if re.fullmatch("[0-9]{1,12}", told) else -1
        if not FIRST_SECOND <= number <= LAST_SECOND:
            allowed = KEYS["kernels"]["source_date_epoch"].told
            message = f"SOURCE_DATE_EPOCH must be {allowed}, got `{told:.60}`"
            raise DeclarationError(message, hint=f"unset it: {PLACE} says {self.source_date_epoch}")
        return str(number)

    @property
    def requirements(self) -> tuple[str, ...]:
        """Requirements of every wheel, except a CUDA runtime that is not linked statically."""
        return (f"torch>={self.torch_min}", *REQUIREMENTS, *self.dependencies)

    @property
    def compiled(self) -> tuple[Path, ...]:
        """The files and folders that the libraries are compiled from."""
        sources = (one.path for one in self.plain)
        tables = (self.table,) if self.table else ()
        return (*self.include, *self.binding, *self.host, *sources, *tables)

    @property
    def own_targets(self) -> tuple[Arch, ...]:
        """The SASS targets with a suffix that some files or families name in `targets`."""
        found = {arch for one in self.plain for arch in one.targets}
        for family in read_toml_file(self.table, self.table.name)["family"] if self.table else ():
            found.update(map(Arch.parse, family.get("targets", ())))
        return tuple(sorted(arch for arch in found if arch.suffix and not arch.ptx))

    @property
    def spills_place(self) -> str:
        """The file or key that lists the kernels allowed to spill, for messages."""
        if isinstance(self.spills, tuple):
            return SPILLS_PLACE
        return f"`{self.spills.relative_to(self.root).as_posix()}`"

    def require_targets(self, archset: ArchSet) -> None:
        """Check that each plain file has a target in a set.

        If there is no table of kernels, each target of the set must have a file, too.

        Raises:
            DeclarationError: A file has no target of the set, or a target has no file.
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
        for arch in () if self.table else archset.archs:
            if not any(one.archs_in([arch]) for one in self.plain):
                message = f"arch set `{archset.name}` is `{archset}`, and no file is for {arch}"
                hint = "leave it out of the set, or add it to `targets` of a file"
                raise DeclarationError(message, hint=hint)


def read_declaration(data: Mapping[str, Any], root: Path) -> Project:
    """Read and check the declaration in a `pyproject.toml`.

    Args:
        data: The content of the file.
        root: The folder of the file.

    Raises:
        DeclarationError: A key is unknown or malformed, a file or target does not exist, or a name
            is used twice.
    """
    own = _read_own(data, root)
    project = read_project(data)
    name = read_name(own, project)
    dispatch, gates = own.get("dispatch", {}), own.get("gates", {})
    require_namespace(own)
    require_releases(own)
    axes = read_axes(_find_axes(own, root))
    sets = read_sets(own, root)
    _require_package(name, own, data, root, sets)
    place = f"of [tool.{TABLE}.dispatch]"
    found = Project(
        root=root,
        name=name,
        version=own["version"],
        torch_min=own["torch_min"],
        torch_tested_max=own.get("torch_tested_max", ""),
        source_date_epoch=own.get("source_date_epoch", EPOCH),
        dependencies=tuple(read_dependencies(own.get("dependencies", ()))),
        sets=sets,
        binding=find_paths(own.get("binding", ()), root, f"`binding` of {PLACE}", CXX),
        include=find_paths(own.get("include", ()), root, f"`include` of {PLACE}", FOLDERS),
        plain=tuple(_read_sources(own.get("sources", ()), root)),
        table=find_path(dispatch["table"], root, f"`table` {place}", (".toml",))
        if dispatch
        else None,
        host=find_paths(dispatch.get("host", ()), root, f"`host` {place}", CXX),
        spills=_read_spills(gates.get("spills", []), root),
        tests=tuple(_find_tests(gates.get("tests"), data, root)),
        scripts=list_functions(project.get("scripts", {})),
        entry_points={
            group: list_functions(table) for group, table in project.get("entry-points", {}).items()
        },
        licenses=tuple(find_licenses(project, root)),
        hub_card=find_path(own["hub_card"], root, f"`hub_card` of {PLACE}", MARKDOWN)
        if "hub_card" in own
        else None,
    )
    _require_content(found)
    _require_table(found, axes, dispatch.get("main_role", ""))
    for archset in load_sets(found.sets):
        found.require_targets(archset)
        _require_floor(archset, axes, own.get("oldest_gpu", ""))
    return found


def _read_own(data: Mapping[str, Any], root: Path) -> Mapping[str, Any]:
    """Return the table; check that its keys are known and their values of the right types.

    Also check the subtables `dispatch`, `gates` and `selftest`, and each table of `sources`.
    """
    tool = data.get("tool", {})
    if not isinstance(tool, dict) or TABLE not in tool:
        message = f"`{root / 'pyproject.toml'}` has no table {PLACE}"
        hint = f"`python -m {DISTRIBUTION} new NAME` writes a project with one"
        raise DeclarationError(message, hint=hint)
    own = require_keys(tool[TABLE], "kernels", PLACE, ("version", "torch_min"))
    needed = {"dispatch": ("table",), "gates": (), "selftest": ("cases",)}
    for key in needed.keys() & own.keys():
        require_keys(own[key], key, f"[tool.{TABLE}.{key}]", needed[key])
    for table in own.get("sources", ()):
        require_keys(table, "sources", SOURCES_PLACE, ("files",))
    if "product" in own and not IMPORTED_AS:
        message = (
            f"{PLACE} names a file `product`, {spell(own['product'])}, which is for a package that "
            "has this toolkit as a folder"
        )
        raise DeclarationError(message, hint=f"write its keys into {PLACE}")
    return own


def _require_package(
    name: str, own: Mapping[str, Any], data: Mapping[str, Any], root: Path, sets: object
) -> None:
    """Check the package's folder and modules, unless setuptools is told where they are."""
    setuptools = data["tool"].get("setuptools", {})
    if isinstance(setuptools, dict) and {"packages", "package-dir"} & setuptools.keys():
        return
    package = find_package(name, root)
    require_modules(own, package)
    require_commands(package)
    if not IMPORTED_AS:
        require_room(package, sets)


def _read_sources(tables: Iterable[Mapping[str, Any]], root: Path) -> Iterator[Plain]:
    seen: set[Path] = set()
    for table in tables:
        targets = read_targets(table.get("targets", ()), f"`targets` of {SOURCES_PLACE}")
        flags = tuple(table.get("flags", ()))
        _require_flags(flags)
        for path in find_paths(table["files"], root, f"`files` of {SOURCES_PLACE}", CUDA):
            if path in seen:
                message = f"`{path.relative_to(root)}` is in two tables {SOURCES_PLACE}"
                hint = "put files with `targets` or `flags` of their own into a folder of their own"
                raise DeclarationError(message, hint=hint)
            seen.add(path)
            yield Plain(path, targets, flags)


def _require_flags(flags: tuple[str, ...]) -> None:
    where = f"`flags` of {SOURCES_PLACE}"
    if flags and not flags[0].startswith("-"):
        message = f"{where} must begin with a flag of nvcc, got {spell(flags[0])}"
        raise DeclarationError(message, hint='for example `flags = ["-maxrregcount", "64"]`')
    refused = next(filter(_OWN_FLAG.fullmatch, flags), "")
    if refused:
        message = f"{where} cannot have {spell(refused)}, which the build decides"
        hint = f"`targets` and [tool.{TABLE}.sets] choose GPUs; device code is linked by file"
        raise DeclarationError(message, hint=hint)


def _read_spills(told: str | list[Any], root: Path) -> Path | tuple[Mapping[str, Any], ...]:
    """Check the list of kernels that may spill; return its file, or its tables."""
    needed = ("symbol", "spill_bytes", "reason")
    if isinstance(told, str):
        path = find_path(told, root, SPILLS_PLACE, (".toml", ".json"))
        name = path.relative_to(root).as_posix()
        data = read_json_file(path, name) if path.suffix == ".json" else read_toml_file(path, name)
        for one in require_keys(data, "spill_file", f"`{name}`").get("exception", ()):
            require_keys(one, "spill", f"an [[exception]] of `{name}`", needed)
        return path
    return tuple(require_keys(one, "spill", f"a table of {SPILLS_PLACE}", needed) for one in told)


def _find_tests(told: list[str] | None, data: Mapping[str, Any], root: Path) -> Iterator[Path]:
    """Yield the named tests; by default `tests/`, if there is a dependency group `test`."""
    if told is None and "test" in data.get("dependency-groups", {}):
        yield from (path for path in [root / "tests"] if path.is_dir())
    for name in told or ():
        kinds = FOLDERS if (root / name).is_dir() else PYTHON
        yield from find_paths([name], root, TESTS_PLACE, kinds)


def _find_axes(own: Mapping[str, Any], root: Path) -> list[Any]:
    """Return the axes declared in `[tool.kernels.dispatch]` or in the file that `product` names."""
    if "product" not in own:
        return list(own.get("dispatch", {}).get("axes", []))
    path = find_path(own["product"], root, f"`product` of {PLACE}", (".json",))
    found = read_json_file(path, path.relative_to(root).as_posix()).get("axes", [])
    return found if isinstance(found, list) else [found]


def _require_table(project: Project, axes: Axes, main_role: str) -> None:
    """Check the table of kernels, if there is one; no plain file may have the name of a role."""
    if project.table is None:
        return
    roles = read_table(project.table, axes, project.root, project.include)
    require_main_role(main_role, roles)
    for one in project.plain:
        if one.role in roles:
            name = one.path.relative_to(project.root)
            message = f"`{name}` has the name of a role of the table of kernels, `{one.role}`"
            raise DeclarationError(message, hint="reports name kernels by their file: rename it")
    if (project.name, axes) != (NAME, AXES):
        return  # Table.load knows only the axes of the package that this process builds
    from .kernels.table import Table  # noqa: PLC0415 - needs a TOML reader

    try:
        Table.load(project.table)
    except KernelsError as error:
        message = f"`{project.table.relative_to(project.root)}`: {error.message}"
        raise DeclarationError(message, hint=error.hint or "rename the family") from error


def _require_floor(archset: ArchSet, axes: Axes, oldest_gpu: str) -> None:
    """Check that no target is older than `oldest_gpu`, or too old for every word of the axes."""
    oldest = Device.parse(oldest_gpu) if oldest_gpu else ANY_GPU
    words = min((w.floor for axis in axes.of("equal") for w in axis.words), default=ANY_GPU)
    why = f"`oldest_gpu` of {PLACE} is {oldest}"
    hint = "leave the target out, or lower `oldest_gpu`"
    if words > oldest:
        why = f"the axes have words from {words} on"
        hint = "leave the target out, or lower a `floor`"
    for arch in archset.archs:
        if arch.device < max(oldest, words):
            message = f"arch set `{archset.name}` has `{arch}`, and {why}"
            raise DeclarationError(message, hint=hint)


def _require_content(project: Project) -> None:
    """Check that there is something to compile, and that no file or name occurs twice."""
    if not (project.plain or project.table):
        message = f"{PLACE} names nothing to compile"
        hint = f'`[[tool.{TABLE}.sources]]` with `files = ["csrc/*.cu"]` names files of CUDA'
        raise DeclarationError(message, hint=hint)
    twice = set(project.binding) & set(project.host)
    if twice:
        name = min(twice).relative_to(project.root)
        message = f"`{name}` is in `binding` and in `host`"
        raise DeclarationError(message, hint="`host` is of the library without torch: choose one")
    _require_names(project)
    _require_kernels(project)


def _require_names(project: Project) -> None:
    for names in ([one.role for one in project.plain], [one.family for one in project.plain]):
        for name, count in Counter(names).items():
            if count > 1:
                paths = [one.path for one in project.plain if name in {one.role, one.family}]
                named = " and ".join(f"`{path.relative_to(project.root)}`" for path in paths)
                message = f"{len(paths)} files of CUDA have the name `{name}`: {named}"
                hint = "reports name kernels by their file: rename one"
                raise DeclarationError(message, hint=hint)


def _require_kernels(project: Project) -> None:
    owners: dict[str, Path] = {}
    for one in project.plain:
        text = one.path.read_text(encoding="utf-8", errors="replace")
        for kernel in find_c_kernels(text):
            if kernel in " ".join(one.flags):  # a macro may define the name
                continue
            other = owners.setdefault(kernel, one.path)
            if other != one.path:
                named = " and ".join(f"`{p.relative_to(project.root)}`" for p in (other, one.path))
                message = f"two files define the kernel `{kernel}`: {named}"
                raise DeclarationError(message, hint="rename one, or give it a namespace")
