"""`_build.json`: the build's description of this package.

`Manifest.from_json` and `Manifest.to_json` round-trip.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ..binaries.json_text import parse_json
from ..errors import ManifestError
from ..product import NAME, PLACEHOLDER, PRODUCT
from ..targets.archs import DEFAULT_MACHINE, DEFAULT_TOOLKIT, SESSIONS, Arch, ArchSet
from ..targets.axes import AXES, NOWHERE, Axes, Place
from ..targets.compatibility import Origin
from ..targets.devices import ANY_GPU, Device, parse_version
from ..targets.fallbacks import Fallbacks, read_names
from ..targets.verdict import OLDEST, Build, Variant
from .package import PACKAGE, UNBUILT_HINT

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

VERSION: Final = 1
FILE_NAME: Final = "_build.json"

# Flags of our builds that compress images, each with its codec.
CODECS: Final = {"--compress-mode=size": "zstd", "-Xfatbin=-compress-all": "lz4"}

T = TypeVar("T")


@dataclass(frozen=True)
class ToolkitInfo:
    """The CUDA toolkit that compiled the kernels."""

    cuda: str  # such as 13.0
    nvcc: str  # such as 13.0.88
    ptxas: str
    driver_min: str  # first driver branch that loads the SASS, such as 580
    ptx_isa: str  # such as 9.0


@dataclass(frozen=True)
class HostInfo:
    """Compiler and C library of the machine that compiled the host code."""

    compiler: str
    glibc: str


@dataclass(frozen=True)
class Part:
    """A third-party component of the build, such as the static CUDA runtime or torch's headers."""

    name: str
    version: str
    how: str  # static: a linked archive; header-only; compiled-in: added by nvcc
    license: str  # an SPDX expression, or the name of a licence without one
    package: str = ""  # its name on PyPI
    sha256: str = ""  # hash of the static archive


@dataclass(frozen=True)
class TargetInfo:
    """A target of the package, and how its kernels were tested."""

    target: Arch
    proof: str  # native: ran on its GPU; jit: its PTX ran on a newer GPU; assembled: never ran


@dataclass(frozen=True)
class Assembled:
    """A PTX kernel that ptxas assembled for one target at build time."""

    target: Arch
    registers: int
    spill_bytes: int


@dataclass(frozen=True)
class KernelRecord:
    """One kernel variant, with the resources that its compiled code uses."""

    symbol: str
    family: str
    place: Place  # in JSON, each value has the name of its axis
    target: Arch
    registers: int | None  # None for PTX, see assembled_for
    spill_bytes: int | None
    stack_bytes: int | None
    static_smem: int | None  # bytes per block
    dynamic_smem: int  # bytes per block
    threads: int | None  # maximum per block; None: a plain kernel without launch bounds
    proof: str
    assembled_for: tuple[Assembled, ...] = ()
    source: str = ""  # the generated file, compiled for this target alone; or the plain file
    role: str = ""  # what the kernel computes; several families may serve a role

    @property
    def is_plain(self) -> bool:
        """Tell if the kernel is in a plain .cu file, which has neither a table nor axes."""
        return self.place == NOWHERE


