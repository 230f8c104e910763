"""Compiles the libraries of a package with CMake and checks every kernel.

The build folder keeps the objects of every compiled target, so that the next arch set compiles only
new targets.
"""

from __future__ import annotations

import ctypes
import fcntl
import fnmatch
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ...builds.linkage import RUNTIME_PATH, has_shared_runtime
from ...errors import KernelsError
from ...loading.process import PR_SET_PDEATHSIG
from ...product import FOLDER, NAME, PRODUCT, VARIABLES
from ...targets.archs import Arch
from ...targets.axes import AXES
from ...targets.devices import parse_version
from ...targets.fallbacks import Fallbacks
from ...targets.wording import count
from ..kernels.table import Table
from ..project import EMBEDDED, NATIVE, ROOT, build_folder, load_project, stage_toolkit
from ..toolchain.cross import ASKED, TARGETS, ask_foreign
from .assemble import Assembler, assemble, is_taken, read_ptx, targets_of
from .plain import NINJA, NVCC, Group, list_groups, serve_jobs, write_groups
from .ptxas import KernelResources, parse_ptxas
from .spills import judge_spills, load_exceptions
from .symbols import check_symbols, require_distinct

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ...targets.archs import ArchSet
    from ..declaration import Plain, Project
    from ..toolchain.cross import Target
    from ..toolchain.nvcc import Toolchain
    from ..toolchain.torch_headers import TorchHeaders

STATIC_STDCXX: Final = f"{VARIABLES}STATIC_STDCXX"
EVERY_PLAN: Final = f"{VARIABLES}EVERY_PLAN"
TOOLKIT_LINK: Final = "cuda"  # in a build folder


class NativeBuildError(KernelsError):
    """CMake or a compiler failed, or a kernel spills; the details have been printed."""


@dataclass(frozen=True)
class NativeBuild:
    """The compiled libraries of one arch set."""

    folder: Path
    variants: tuple[dict[str, Any], ...]  # from variants.json, with the library's launch sizes
    fallbacks: Fallbacks
    resources: tuple[KernelResources, ...]  # of SASS, from the compilation
    assembled: tuple[KernelResources, ...]  # of PTX, from offline assembly
    compiled: int  # number of objects that this build compiled
    reused: int  # number of objects from earlier builds

    plain: tuple[tuple[Plain, Path], ...] = ()  # plain files and their objects

    @property
    def libraries(self) -> tuple[Path, ...]:
        """The paths of the libraries in the build folder."""
        return tuple(self.folder / name for name in PRODUCT.libraries)

    def __str__(self) -> str:
        return f"{count(self.compiled, 'object')} compiled, {self.reused} reused"


@dataclass(frozen=True)
class NativeOptions:
    """The settings of a native build, passed to CMake."""

    archset: ArchSet
    published: tuple[ArchSet, ...]  # all published sets, for every CPU
    toolchain: Toolchain
    headers: TorchHeaders
    jobs: int
    project: Project = field(default_factory=load_project)

    @property
    def groups(self) -> tuple[Group, ...]:
        """The plain files, grouped by targets and flags."""
        return list_groups(self.project.plain, self.archset.archs)

    @property
    def folder(self) -> Path:
        """The build folder, shared by all arch sets of one toolkit and CPU."""
        foreign = f"-{self.target.machine}" if self.target else ""
        return build_folder() / f"native-{self.toolchain.nvcc}{foreign}"

    @property
    def target(self) -> Target | None:
        """The target CPU of a cross build; None for x86_64."""
        return TARGETS.get(self.archset.machine)


