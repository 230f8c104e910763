"""Makes the manifest of a build from its libraries and the output of the compilers."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final

from ...builds.manifest import (
    CODECS,
    FILE_NAME,
    Assembled,
    HostInfo,
    KernelRecord,
    Manifest,
    TargetInfo,
    ToolkitInfo,
)
from ...builds.published import load_proofs
from ...errors import ManifestError
from ...gpucode.fatbin import open_fatbin
from ...product import PRODUCT
from ...targets.archs import Arch
from ...targets.axes import AXES, NOWHERE
from ...targets.devices import format_version, toolkit_compression, toolkit_driver, toolkit_ptx_isa
from ..project import (
    ARCHSETS,
    EMBEDDED,
    NATIVE,
    PRODUCT_FILE,
    PYPROJECT,
    ROOT,
    TOOLKIT,
    list_below,
    load_project,
)
from ..toolchain.nvcc import glibc_version, gxx_version
from .parts import find_parts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from ...gpucode.cubin import KernelInfo
    from ..declaration import Plain
    from ..toolchain.nvcc import Toolchain
    from .native import NativeBuild, NativeOptions

FLAGS = ("-O3", "-std=c++17")
_NOT_COMPILED: Final = frozenset({"debug", "dry_run", "__pycache__"})  # folders to leave out


def make_manifest(
    build: NativeBuild, options: NativeOptions, package: Path, version: str
) -> Manifest:
    """Combine all data on a build into its manifest.

    Args:
        build: The compiled libraries.
        options: The options of the build.
        package: The folder to pack, with its Python files and data.
        version: Version of the wheel.
    """
    project = load_project()
    return Manifest(
        package_version=version,
        arch_set=options.archset,
        archsets=options.published,
        toolkit=_toolkit_info(options.toolchain),
        host=HostInfo(f"g++ {gxx_version()}", glibc_version()),
        flags=(*FLAGS, _compression(options.toolchain), *options.archset.gencode_flags),
        torch_headers=options.headers.version,
        torch_min=project.torch_min,
        torch_tested_max=project.torch_tested_max,
        targets=tuple(TargetInfo(arch, proof_of(arch)) for arch in options.archset.archs),
        kernels=tuple(_kernel_records(build)),
        sources=hash_sources(),
        parts=find_parts(build.folder, options.toolchain, options.headers),
        files=tuple(sorted(list_files(package))),
        fallbacks=build.fallbacks,
        libraries=PRODUCT.libraries,
        dependencies=project.dependencies,
        scripts=project.scripts,
        entry_points=project.entry_points,
        licenses=project.licenses,
    )


def list_files(package: Path) -> Iterator[str]:
    """Yield the paths of a package's files, except libraries, manifest and Python's caches.

    Raises:
        ManifestError: The package has no `__init__.py`.
    """
    found = [path.relative_to(package) for path in package.rglob("*") if path.is_file()]
    names = [path.as_posix() for path in found if "__pycache__" not in path.parts]
    if "__init__.py" not in names:
        message = f"`{package}` holds no module that the record of the build could list"
        raise ManifestError(message)
    yield from (name for name in names if not name.endswith(".so") and name != FILE_NAME)


def hash_sources(root: Path = ROOT) -> str:
    """Return one hash of the names and contents of all files that the libraries are built from."""
    digest = hashlib.sha256()
    for name, path in sorted(_list_sources(root).items()):
        if not _NOT_COMPILED & set(name.parts):
            code = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{code} {name.as_posix()}\n".encode())
    return digest.hexdigest()


def _list_sources(root: Path) -> dict[PurePosixPath, Path]:
    """Return the project's and the toolkit's sources for the libraries, by name."""
    product = PRODUCT_FILE if EMBEDDED else PYPROJECT
    places = [root / place.relative_to(ROOT) for place in (*load_project().compiled, product)]
    own = (NATIVE, TOOLKIT / "make" / "kernels")
    if EMBEDDED:
        places += [root / place.relative_to(ROOT) for place in own]
    found = {PurePosixPath(path.relative_to(root)): path for path in list_below(*places)}
    for path in list_below(*(() if EMBEDDED else own)):
        found["toolkit" / PurePosixPath(path.relative_to(TOOLKIT))] = path
    return found


def _compression(toolchain: Toolchain) -> str:
    """Return the compression flag that CMakeLists.txt chooses."""
    codec = toolkit_compression(toolchain.cuda)
    return next(flag for flag, packed in CODECS.items() if packed == codec)


def proof_of(arch: Arch) -> str:
    """Return `native` or `jit` if code of a target has run on a GPU, else `assembled`."""
    return load_proofs(ARCHSETS).get(arch, "assembled")


def _kernel_records(build: NativeBuild) -> list[KernelRecord]:
    assembled: defaultdict[str, list[Assembled]] = defaultdict(list)
    for kernel in build.assembled:
        result = Assembled(Arch.parse(kernel.target), kernel.registers, kernel.spill_bytes)
        assembled[kernel.symbol].append(result)
    return [*_table_records(build, assembled), *_plain_records(build, assembled)]


def _plain_records(
    build: NativeBuild, assembled: Mapping[str, list[Assembled]]
) -> Iterator[KernelRecord]:
    """Yield a record for each kernel and target of each plain file.

    Names and resources come from the compiled object, because a source may also instantiate kernel
    templates of headers.
    """
    spilled = {(one.symbol, one.target): one.spill_bytes for one in build.resources}
    for file, compiled in build.plain:
        with open_fatbin(compiled) as fatbin:
            for entry in fatbin.report.entries:
                for kernel in fatbin.kernels(entry) if entry.arch else ():
                    yield _plain_record(file, kernel, spilled, assembled)


def _plain_record(
    file: Plain,
    kernel: KernelInfo,
    spilled: Mapping[tuple[str, str], int],
    assembled: Mapping[str, list[Assembled]],
) -> KernelRecord:
    arch = kernel.arch or Arch(0, 0)
    return KernelRecord(
        symbol=kernel.name,
        family=file.family,
        place=NOWHERE,
        target=arch,
        registers=kernel.registers,
        spill_bytes=None if arch.ptx else spilled.get((kernel.name, str(arch)), 0),
        stack_bytes=kernel.stack,
        static_smem=kernel.static_smem,
        dynamic_smem=0,
        threads=kernel.max_threads,
        proof=proof_of(arch),
        assembled_for=_sort(assembled.get(kernel.name, ())) if arch.ptx else (),
        source=file.path.name,
        role=file.role,
    )


def _table_records(
    build: NativeBuild, assembled: Mapping[str, list[Assembled]]
) -> Iterator[KernelRecord]:
    compiled = {kernel.symbol: kernel for kernel in build.resources}
    for variant in build.variants:
        symbol, target = variant["symbol"], Arch.parse(variant["target"])
        resources = compiled.get(symbol)
        yield KernelRecord(
            symbol=symbol,
            family=variant["family"],
            place=AXES.place(variant),
            target=target,
            registers=resources.registers if resources else None,
            spill_bytes=resources.spill_bytes if resources else None,
            stack_bytes=resources.stack_bytes if resources else None,
            static_smem=resources.static_smem if resources else None,
            dynamic_smem=variant["dynamic_smem"],
            threads=variant["threads"],
            proof=proof_of(target),
            assembled_for=_sort(assembled.get(symbol, ())),
            source=variant["source"],
            role=variant["role"],
        )


def _sort(assembled: Iterable[Assembled]) -> tuple[Assembled, ...]:
    return tuple(sorted(assembled, key=lambda one: one.target))


def _toolkit_info(toolchain: Toolchain) -> ToolkitInfo:
    return ToolkitInfo(
        cuda=toolchain.cuda,
        nvcc=toolchain.nvcc,
        ptxas=toolchain.ptxas,
        driver_min=str(toolkit_driver(toolchain.cuda)),
        ptx_isa=format_version(toolkit_ptx_isa(toolchain.cuda)),
    )