@dataclass(frozen=True)
class Manifest:
    """The contents of `_build.json`."""

    package_version: str
    arch_set: ArchSet
    archsets: tuple[ArchSet, ...]  # all published sets, from which doctor names the right one
    toolkit: ToolkitInfo
    host: HostInfo
    flags: tuple[str, ...]
    torch_headers: str  # version of torch whose headers the binding was compiled with
    torch_min: str  # oldest supported version
    torch_tested_max: str  # newest tested version
    targets: tuple[TargetInfo, ...]
    kernels: tuple[KernelRecord, ...]
    sources: str = ""  # hash of the files that the libraries were compiled from
    parts: tuple[Part, ...] = ()
    files: tuple[str, ...] = ()  # files of the package, except the libraries and this manifest
    fallbacks: Fallbacks | None = None  # None in manifests of earlier builds
    product: str = NAME
    axes: Axes = AXES
    index: str = PRODUCT.index  # address of the package index that holds the releases
    oldest_gpu: Device = OLDEST  # the lowest supported compute capability
    libraries: tuple[str, ...] = PRODUCT.libraries  # file names in the package
    dependencies: tuple[str, ...] = ()  # in addition to torch and `linkage.REQUIREMENTS`
    scripts: tuple[str, ...] = ()  # lines such as `my-norms = my_norms.__main__:run`
    # Plug-ins: lines of the same form, keyed by entry point group.
    entry_points: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    licenses: tuple[str, ...] = ()  # license files in the dist-info

    @classmethod
    def from_json(cls, data: object) -> Manifest:
        """Return the manifest in parsed JSON; raise ManifestError if the JSON is malformed."""
        if not isinstance(data, dict):
            message = f"the manifest is not an object but {type(data).__name__}"
            raise ManifestError(message)
        version = data.get("version")
        if version != VERSION:
            message = f"the manifest must have version {VERSION}, got {version!r}"
            raise ManifestError(message)
        try:
            product = data["product"]
            axes = Axes.from_json(product["axes"])
            return cls(
                package_version=str(data["package_version"]),
                arch_set=_read_archset(data["arch_set"]),
                archsets=tuple(_read_archset(one) for one in data["archsets"]),
                toolkit=_read(ToolkitInfo, data["toolkit"]),
                host=_read(HostInfo, data["host"]),
                flags=tuple(map(str, data["flags"])),
                torch_headers=str(data["torch_headers"]),
                torch_min=str(data["torch_min"]),
                torch_tested_max=str(data["torch_tested_max"]),
                targets=tuple(_read(TargetInfo, one) for one in data["targets"]),
                kernels=tuple(_read_kernel(one, axes) for one in data["kernels"]),
                sources=str(data.get("sources", "")),
                parts=tuple(_read(Part, one) for one in data.get("parts", ())),
                files=tuple(map(str, data.get("files", ()))),
                fallbacks=Fallbacks.from_json(told) if (told := data.get("fallbacks")) else None,
                product=str(product["name"]),
                axes=axes,
                index=str(product.get("index") or f"{PLACEHOLDER}{product['name']}/"),
                oldest_gpu=Device.parse(told) if (told := product.get("oldest_gpu")) else ANY_GPU,
                libraries=read_names("libraries", product["libraries"]),
                dependencies=read_names("dependencies", product["dependencies"]),
                scripts=read_names("scripts", product["scripts"]),
                entry_points={
                    str(group): read_names("entry_points", lines)
                    for group, lines in product.get("entry_points", {}).items()
                },
                licenses=read_names("licenses", product["licenses"]),
            )
        except KeyError as error:
            message = f"the manifest lacks {error}"
            raise ManifestError(message) from error
        except (AttributeError, TypeError, ValueError) as error:
            message = f"the manifest is malformed: {error}"
            raise ManifestError(message) from error

    @classmethod
    def from_text(cls, text: str, *, source: object) -> Manifest:
        """Parse the file's text; the error for text that is not JSON names `source`."""
        try:
            data = parse_json(text)
        except (ValueError, RecursionError) as error:
            message = f"`{source}` is not JSON: {error}"
            raise ManifestError(message) from error
        return cls.from_json(data)

    def to_json(self) -> dict[str, Any]:
        """Return the file's content as plain data."""
        return {
            "version": VERSION,
            "product": {
                "name": self.product,
                "axes": self.axes.to_json(),
                "index": self.index,
                **({"oldest_gpu": str(self.oldest_gpu)} if self.oldest_gpu > ANY_GPU else {}),
                "libraries": list(self.libraries),
                "dependencies": list(self.dependencies),
                "scripts": list(self.scripts),
                "entry_points": {group: list(lines) for group, lines in self.entry_points.items()},
                "licenses": list(self.licenses),
            },
            "package_version": self.package_version,
            "arch_set": self.arch_set.to_json(),
            "archsets": [one.to_json() for one in self.archsets],
            "toolkit": asdict(self.toolkit),
            "host": asdict(self.host),
            "flags": list(self.flags),
            "torch_headers": self.torch_headers,
            "torch_min": self.torch_min,
            "torch_tested_max": self.torch_tested_max,
            "sources": self.sources,
            "parts": [asdict(one) for one in self.parts],
            "files": list(self.files),
            "targets": [_write(one) for one in self.targets],
            "kernels": [_write_kernel(one, self.axes) for one in self.kernels],
            "fallbacks": self.fallbacks.to_json() if self.fallbacks else None,
        }

    def to_text(self) -> str:
        """Return the file's text, one line per target and kernel; the same for equal manifests."""
        data = self.to_json()
        lists = {name: data.pop(name) for name in ("targets", "kernels")}
        text = json.dumps(data, indent=1).removesuffix("\n}")
        for name, entries in lists.items():
            lines = ",\n  ".join(json.dumps(entry) for entry in entries)
            text += f',\n "{name}": [\n  {lines}\n ]'
        return text + "\n}\n"


