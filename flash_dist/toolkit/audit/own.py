"""Checks a wheel's `_build.json` against the name, the GPU code and the libraries of the wheel.

The audit fails closed: anything unreadable or unexpected is a problem.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from ..builds.contents import Image, WheelContents, read_contents
from ..builds.linkage import expected_linkage
from ..builds.metadata import ANY_PYTHON
from ..findings.audits import (
    AUDIT_EMBEDDED_DIFFERS,
    AUDIT_IMAGE_UNEXPECTED,
    AUDIT_LINKAGE,
    AUDIT_MANIFEST,
    AUDIT_NOT_UNDERSTOOD,
    AUDIT_RESOURCES_DIFFER,
    AUDIT_TOO_LARGE,
    AUDIT_WHEEL_NAME,
)
from ..findings.result import Finding, label
from ..product import BINDING
from ..targets.fallbacks import Fallbacks

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from ..builds.manifest import KernelRecord, Manifest
    from ..gpucode.cubin import KernelInfo

_GENCODE = "-gencode="
_ANY = "of another role"  # ends a message: no kernel of any role can replace the missing one


@dataclass(frozen=True)
class TargetSize:
    """Size of the images for one target in all libraries of a wheel."""

    target: str
    kernels: int
    images: int
    packed: int  # compressed bytes in the libraries
    unpacked: int  # bytes after decompression


@dataclass(frozen=True)
class AuditResult:
    """Findings of the audit of one wheel."""

    contents: WheelContents
    budget_bytes: int | None  # maximum size of the wheel; None: no limit
    problems: tuple[Finding, ...]

    def __bool__(self) -> bool:
        return not self.problems

    def target_sizes(self) -> tuple[TargetSize, ...]:
        """Return the sizes of the images summed by target, oldest target first."""
        groups: defaultdict[str, list[Image]] = defaultdict(list)
        for image in sorted(self.contents.images, key=_by_number):
            groups[str(image.entry.arch)].append(image)
        return tuple(_add_up(target, images) for target, images in groups.items())

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {
            "version": 1,
            "passed": bool(self),
            "path": self.contents.path,
            "package_version": self.contents.manifest.package_version,
            "bytes": self.contents.size,
            "budget_bytes": self.budget_bytes,
            "targets": [vars(size) for size in self.target_sizes()],
            "kernels": [kernel.to_json() for kernel in self.contents.kernels],
            "problems": [str(problem) for problem in self.problems],
            "findings": [problem.to_json() for problem in self.problems],
        }


def audit_wheel(path: str | os.PathLike[str], *, budget_bytes: int | None = None) -> AuditResult:
    """Read a wheel and compare it with its own manifest.

    Args:
        path: The wheel.
        budget_bytes: Largest file size that passes.

    Raises:
        KernelsError: The file is not a wheel with a manifest, or cannot be read.
    """
    return audit_contents(read_contents(path), budget_bytes=budget_bytes)


def audit_contents(contents: WheelContents, *, budget_bytes: int | None = None) -> AuditResult:
    """Compare a wheel's contents with its manifest."""
    unclear = (f"the fat binary is not fully understood: {text}" for text in contents.warnings)
    problems = [
        *label(AUDIT_NOT_UNDERSTOOD, unclear),
        *label(AUDIT_WHEEL_NAME, _name_problems(contents)),
        *label(AUDIT_MANIFEST, _declared_problems(contents.manifest)),
        *label(AUDIT_EMBEDDED_DIFFERS, _embedded_problems(contents)),
        *label(AUDIT_RESOURCES_DIFFER, _resource_problems(contents)),
        *label(AUDIT_IMAGE_UNEXPECTED, _image_problems(contents)),
        *label(AUDIT_LINKAGE, _linkage_problems(contents)),
    ]
    if budget_bytes is not None and contents.size > budget_bytes:
        sentence = f"the wheel has {contents.size:,} bytes, the budget is {budget_bytes:,}"
        problems.append(Finding(AUDIT_TOO_LARGE, sentence))
    return AuditResult(contents, budget_bytes, tuple(problems))