def build_native(options: NativeOptions) -> NativeBuild:
    """Configure, compile and link the libraries, and check their kernels."""
    folder = options.folder
    hold(folder.with_name(f"{folder.name}.lock"))
    _configure(options, folder)
    before = _object_times(folder)
    try:
        _compile(options, folder)
    except NativeBuildError:
        explain_link(options, folder)
        raise
    objects = _list_objects(options, folder)
    paths = [one.path for one in objects]
    compiled = sum(before.get(path) != path.stat().st_mtime_ns for path in paths)
    print(f"{check_symbols(paths)} mergeable symbols of kernels, none of them shared")
    variants: tuple[dict[str, Any], ...] = ()
    if options.project.table:
        _load_runtime(options.toolchain)
        variants = tuple(_read_variants(folder, options.target))
    said, assembled = list(_read_said(paths)), _assemble(options, objects, variants)
    require_no_spills([*said, *assembled], options)
    files = {str(one.path): one for one in options.project.plain}
    return NativeBuild(
        folder=folder,
        variants=variants,
        fallbacks=Fallbacks.from_json(_read_generated(folder, "fallbacks.json")),
        resources=tuple(kernel for text in said for kernel in parse_ptxas(text)),
        assembled=tuple(kernel for text in assembled for kernel in parse_ptxas(text)),
        compiled=compiled,
        reused=len(objects) - compiled,
        plain=tuple((files[one.source], one.path) for one in objects if one.source in files),
    )


@cache
def hold(lock: Path) -> None:
    """Wait until no other build uses a folder; block other builds until this process ends."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"another build works in `{lock.with_suffix('')}`; waiting for its end", flush=True)
        fcntl.flock(file, fcntl.LOCK_EX)


def _configure(options: NativeOptions, folder: Path) -> None:
    native = NATIVE if EMBEDDED else stage_toolkit(build_folder()) / "native"
    forget_moved(folder, options.toolchain.home, native)
    home = link_toolkit(folder, options.toolchain.home)
    shared = has_shared_runtime(options.toolchain.cuda)
    project = options.project
    definitions = {
        "PRODUCT": NAME,
        "ROOT": str(ROOT),
        "GENERATE": f"{FOLDER}.make.kernels.generate",
        "TABLE": str(project.table or ""),
        "INCLUDE": _list(project.include),
        "HOST": _list(project.host),
        "BINDING": _list(project.binding),
        "PLAIN": str(write_groups(options.groups, folder)) if project.plain else "",
        "ARCHS": str(options.archset),
        "TORCH_INCLUDE": str(options.headers.include),
        "CMAKE_CUDA_COMPILER": str(home / "bin" / "nvcc"),
        "CMAKE_MAKE_PROGRAM": shutil.which("ninja") or "ninja",
        "Python3_EXECUTABLE": sys.executable,
        "GATE_PYTHON": "python3",
        "SHARED_CUDART": "ON" if shared else "OFF",
        "CUDART_PATH": ":".join(RUNTIME_PATH) if shared else "",
        "STATIC_STDCXX": os.environ.get(STATIC_STDCXX) or "OFF",
        "EVERY_PLAN": os.environ.get(EVERY_PLAN) or "OFF",
        "JOBSERVER": "ON" if shares_jobs(options, ninja_version()) else "OFF",
    }
    if options.target:
        definitions |= options.target.definitions()
    if os.environ.get("CXX"):  # otherwise nvcc would use g++ on PATH
        definitions["CMAKE_CXX_COMPILER"] = os.environ["CXX"]
        definitions["CMAKE_CUDA_HOST_COMPILER"] = os.environ["CXX"]
    command = ["cmake", "-S", str(native), "-B", str(folder), "-G", "Ninja"]
    _run([*command, *(f"-D{name}={value}" for name, value in definitions.items())])


def _compile(options: NativeOptions, folder: Path) -> None:
    # Not `cmake --build`: killing this process must also kill Ninja, which ends its compilers.
    command = ["ninja", "-C", str(folder)]
    if shares_jobs(options, ninja_version()):
        with serve_jobs(options.jobs) as environ:
            _run(command, environ)
    else:
        _run([*command, "-j", str(options.jobs)])


def explain_link(options: NativeOptions, folder: Path) -> None:
    """After a failed build whose objects all exist, report files that define the same symbol.

    Raises:
        SymbolError: Two files of a library define the same function or variable.
    """
    objects = _list_objects(options, folder)
    if not all(one.path.is_file() for one in objects):
        return
    table = {*map(str, options.archset.archs), f"{NAME}_kernels"}
    libraries: defaultdict[bool, dict[Path, str]] = defaultdict(dict)
    for one in objects:
        name = os.path.relpath(one.source, options.project.root)
        libraries[one.group in table][one.path] = name
    for sources in libraries.values():
        require_distinct(sources)


def shares_jobs(options: NativeOptions, ninja: tuple[int, ...]) -> bool:
    """Tell if ninja and nvcc share a job server, so that nvcc uses free cores for a file's targets.

    Args:
        options: Options of the build.
        ninja: Version of ninja.
    """
    able = parse_version(options.toolchain.cuda) >= NVCC and ninja >= NINJA
    return able and bool(options.project.plain)


def _list(paths: Iterable[Path]) -> str:
    """Return paths as a CMake list."""
    return ";".join(map(str, paths))


def forget_moved(folder: Path, home: Path, sources: Path = NATIVE) -> None:
    """Delete a build folder made for another toolkit or source tree: CMake cannot change either."""
    cache = folder / "CMakeCache.txt"
    if not cache.is_file():
        return
    lines = cache.read_text(encoding="utf-8").splitlines()
    values = {line.partition("=")[2] for line in lines}
    if str(sources) not in values or not _is_linked(folder / TOOLKIT_LINK, home):
        shutil.rmtree(folder)


def link_toolkit(folder: Path, home: Path) -> Path:
    """Return the toolkit's path through a link in the build folder.

    Preprocessed sources contain the paths of the toolkit's headers. Through the link, these paths
    are the same relative to every build folder, so that ccache reuses the objects of another clone
    even if its toolkit is elsewhere.
    """
    link = folder / TOOLKIT_LINK
    if not _is_linked(link, home):
        folder.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(home.absolute())
    return link


def _is_linked(link: Path, home: Path) -> bool:
    return link.is_symlink() and link.readlink() == home.absolute()


def _run(command: list[str], environ: Mapping[str, str] = os.environ) -> None:
    status = progress_line(ninja_version())
    environ = {**environ, "PATH": _search_path(), "NINJA_STATUS": status}
    prctl = ctypes.CDLL(None).prctl
    end_with_us = partial(prctl, PR_SET_PDEATHSIG, signal.SIGTERM)
    done = subprocess.run(command, check=False, env=environ, preexec_fn=end_with_us)
    if done.returncode:
        message = f"`{' '.join(command[:3])}` failed with exit code {done.returncode}, see above"
        raise NativeBuildError(message)


def _search_path() -> str:
    """Return PATH with the folder of this Python appended.

    NOTE: in an isolated build of pip, some programs are on PATH and others next to Python.
    """
    return f"{os.environ.get('PATH', '')}{os.pathsep}{Path(sys.executable).parent}"


def ninja_version() -> tuple[int, ...]:
    """Ask Ninja for the first two numbers of its version; empty if it does not answer."""
    ninja = shutil.which("ninja", path=_search_path()) or "false"
    done = subprocess.run([ninja, "--version"], check=False, capture_output=True, text=True)
    return tuple(int(word) for word in done.stdout.split(".")[:2] if word.isdigit())


def progress_line(ninja: tuple[int, ...]) -> str:
    """Return Ninja's progress format, with the remaining time if Ninja is 1.12 or newer."""
    return "[%f/%t, %w, %W left] " if ninja >= (1, 12) else "[%f/%t, %e s] "


