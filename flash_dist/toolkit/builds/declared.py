"""Converts a manifest into the build that the rules of `targets/` judge."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..targets.compatibility import Origin
from ..targets.devices import parse_version
from ..targets.verdict import Build, Variant

if TYPE_CHECKING:
    from .manifest import Manifest

# The flags of our builds that compress images.
CODECS = {"--compress-mode=size": "zstd", "-Xfatbin=-compress-all": "lz4"}


def declare_build(manifest: Manifest) -> Build:
    """Return the build that a manifest declares."""
    codec = next((CODECS[flag] for flag in manifest.flags if flag in CODECS), "none")
    origin = Origin(manifest.toolkit.cuda, parse_version(manifest.toolkit.ptx_isa), codec)
    variants = tuple(
        Variant.of(
            kernel.symbol,
            kernel.family,
            kernel.place,
            kernel.target,
            axes=manifest.axes,
            origin=origin,
            proof=kernel.proof,
        )
        for kernel in manifest.kernels
    )
    name = f"{manifest.product} {manifest.package_version}"
    machine = manifest.arch_set.machine
    archsets = tuple(one for one in manifest.archsets if one.machine == machine)
    toolkit, facts = manifest.toolkit.cuda, manifest.fallbacks
    product = manifest.axes, manifest.oldest_gpu, manifest.index
    return Build(name, variants, archsets, toolkit, facts, *product)