def _name_problems(contents: WheelContents) -> Iterator[str]:
    """Check the versions in file name, METADATA and manifest, the version's label, and the tags."""
    manifest = contents.manifest
    try:
        _, version, _, tags = parse_wheel_filename(contents.file_name)
    except InvalidWheelFilename as error:
        yield str(error)
        return
    told = {str(version), contents.metadata_version, manifest.package_version}
    if len(told) != 1:
        yield f"file name, METADATA and manifest have different versions: {sorted(told)}"
    local = manifest.package_version.partition("+")[2]  # empty: built from an sdist
    label = local.partition(".")[2]
    if local and label != manifest.arch_set.label:
        yield f"the version's label is `{label}`, the arch set's is `{manifest.arch_set.label}`"
    for tag in tags:
        if (tag.interpreter, tag.abi) != ANY_PYTHON or "manylinux_2_" not in tag.platform:
            yield f"the tag is {tag}, expected {'-'.join(ANY_PYTHON)}-manylinux_2_*"


def _declared_problems(manifest: Manifest) -> Iterator[str]:
    """Check that no kernel is declared twice, and that the targets are those of the arch set."""
    symbols = Counter((kernel.symbol, kernel.target) for kernel in manifest.kernels)
    yield from (
        f"{one} is declared {n} times for {arch}"
        for (one, arch), n in sorted(symbols.items())
        if n > 1
    )
    tables = Counter(one.symbol for one in manifest.kernels if not one.is_plain)
    yield from (f"{one} is declared {n} times" for one, n in sorted(tables.items()) if n > 1)
    targets = {kernel.target for kernel in manifest.kernels}
    for arch in sorted(targets - set(manifest.arch_set.archs)):
        yield f"kernels are declared for {arch}, which the arch set does not list"
    for arch in sorted(set(manifest.arch_set.archs) - targets):
        yield f"no kernel is declared for {arch} of the arch set"
    if {one.target for one in manifest.targets} != set(manifest.arch_set.archs):
        yield "the manifest's targets are not those of its arch set"
    told = [flag for flag in manifest.flags if flag.startswith(_GENCODE)]
    if told != list(manifest.arch_set.gencode_flags):
        yield f"the manifest's flags are for other targets than its arch set: {' '.join(told)}"
    yield from _role_problems(manifest)


def _role_problems(manifest: Manifest) -> Iterator[str]:
    """Check that each kernel has its family's role, and that its fallback kernels exist."""
    roles = {one.family: manifest.axes.role_of(one.family) for one in manifest.kernels}
    stand_ins = (manifest.fallbacks or Fallbacks.infer(roles)).stand_ins
    general = [one for one in manifest.kernels if one.family == roles[one.family]]
    served = {(one.family, one.place.words, one.target) for one in general}
    served |= {(_ANY, one.place.words, one.target) for one in general}
    for one in manifest.kernels:
        role = roles[one.family]
        if one.is_plain:  # a plain .cu file has no fallback
            continue
        if one.role not in {"", role}:
            yield f"{one.symbol} is declared for the role {one.role}, its family is for {role}"
        for needed in stand_ins.get(role, (role,)) or (_ANY,):
            if (needed, one.place.words, one.target) not in served:
                yield f"{one.symbol} has no kernel of the family {needed} to fall back on"


def _embedded_problems(contents: WheelContents) -> Iterator[str]:
    """Check that each kernel is embedded as declared, once per target."""
    found = Counter((kernel.name, str(kernel.arch)) for kernel in contents.kernels)
    declared = {(kernel.symbol, str(kernel.target)) for kernel in contents.manifest.kernels}
    for symbol, target in sorted(declared - found.keys()):
        yield f"{symbol} for {target} is declared but not embedded"
    for symbol, target in sorted(found.keys() - declared):
        yield f"{symbol} for {target} is embedded but not declared"
    for (symbol, target), count in sorted(found.items()):
        if count > 1:
            yield f"{symbol} for {target} is embedded {count} times"


