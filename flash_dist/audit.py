"""Is a wheel what its `_build.json` declares? Reads the wheel only, and believes nothing it cannot see.

The audit fails closed: what cannot be read or is not expected is a problem.
"""

from __future__ import annotations

import tempfile
import zipfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from .dynamic import DynamicInfo, read_dynamic
from .errors import AuditError
from .fatbin import FatbinEntry, KernelInfo, open_fatbin
from .manifest import FILE_NAME, KernelRecord, Manifest

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator

KERNELS = "flash_dist/libflash_dist_kernels.so"
BINDING = "flash_dist/_C.abi3.so"
MANIFEST = f"flash_dist/{FILE_NAME}"

# What every glibc system has.
SYSTEM_LIBRARIES = frozenset({
    "ld-linux-x86-64.so.2", "libc.so.6", "libdl.so.2", "libgcc_s.so.1", "libm.so.6",
    "libpthread.so.0", "librt.so.1", "libstdc++.so.6",
})  # fmt: skip
TORCH_LIBRARIES = frozenset({"libtorch.so", "libtorch_cpu.so"})
EXPORT_PREFIX = "flash_dist_"


@dataclass(frozen=True)
class KernelSize:
    """How many bytes of the library one image takes, and the kernels in it."""

    target: str
    kernels: tuple[str, ...]
    packed: int
    unpacked: int


@dataclass(frozen=True)
class AuditResult:
    """What the audit of one wheel found."""

    path: str
    version: str
    wheel_bytes: int
    budget_bytes: int | None
    images: tuple[KernelSize, ...]
    problems: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.problems

    def target_sizes(self) -> dict[str, tuple[int, int, int]]:
        """Return images, kernels and packed bytes by target."""
        targets = dict.fromkeys(image.target for image in self.images)
        return {target: _add_up(i for i in self.images if i.target == target) for target in targets}

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {"version": 1, "passed": bool(self), **asdict(self), "package_version": self.version}


def audit_wheel(path: str | os.PathLike[str], *, budget_bytes: int | None = None) -> AuditResult:
    """Compare a wheel with its own manifest.

    Args:
        path: The wheel.
        budget_bytes: Largest file size that passes.

    Raises:
        AuditError: The file is no wheel of this package, so that there is nothing to audit.
    """
    wheel = Path(path)
    with _open_wheel(wheel) as archive:
        names = archive.namelist()
        manifest = Manifest.from_text(_read_text(archive, MANIFEST), source=MANIFEST)
        libraries = {name: _read(archive, name) for name in (KERNELS, BINDING)}
        metadata = _metadata_version(archive)
    images, embedded = _read_images(libraries[KERNELS])
    size = wheel.stat().st_size
    problems = [
        *_name_problems(wheel.name, names, metadata, manifest),
        *_kernel_problems(embedded, manifest),
        *_image_problems(images, manifest),
        *_linkage_problems(KERNELS, read_dynamic(libraries[KERNELS])),
        *_linkage_problems(BINDING, read_dynamic(libraries[BINDING])),
    ]
    if budget_bytes is not None and size > budget_bytes:
        problems.append(f"the wheel has {size:,} bytes, the budget is {budget_bytes:,}")
    sizes = tuple(_size_of(entry, kernels) for entry, kernels in images)
    return AuditResult(
        str(wheel), manifest.package_version, size, budget_bytes, sizes, tuple(problems)
    )