def _object_times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.o")}


class Object(NamedTuple):
    """An object file."""

    path: Path
    source: str
    group: str  # CMake target


def _list_objects(options: NativeOptions, folder: Path) -> list[Object]:
    """Return the objects to link: objects of the set's targets and of the host code.

    The folder may have more: objects of deleted sources and of other sets.
    """
    archs = map(str, options.archset.archs)
    plain = (one.name for one in options.groups)
    names = {*archs, *plain, f"{NAME}_kernels", f"{NAME}_torch"}
    text = (folder / "compile_commands.json").read_text(encoding="utf-8")
    found = {(one["file"], folder / one["output"]) for one in json.loads(text)}
    place = folder / "CMakeFiles"
    every = (
        Object(path, source, path.relative_to(place).parts[0].removesuffix(".dir"))
        for source, path in sorted(found)
    )
    return [one for one in every if one.group in names]


def _read_said(objects: Iterable[Path]) -> Iterator[str]:
    """Yield ptxas's output for each object, as stored by the launcher."""
    for path in objects:
        said = path.with_name(path.name + ".ptxas")
        if said.is_file():
            yield said.read_text(encoding="utf-8")


def require_no_spills(texts: Iterable[str], options: NativeOptions) -> None:
    """Report the kernels that spill without an exception, and exceptions that match no kernel.

    Args:
        texts: Outputs of ptxas.
        options: Options of the build.

    Raises:
        NativeBuildError: A kernel spills more than an exception allows, or has a warning that no
            kernel may have.
    """
    project = options.project
    verdict = judge_spills(texts, load_exceptions(project.spills))
    for pattern in _without_kernel(verdict.unused, options):
        warning = f"{project.spills_place} names `{pattern}`, and no kernel has that name"
        print(f"warning: {warning}", flush=True)
    if verdict:
        return
    print(*verdict.lines, sep="\n", flush=True)
    row = f'symbol = "{verdict.worst}", spill_bytes = {verdict.most}, reason = "..."'
    hint = f"reduce the tile, or allow it by a row of {project.spills_place}: `{row}`"
    message = f"{verdict.summary}; all of it is listed above"
    raise NativeBuildError(message, hint=hint if verdict.worst else None)


