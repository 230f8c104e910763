"""Wheels of this package made by hand, folders of them, and a local server."""

from __future__ import annotations

import hashlib
import zipfile
from typing import TYPE_CHECKING
from urllib.parse import quote

from flash_dist.toolkit.builds.manifest import (
    CODECS,
    HostInfo,
    KernelRecord,
    Manifest,
    TargetInfo,
    ToolkitInfo,
)
from flash_dist.toolkit.builds.published import published_sets
from flash_dist.toolkit.make.project import load_project
from flash_dist.toolkit.targets.axes import Place
from flash_dist.toolkit.targets.devices import (
    format_version,
    toolkit_compression,
    toolkit_driver,
    toolkit_ptx_isa,
)
from tests.unit.made.builds import make_variants
from tests.unit.made.fatbin_builder import PTX, SASS, Kernel, container, cubin, entry, library, ptx

if TYPE_CHECKING:
    from pathlib import Path

    from flash_dist.toolkit.targets.archs import Arch, ArchSet

TAGS = "py3-none-manylinux_2_34_{machine}"
PADDING = {  # unit: 100 bytes; ordered as the sizes of real wheels
    "turing-ampere-ada": 5500,
    "hopper": 1700,
    "blackwell": 2200,
    "all": 7100,
    "cuda12": 4900,
    "arm": 8000,
}


def tell_version(archset: ArchSet, version: str) -> str:
    """Return the version of a wheel: `0.1.0+cu130.hopper`."""
    return f"{version}+cu{archset.toolkit.replace('.', '')}.{archset.label}"


def make_toolkit(cuda: str) -> ToolkitInfo:
    """Return a toolkit as recorded by a build; nvcc 12.4 comes with a newer ptxas."""
    if cuda == "12.4":
        return ToolkitInfo(cuda, "12.4.131", "12.9.86", "525", "8.4")
    isa = format_version(toolkit_ptx_isa(cuda))
    return ToolkitInfo(cuda, f"{cuda}.88", f"{cuda}.88", str(toolkit_driver(cuda)), isa)


def make_manifest(archset: ArchSet, version: str) -> Manifest:
    """Return the manifest of a wheel for a set."""
    kernels = tuple(
        KernelRecord(
            one.symbol, one.family, Place(*one.key[1:], one.plan), one.arch,
            64, 0, 0, 0, 0, 128, "native",
        )
        for arch in archset.archs
        for one in make_variants(arch)
    )  # fmt: skip
    return Manifest(
        package_version=tell_version(archset, version),
        arch_set=archset,
        archsets=published_sets(),
        toolkit=make_toolkit(archset.toolkit),
        host=HostInfo("g++ 12.2.0", "2.36"),
        flags=(
            next(k for k, v in CODECS.items() if v == toolkit_compression(archset.toolkit)),
            *archset.gencode_flags,
        ),
        torch_headers="2.13.0",
        torch_min="2.10",
        torch_tested_max="2.15",
        targets=tuple(TargetInfo(arch, "native") for arch in archset.archs),
        kernels=kernels,
        scripts=load_project().scripts,
        entry_points=load_project().entry_points,
        licenses=load_project().licenses,
    )


def make_image(arch: Arch) -> bytes:
    """Return an image with one kernel."""
    if arch.ptx:
        return entry(PTX, arch.number, ptx("alpha"), suffix=arch.suffix, isa=(9, 0))
    return entry(SASS, arch.number, cubin(Kernel("alpha")), suffix=arch.suffix)


def write_wheel(
    folder: Path, archset: ArchSet, version: str = "0.1.0", *, tags: str = TAGS
) -> Path:
    """Write a wheel with manifest and GPU code, with a realistic relative size."""
    folder.mkdir(parents=True, exist_ok=True)
    told_version = tell_version(archset, version)
    tags = tags.format(machine=archset.machine)
    path = folder / f"flash_dist-{told_version}-{tags}.whl"
    code = library(container(*map(make_image, archset.archs)))
    info = f"flash_dist-{told_version}.dist-info"
    told = f"Name: flash_dist\nVersion: {told_version}\nRequires-Python: >=3.10\n"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", told)
        wheel.writestr("flash_dist/_build.json", make_manifest(archset, version).to_text())
        wheel.writestr("flash_dist/libflash_dist_kernels.so", code)
        wheel.writestr("flash_dist/padding", b"0" * 100 * PADDING.get(archset.name, 100))
    return path


def write_dist(folder: Path, version: str = "0.1.0") -> Path:
    """Write every published set into a separate folder, as builds do."""
    for archset in published_sets():
        write_wheel(folder / archset.name, archset, version)
    return folder


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_simple_index(folder: Path, dist: Path) -> Path:
    """Write a static PEP 503 index of the wheels in a folder."""
    project = folder / "simple" / "flash-dist"
    project.mkdir(parents=True)
    links = "".join(
        f'<a href="../../files/{quote(path.name)}#sha256={_hash(path)}" '
        f'data-requires-python="&gt;=3.10">{path.name}</a>\n'
        for path in sorted(dist.rglob("*.whl"))
    )
    (project / "index.html").write_text(f"<!DOCTYPE html><body>{links}</body>")
    (folder / "simple" / "index.html").write_text('<a href="flash-dist/">flash-dist</a>')
    (folder / "files").mkdir()
    for path in dist.rglob("*.whl"):
        (folder / "files" / path.name).write_bytes(path.read_bytes())
    return folder
