"""The installed build: the contents of its manifest and of its libraries."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..binaries.files import READ_HINT
from ..builds.manifest import Manifest, declare_build, load_manifest
from ..builds.package import PACKAGE
from ..builds.published import known_sets
from ..errors import AccessError, ExtensionError, FatbinError, ManifestError
from ..gpucode.fatbin import Fatbin, open_fatbin
from ..product import NAME, PRODUCT, SYMBOLS
from ..targets.advice import explain_refusal
from ..targets.axes import AXES, NOWHERE
from ..targets.verdict import Build, Situation, Variant, judge_device
from .libcuda import read_cuda

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ..targets.archs import Arch
    from ..targets.compatibility import Origin
    from ..targets.devices import Device


@dataclass(frozen=True)
class Installed:
    """The installed build. A problem is empty if its file could be read."""

    build: Build | None = None  # from manifest and library, or from the readable one; None: neither
    library: str = ""  # path; empty if there is none
    manifest_problem: str = ""
    library_problem: str = ""
    differences: tuple[str, ...] = ()  # between manifest and library
    torch_min: str = ""
    torch_tested_max: str = ""
    access_fix: str = ""  # what to do about a file that this user may not read

    def to_json(self) -> dict[str, Any]:
        """Return the state as plain data."""
        build = self.build
        return {
            "build": build.name if build else None,
            "targets": [str(arch) for arch in build.archs] if build else [],
            "toolkit": build.toolkit if build else None,
            "archsets": [archset.to_json() for archset in build.archsets] if build else [],
            "manifest_problem": self.manifest_problem or None,
            "library_problem": self.library_problem or None,
            "differences": list(self.differences),
            "torch_min": self.torch_min or None,
            "torch_tested_max": self.torch_tested_max or None,
        }


def unsupported_error(device: Device, *, name: str = "") -> ExtensionError | None:
    """Return the error that operators raise for a GPU that cannot use this build.

    Return None if the GPU can use the build, or if no build is found. The error has the same words
    as `doctor`. Call this only after a failure, because it reads the kernel library.
    """
    build = read_installed().build
    if build is None:
        return None
    cuda = read_cuda()
    verdict = judge_device(build, Situation.of(device, cuda.driver, os.environ))
    if verdict:
        return None
    others = [gpu.device for gpu in cuda.gpus]
    sentence, fix = explain_refusal(verdict, build, name=name, others=others)
    return ExtensionError(sentence, hint=fix or None)


def read_installed(package: Path = PACKAGE) -> Installed:
    """Read the manifest and the libraries; describe an absent or broken file as a problem."""
    manifest: Manifest | None = None
    manifest_problem, library_problem, access_fix = "", "", ""
    embedded: tuple[Variant, ...] = ()
    try:
        manifest = load_manifest(package)
    except ManifestError as error:
        manifest_problem = error.message
        access_fix = READ_HINT if isinstance(error.__cause__, PermissionError) else ""
    libraries = [package / name for name in PRODUCT.libraries]
    library = libraries[0]
    toolkit = manifest.toolkit.cuda if manifest else None
    try:
        embedded = tuple(
            one for path in libraries for one in read_embedded(path, toolkit, manifest)
        )
    except FatbinError as error:
        library_problem = error.message
        access_fix = (error.hint if isinstance(error, AccessError) else None) or access_fix
    found = combine(
        manifest,
        embedded,
        library=str(library) if library.is_file() else "",
        manifest_problem=manifest_problem,
        library_problem=library_problem,
    )
    return replace(found, access_fix=access_fix)


def combine(
    manifest: Manifest | None,
    embedded: tuple[Variant, ...],
    *,
    library: str = "",
    manifest_problem: str = "",
    library_problem: str = "",
) -> Installed:
    """Combine manifest and library. A library that could be read decides which kernels exist."""
    found = Installed(None, library, manifest_problem, library_problem)
    if manifest is None:
        toolkit = next((one.origin.toolkit for one in embedded if one.origin.toolkit), None)
        sets = tuple(one for one in known_sets() if one.machine == platform.machine())
        return replace(found, build=Build(NAME, embedded, sets, toolkit)) if embedded else found
    build = declare_build(manifest)
    found = replace(found, torch_min=manifest.torch_min, torch_tested_max=manifest.torch_tested_max)
    if library_problem:
        return replace(found, build=build)
    differences = find_differences(build.variants, embedded)
    proofs = {(one.symbol, one.arch): one.proof for one in build.variants}
    proven = (replace(one, proof=proofs.get((one.symbol, one.arch), "")) for one in embedded)
    build = replace(build, variants=tuple(proven))
    return replace(found, build=build, differences=differences)


def read_embedded(
    library: Path, toolkit: str | None, manifest: Manifest | None = None
) -> tuple[Variant, ...]:
    """Return the package's kernels in a library, each with the target of its image.

    Args:
        library: The file.
        toolkit: CUDA version that compiled it; None if unknown.
        manifest: The manifest, which lists the plain kernels: their symbols have no axes.

    Raises:
        FatbinError: The library is absent or cannot be read.
    """
    with open_fatbin(library) as fatbin:
        return read_variants(fatbin, toolkit, manifest)


def read_variants(
    fatbin: Fatbin, toolkit: str | None, manifest: Manifest | None = None
) -> tuple[Variant, ...]:
    """Return the package's kernels in an open library; see `read_embedded`."""
    records = manifest.kernels if manifest else ()
    plain = {one.symbol: one.family for one in records if one.is_plain}
    axes, symbols = (manifest.axes, f"{manifest.product}_") if manifest else (AXES, SYMBOLS)
    found: list[Variant] = []
    for entry in fatbin.report.select():
        if entry.arch is None:
            continue
        origin = replace(entry.origin, toolkit=toolkit or entry.origin.toolkit)
        for name in (kernel.name for kernel in fatbin.kernels(entry)):
            placed = axes.read_symbol(name, symbols) if name not in plain else None
            family, place = placed or (plain.get(name), NOWHERE)
            if family is not None:
                found.append(Variant.of(name, family, place, entry.arch, axes=axes, origin=origin))
    return tuple(sorted(found, key=lambda variant: (variant.symbol, variant.arch)))


def parse_symbol(symbol: str, arch: Arch, origin: Origin) -> Variant | None:
    """Read a symbol such as `PREFIX_fwd_bf16_d64_smem64_sm90a`; None for other kernels."""
    found = AXES.read_symbol(symbol, SYMBOLS)
    return found and Variant.of(symbol, *found, arch, origin=origin)


def find_differences(declared: Iterable[Variant], embedded: Iterable[Variant]) -> tuple[str, ...]:
    """Name kernels that are only declared, only embedded, or compiled for another target."""
    promised = {(variant.symbol, variant.arch) for variant in declared}
    present = {(variant.symbol, variant.arch) for variant in embedded}
    told = {
        "declared but not embedded": promised - present,
        "embedded but not declared": present - promised,
    }
    return tuple(
        f"{symbol} for {arch} is {how}" for how in told for symbol, arch in sorted(told[how])
    )
