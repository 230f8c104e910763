"""Compact form of a build's kernels and a library's images in a record: each item appears once."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from ..gpucode.images import FatbinEntry, FatbinReport, Kind
from ..machine.installed import parse_symbol
from ..product import SYMBOLS
from ..targets.archs import Arch
from ..targets.axes import AXES, Place
from ..targets.compatibility import DEFAULT_ORIGIN, Origin
from ..targets.verdict import Build, Variant

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ..binaries.codecs import Codec
    from ..targets.archs import ArchSet
    from ..targets.fallbacks import Fallbacks
    from ..targets.gpus import Version

_MOST_VARIANTS: Final = 10_000
_MOST_IMAGES: Final = 200_000
_OWN: Final = ("symbol", "family", "arch", "origin", "proof")  # fields other than the axes


class _Flat:
    """A variant with its axes as separate fields."""

    @classmethod
    def fold(cls, variant: Variant) -> Any:  # noqa: ANN401 - a class made below
        """Move the axes into separate fields."""
        place = Place(variant.key.words, variant.key.sizes, variant.plan)
        return cls(**AXES.describe(place), **{name: getattr(variant, name) for name in _OWN})

    def unfold(self) -> Variant:
        """Collect the axes from their fields.

        Raises:
            ValueError: Some axes have a value and others have none.
        """
        told = {name: value for name, value in vars(self).items() if value is not None}
        try:
            place = AXES.place(told)
        except KeyError as error:
            message = f"must have a value of the axis `{error.args[0]}`"
            raise ValueError(message) from error
        facts = {"origin": told["origin"], "proof": told["proof"]}
        return Variant.of(told["symbol"], told["family"], place, told["arch"], **facts)


def _flat_fields() -> Iterator[Any]:
    yield from (("symbol", str), ("family", str), ("arch", Arch))
    yield ("origin", Origin, DEFAULT_ORIGIN)
    yield ("proof", str, "")
    for axis in AXES.every:
        if axis.rule != "last":
            # The value is None if the kernel has no axes, or no value for this one.
            yield (axis.name, str | None if axis.rule == "equal" else int | None, None)


FoldedVariant = make_dataclass(
    "FoldedVariant", _flat_fields(), bases=(_Flat,), frozen=True, kw_only=True
)


@dataclass(frozen=True)
class FoldedKernels:
    """Kernels that exist for the same targets; `names` are symbols without prefix and target."""

    targets: tuple[Arch, ...]
    names: tuple[str, ...]
    origin: Origin = DEFAULT_ORIGIN
    proof: str = ""

    def unfold(self) -> Iterable[Variant]:
        """Yield each kernel of each target.

        Raises:
            ValueError: A name is not the name of a kernel.
        """
        for arch in self.targets:
            for name in self.names:
                variant = parse_symbol(f"{SYMBOLS}{name}_{arch.identifier}", arch, self.origin)
                if variant is None:
                    message = f"must hold names such as `fwd_bf16_d64_smem64`, got `{name[:60]}`"
                    raise ValueError(message)
                yield replace(variant, proof=self.proof)


@dataclass(frozen=True)
class FoldedBuild:
    """A build; `others` has the kernels whose symbols do not contain all their data."""

    name: str
    kernels: tuple[FoldedKernels, ...]
    others: tuple[Variant, ...] = ()
    archsets: tuple[ArchSet, ...] = ()
    toolkit: str | None = None
    fallbacks: Fallbacks | None = None

    @classmethod
    def fold(cls, build: Build) -> FoldedBuild:
        """Return the compact form of a build: kernels with the same targets share an entry."""
        plain = [variant for variant in build.variants if _is_told(variant)]
        others = tuple(variant for variant in build.variants if not _is_told(variant))
        by_target: dict[tuple[Arch, Origin, str], list[str]] = {}
        for one in plain:
            by_target.setdefault((one.arch, one.origin, one.proof), []).append(_name(one))
        alike: dict[tuple[Origin, str, tuple[str, ...]], list[Arch]] = {}
        for (arch, origin, proof), names in by_target.items():
            alike.setdefault((origin, proof, tuple(names)), []).append(arch)
        kernels = tuple(
            FoldedKernels(tuple(targets), names, origin, proof)
            for (origin, proof, names), targets in alike.items()
        )
        facts = build.archsets, build.toolkit, build.told_fallbacks
        return cls(build.name, kernels, others, *facts)

    def unfold(self) -> Build:
        """Return the build.

        Raises:
            ValueError: There are more kernels than in any real build, or a name is malformed.
        """
        count = sum(len(one.targets) * len(one.names) for one in self.kernels)
        if count + len(self.others) > _MOST_VARIANTS:
            message = f"must hold at most {_MOST_VARIANTS} variants of kernels, got more"
            raise ValueError(message)
        variants = tuple(variant for one in self.kernels for variant in one.unfold())
        facts = self.archsets, self.toolkit, self.fallbacks
        return Build(self.name, (*variants, *self.others), *facts)


def _name(variant: Variant) -> str:
    return variant.symbol.removeprefix(SYMBOLS).removesuffix(f"_{variant.arch.identifier}")


def _is_told(variant: Variant) -> bool:
    """Tell if the symbol contains all data of a variant except its proof."""
    symbol = f"{SYMBOLS}{_name(variant)}_{variant.arch.identifier}"
    told = parse_symbol(symbol, variant.arch, variant.origin)
    return told is not None and replace(told, proof=variant.proof) == variant


@dataclass(frozen=True)
class FoldedImage:
    """The parts of an image that decide where it runs, named as in FatbinEntry."""

    kind: Kind
    arch: Arch | None = None
    codec: Codec = "none"
    ptx_isa: Version | None = None
    section: str = ".nv_fatbin"
    raw_number: int = 0
    code_version: Version | None = None
    toolkit: str = ""

    @classmethod
    def of_entry(cls, entry: FatbinEntry) -> FoldedImage:
        """Return the image of an entry, without sizes and offsets."""
        return cls(**{name: getattr(entry, name) for name in cls.__dataclass_fields__})

    def to_entry(self, container: int) -> FatbinEntry:
        """Return the image in a container, with sizes and offsets of 0."""
        return FatbinEntry(
            **{name: getattr(self, name) for name in self.__dataclass_fields__},
            payload_offset=0,
            compressed_size=0,
            uncompressed_size=0,
            container=container,
            identifier="",
            raw_kind=0,
            raw_version=0,
            raw_flags=0,
        )


@dataclass(frozen=True)
class FoldedContainers:
    """Containers with the same images, and how many there are."""

    count: int
    images: tuple[FoldedImage, ...]
    device_linked: bool | None = None


@dataclass(frozen=True)
class FoldedReport:
    """The GPU code of a library."""

    path: str
    containers: tuple[FoldedContainers, ...] = ()

    @classmethod
    def fold(cls, report: FatbinReport) -> FoldedReport:
        """Return the report with identical containers counted instead of repeated."""
        counts: dict[tuple[tuple[FoldedImage, ...], bool | None], int] = {}
        linked = report.device_linked
        by_container: dict[int, list[FoldedImage]] = {}
        for entry in report.entries:
            by_container.setdefault(entry.container, []).append(FoldedImage.of_entry(entry))
        for number, images in by_container.items():
            key = tuple(images), None if linked is None else number in linked
            counts[key] = counts.get(key, 0) + 1
        return cls(
            report.path, tuple(FoldedContainers(count, *key) for key, count in counts.items())
        )

    def unfold(self) -> FatbinReport:
        """Return the report.

        Raises:
            ValueError: There are more images than in any real library.
        """
        if sum(one.count * len(one.images) for one in self.containers) > _MOST_IMAGES:
            message = f"must hold at most {_MOST_IMAGES} images, got more"
            raise ValueError(message)
        kinds = [one for one in self.containers for _ in range(one.count if one.images else 0)]
        entries = tuple(
            image.to_entry(number) for number, one in enumerate(kinds) for image in one.images
        )
        known = any(one.device_linked is not None for one in kinds)
        linked = frozenset(number for number, one in enumerate(kinds) if one.device_linked)
        return FatbinReport(self.path, entries, device_linked=linked if known else None)