def load_manifest(package: Path = PACKAGE) -> Manifest:
    """Read the manifest of the installed package.

    Raises:
        ManifestError: The manifest is absent (an unbuilt source tree), unreadable or malformed.
    """
    path = package / FILE_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        message = f"`{package}` has no {FILE_NAME}: the package was not built"
        raise ManifestError(message, hint=UNBUILT_HINT) from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        message = f"`{path}` cannot be read: {reason}"
        raise ManifestError(message) from error
    return Manifest.from_text(text, source=path)


def declare_build(manifest: Manifest) -> Build:
    """Return the build that a manifest declares, which the rules of `targets/` judge."""
    codec = next((CODECS[flag] for flag in manifest.flags if flag in CODECS), "none")
    origin = Origin(manifest.toolkit.cuda, parse_version(manifest.toolkit.ptx_isa), codec)
    axes = manifest.axes
    variants = tuple(
        Variant.of(
            one.symbol, one.family, one.place, one.target, axes=axes, origin=origin, proof=one.proof
        )
        for one in manifest.kernels
    )
    name = f"{manifest.product} {manifest.package_version}"
    machine = manifest.arch_set.machine
    archsets = tuple(one for one in manifest.archsets if one.machine == machine)
    toolkit, facts = manifest.toolkit.cuda, manifest.fallbacks
    product = axes, manifest.oldest_gpu, manifest.index
    return Build(name, variants, archsets, toolkit, facts, *product)


_FLAT: Final[dict[str, type | tuple[type, ...]]] = {
    "str": str,
    "int": int,
    "int | None": (int, type(None)),
}


def _read(kind: type[T], data: dict[str, Any]) -> T:
    """Build a flat dataclass. Unknown keys are ignored: newer versions may write them."""
    told = {field.name: str(field.type) for field in fields(kind)}  # type: ignore[arg-type]
    known = {name: data[name] for name in told if name in data}
    for name, value in known.items():
        wanted = _FLAT.get(told[name])
        if wanted and not isinstance(value, wanted):
            message = f"`{name}` must be {told[name]}, got {value!r:.60}"
            raise TypeError(message)
    if "target" in known:
        known["target"] = Arch.parse(str(known["target"]))
    return kind(**known)


def _read_kernel(data: dict[str, Any], axes: Axes) -> KernelRecord:
    assembled = tuple(_read(Assembled, one) for one in data.get("assembled_for", ()))
    target = Arch.parse(str(data["target"]))
    given = {**data, "target": target, "place": axes.place(data), "assembled_for": assembled}
    return _read(KernelRecord, given)


def _read_archset(data: dict[str, Any]) -> ArchSet:
    name, label = str(data["name"]), str(data["label"])
    parsed = ArchSet.parse(str(data["archs"]), name=name, label=label)
    machine = str(data.get("machine", DEFAULT_MACHINE))
    if machine not in SESSIONS:
        message = f"a machine must be {' or '.join(SESSIONS)}, got `{machine}`"
        raise ValueError(message)
    return replace(
        parsed,
        who=str(data.get("who", "")),
        toolkit=str(data.get("toolkit", DEFAULT_TOOLKIT)),
        machine=machine,
    )


def _write_kernel(record: KernelRecord, axes: Axes) -> dict[str, Any]:
    own = _write(record)
    names = {name: own.pop(name) for name in ("symbol", "family")}
    del own["place"]
    assembled = [_write(one) for one in record.assembled_for]
    return {**names, **axes.describe(record.place), **own, "assembled_for": assembled}


def _write(record: TargetInfo | KernelRecord | Assembled) -> dict[str, Any]:
    data = {field.name: getattr(record, field.name) for field in fields(record)}
    return {**data, "target": str(record.target)}