def _open_wheel(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        message = f"cannot read `{path}` as a wheel: {error}"
        raise AuditError(message) from error


def _read(archive: zipfile.ZipFile, name: str) -> bytes:
    if archive.namelist().count(name) != 1:
        message = f"the wheel holds `{name}` {archive.namelist().count(name)} times, not once"
        raise AuditError(message)
    try:
        return archive.read(name)
    except (OSError, zipfile.BadZipFile) as error:
        message = f"cannot read `{name}` of the wheel: {error}"
        raise AuditError(message) from error


def _read_text(archive: zipfile.ZipFile, name: str) -> str:
    return _read(archive, name).decode("utf-8", "backslashreplace")


def _metadata_version(archive: zipfile.ZipFile) -> str:
    found = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    if len(found) != 1:
        message = f"the wheel holds {len(found)} METADATA files, not one"
        raise AuditError(message)
    lines = _read_text(archive, found[0]).splitlines()
    return next((line[9:] for line in lines if line.startswith("Version: ")), "")


def _read_images(
    library: bytes,
) -> tuple[list[tuple[FatbinEntry, tuple[KernelInfo, ...]]], list[KernelInfo]]:
    with tempfile.TemporaryFile() as file:
        file.write(library)
        file.flush()
        with open_fatbin(KERNELS, file) as fatbin:
            if fatbin.report.warnings:
                message = f"`{KERNELS}` is not fully understood: {fatbin.report.warnings[0]}"
                raise AuditError(message)
            images = [(entry, fatbin.kernels(entry)) for entry in fatbin.report.entries]
    return images, [kernel for _, kernels in images for kernel in kernels]


def _name_problems(
    file_name: str, names: list[str], metadata: str, manifest: Manifest
) -> Iterator[str]:
    """File name, METADATA and manifest tell one version; no library is there that nobody declared."""
    try:
        _, version, _, tags = parse_wheel_filename(file_name)
    except InvalidWheelFilename as error:
        yield str(error)
        return
    told = {str(version), metadata, manifest.package_version}
    if len(told) != 1:
        yield f"file name, METADATA and {FILE_NAME} tell different versions: {', '.join(sorted(told))}"
    if manifest.package_version.rpartition("+")[2].partition(".")[2] != manifest.arch_set.label:
        yield f"version {manifest.package_version} does not end in label {manifest.arch_set.label}"
    for tag in tags:
        if (tag.interpreter, tag.abi) != ("cp310", "abi3") or "manylinux_2_" not in tag.platform:
            yield f"the tag is {tag}, expected cp310-abi3-manylinux_2_*"
    libraries = {name for name in names if ".so" in Path(name).name}
    for name in sorted(libraries - {KERNELS, BINDING}):
        yield f"`{name}` is a library that nobody declared"


def _kernel_problems(embedded: list[KernelInfo], manifest: Manifest) -> Iterator[str]:
    """Per kernel and target: what is embedded is what is declared, once, with the same resources."""
    found = Counter((kernel.name, str(kernel.arch)) for kernel in embedded)
    declared = {(kernel.symbol, str(kernel.target)): kernel for kernel in manifest.kernels}
    if len(declared) != len(manifest.kernels):
        yield f"{FILE_NAME} declares a kernel twice"
    if not declared:
        yield f"{FILE_NAME} declares no kernel"
    for symbol, target in sorted(declared.keys() - found.keys()):
        yield f"{symbol} for {target} is declared and not embedded"
    for symbol, target in sorted(found.keys() - declared.keys()):
        yield f"{symbol} for {target} is embedded and not declared"
    for (symbol, target), count in sorted(found.items()):
        if count > 1:
            yield f"{symbol} for {target} is embedded {count} times"
    for kernel in embedded:
        record = declared.get((kernel.name, str(kernel.arch)))
        if record is not None:
            yield from _resource_problems(kernel, record)
    targets = {str(arch) for arch in manifest.arch_set.archs}
    for symbol, target in sorted(declared.keys()):
        if target not in targets:
            yield f"{symbol} is for {target}, which the arch set does not list"
    for target in sorted(targets - {target for _, target in found}):
        yield f"nothing is embedded for {target} of the arch set"


def _resource_problems(kernel: KernelInfo, record: KernelRecord) -> Iterator[str]:
    if kernel.arch is not None and kernel.arch.ptx:
        own = [one for one in record.assembled_for if one.target.number == kernel.arch.number]
        if not own:
            yield f"{record.symbol} was not assembled offline for its own number"
        return
    for name, is_, declared in (
        ("registers", kernel.registers, record.registers),
        ("bytes of stack", kernel.stack, record.stack_bytes),
        ("threads", kernel.max_threads, record.threads),
    ):
        if is_ != declared:
            yield f"{record.symbol} has {is_} {name}, declared are {declared}"


def _image_problems(
    images: Iterable[tuple[FatbinEntry, tuple[KernelInfo, ...]]], manifest: Manifest
) -> Iterator[str]:
    """Every image is of a kind we make: known, linked, compressed, PTX with one kernel each."""
    targets = set(manifest.arch_set.archs)
    for entry, kernels in images:
        where = f"image at {entry.payload_offset:#x} ({entry.kind}, {entry.arch})"
        if entry.kind not in {"sass", "ptx"} or entry.arch not in targets or entry.relocatable:
            yield f"{where} is not of the arch set"
        elif entry.codec != "zstd":
            yield f"{where} is stored as {entry.codec}, expected zstd"
        elif entry.kind == "ptx" and len(kernels) != 1:
            yield f"{where} holds {len(kernels)} kernels, a PTX module holds one"


def _linkage_problems(name: str, dynamic: DynamicInfo) -> Iterator[str]:
    binding = name == BINDING
    own = {"libflash_dist_kernels.so", *TORCH_LIBRARIES} if binding else set()
    path = ("$ORIGIN",) if binding else ()
    needed = set(dynamic.needed)
    for library in sorted(needed - SYSTEM_LIBRARIES - own):
        yield f"`{name}` needs {library}, which is not expected"
    for library in sorted(own - needed):
        yield f"`{name}` does not need {library}"
    if dynamic.search_path != path:
        yield f"`{name}` has search path {list(dynamic.search_path)}, expected {list(path)}"
    if not binding:
        strangers = [one for one in dynamic.exports if not one.startswith(EXPORT_PREFIX)]
        if strangers or not dynamic.exports:
            yield f"`{name}` exports {strangers or 'nothing'}, expected {EXPORT_PREFIX}* only"


def _size_of(entry: FatbinEntry, kernels: tuple[KernelInfo, ...]) -> KernelSize:
    names = tuple(kernel.name for kernel in kernels)
    return KernelSize(str(entry.arch), names, entry.compressed_size, entry.uncompressed_size)


def _add_up(images: Iterable[KernelSize]) -> tuple[int, int, int]:
    found = list(images)
    kernels = sum(len(image.kernels) for image in found)
    return len(found), kernels, sum(image.packed for image in found)


def audit_or_raise(path: str | os.PathLike[str], *, budget_bytes: int | None = None) -> AuditResult:
    """Audit a wheel and raise when it fails; for build scripts."""
    result = audit_wheel(path, budget_bytes=budget_bytes)
    if not result:
        message = f"{Path(path).name} fails the audit:\n" + "\n".join(result.problems)
        raise AuditError(message)
    return result