def _resource_problems(contents: WheelContents) -> Iterator[str]:
    """Check that registers, stack and threads are as declared."""
    declared = {(one.symbol, one.target): one for one in contents.manifest.kernels}
    for kernel in contents.kernels:
        record = declared.get((kernel.name, kernel.arch)) if kernel.arch else None
        if record is not None:
            yield from _compare(kernel, record)


def _compare(kernel: KernelInfo, record: KernelRecord) -> Iterator[str]:
    if record.target.ptx:
        if all(one.target.number != record.target.number for one in record.assembled_for):
            yield f"{record.symbol} was not assembled offline for its own number"
        return
    for name, found, told in (
        ("registers", kernel.registers, record.registers),
        ("bytes of stack", kernel.stack, record.stack_bytes),
        ("threads at most", kernel.max_threads, record.threads),
    ):
        if found != told:
            yield f"{record.symbol} has {found} {name}, the manifest says {told}"


def _image_problems(contents: WheelContents) -> Iterator[str]:
    """Check each image: its target, its compression and, for PTX, its number of kernels."""
    targets = set(contents.manifest.arch_set.archs)
    codec = expected_linkage(contents.manifest).codec
    plain = {one.symbol for one in contents.manifest.kernels if one.is_plain}
    for image in contents.images:
        entry = image.entry
        where = f"the image at {entry.payload_offset:#x} ({entry.kind}, {entry.arch})"
        if entry.kind not in {"sass", "ptx"} or entry.arch not in targets or entry.relocatable:
            yield f"{where} is not of the arch set"
        elif entry.codec != codec:
            yield f"{where} is stored as {entry.codec}, expected {codec}"
        elif entry.kind == "ptx" and len(image.kernels) != 1 and not _is_plain(image, plain):
            yield f"{where} holds {len(image.kernels)} kernels, a PTX module holds one"


def _is_plain(image: Image, plain: set[str]) -> bool:
    """Tell if an image comes from a plain .cu file, whose PTX holds all kernels of the file."""
    return {kernel.name for kernel in image.kernels} <= plain


def _linkage_problems(contents: WheelContents) -> Iterator[str]:
    """Check the needs, search path and exports of each library, and that no library was added."""
    for name in sorted(set(contents.libraries) - contents.linkage.keys()):
        yield f"`{name}` is a library that is not declared"
    manifest, expected = contents.manifest, expected_linkage(contents.manifest)
    with_kernels = {image.library for image in contents.images}
    for name, dynamic in contents.linkage.items():
        file, kernels = Path(name).name, name in with_kernels
        own = expected.needs(file, manifest, kernels=kernels)
        path = expected.path(file, kernels=kernels)
        needed = set(dynamic.needed)
        for library in sorted(needed - expected.system - own):
            yield f"`{name}` needs {library}, which is not expected"
        for library in sorted(own - needed):
            yield f"`{name}` does not need {library}"
        if dynamic.search_path != path:
            yield f"`{name}` searches {list(dynamic.search_path)}, expected {list(path)}"
        exports = dynamic.exports
        strangers = [one for one in exports if not one.startswith(f"{manifest.product}_")]
        if strangers or not (exports or file == BINDING):  # the binding needs no exports
            yield f"`{name}` exports {strangers or 'nothing'}, expected {manifest.product}_* only"


def _by_number(image: Image) -> tuple[int, str]:
    return image.entry.raw_number, str(image.entry.arch)


def _add_up(target: str, images: list[Image]) -> TargetSize:
    return TargetSize(
        target=target,
        kernels=sum(len(image.kernels) for image in images),
        images=len(images),
        packed=sum(image.entry.compressed_size for image in images),
        unpacked=sum(image.entry.uncompressed_size for image in images),
    )


def describe_failure(result: AuditResult) -> str:
    """Return a text that names the wheel and every problem."""
    name = Path(result.contents.path).name
    return "\n".join([f"{name} fails the audit:", *(f"  {one}" for one in result.problems)])