def _without_kernel(unused: Iterable[str], options: NativeOptions) -> list[str]:
    """Return the patterns that match no kernel of any set; empty if the set skips a plain file."""
    project, archset = options.project, options.archset
    if not all(one.archs_in(archset.archs) for one in project.plain):
        return []
    left = list(unused)
    if left and project.table:
        table = replace(Table.load(project.table), every_plan=True)
        every = {arch for one in options.published for arch in one.archs}
        symbols = [variant.symbol for arch in every for variant in table.variants(arch)]
        left = [pattern for pattern in left if not fnmatch.filter(symbols, pattern)]
    return left


def _read_generated(folder: Path, name: str) -> Any:  # noqa: ANN401 - JSON of the generator
    return json.loads((folder / "generated" / name).read_text(encoding="utf-8"))


def _read_variants(folder: Path, target: Target | None) -> Iterable[dict[str, Any]]:
    """Yield the requested variants, joined with the launch sizes that the library reports."""
    declared = _read_generated(folder, "variants.json")
    built = {variant["symbol"]: variant for variant in ask(folder / PRODUCT.library, target)}
    for variant in declared:
        yield {**built[variant["symbol"]], **variant}


def _load_runtime(toolchain: Toolchain) -> None:
    """Load the shared CUDA runtime, if it is needed: the library's own search path fails here."""
    if has_shared_runtime(toolchain.cuda):
        for library in (toolchain.home / "lib64").glob("libcudart.so.*"):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def ask(path: Path, target: Target | None) -> list[dict[str, Any]]:
    """Ask a library for its variants, without a GPU; use an emulator for another CPU."""
    if target is None:
        return ask_library(path)
    found: list[dict[str, Any]] = json.loads(ask_foreign(path, target))
    return found


def ask_library(path: Path) -> list[dict[str, Any]]:
    """Ask a library that runs on this CPU for its variants."""
    library = ctypes.CDLL(str(path))
    ask = getattr(library, ASKED)
    ask.argtypes, ask.restype = [ctypes.c_char_p, ctypes.c_int64], ctypes.c_int64
    size = ask(None, 0)
    buffer = ctypes.create_string_buffer(size + 1)
    ask(buffer, size + 1)
    found: list[dict[str, Any]] = json.loads(buffer.value)
    return found


def _assemble(
    options: NativeOptions, objects: Iterable[Object], variants: Iterable[Mapping[str, Any]]
) -> list[str]:
    folder, toolchain = options.folder, options.toolchain
    names = [str(arch) for arch in options.archset.archs if arch.ptx]
    names += [one.name for one in options.groups if any(arch.ptx for arch in one.archs)]
    texts = read_ptx(one.path for one in objects if one.group in names)
    machine = options.archset.machine
    published = [one for one in options.published if one.machine == machine]
    places = {
        one["symbol"]: (one["family"], AXES.place(one))
        for one in variants
        if Arch.parse(one["target"]).ptx
    }
    work = [
        (ptx, target)
        for ptx in texts
        for target in targets_of(ptx.arch, published, options.archset.archs)
        if target.number == ptx.arch.number
        or any(is_taken(symbol, target, places) for symbol in ptx.symbols)
    ]
    assembler = Assembler(toolchain.tool("ptxas"), toolchain.ptxas, folder / "assembled")
    return assemble(work, assembler, options.jobs)
