"""Publication channels in addition to the wheels: one row each, in the order of a release.

To add one, write a module with the interface of `make/wheels/channel.py`, and a row here. The
session, and the entries in the index, manifest.json, SHA256SUMS, the provenance and install_test
follow from the row. A module is loaded on first use, because `nox -l` runs without its
requirements.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast

from ...product import NAME
from ..declared.names import DISTRIBUTION
from ..project import EMBEDDED, MAKE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ..wheels.artefacts import Artefact
    from ..wheels.channel import Channel, Published


@dataclass(frozen=True)
class Row:
    """One channel, described without loading its module."""

    name: str  # also the name of its session and folder, and its `kind` in manifest.json
    module: str
    summary: str  # for `nox -l`
    groups: tuple[str, ...]  # dependency groups of its session
    packed: tuple[str, ...] = ()  # groups to pack: installed into the folder in its argument 1
    files: str = ""  # pattern of its files in dist/; empty: it writes a folder
    released: bool = True  # part of a release; otherwise only a session
    linked: bool = False  # the index copies its folder, and the landing page links to it
    options: tuple[str, ...] = ()  # options of `release` that it accepts
    partial: tuple[str, ...] = ()  # arguments of its session if only some sets were built
    install_test: str = ""  # module of its install test

    def load(self) -> Channel:
        """Return the channel's module."""
        return cast("Channel", importlib.import_module(self.module))


CHANNELS: Final = {
    row.name: row
    for row in (
        Row(
            "sdist",
            f"{MAKE}.building.sdist",
            f"Pack the sources into dist/{NAME}-X.tar.gz, the same bytes each time, and check it.",
            groups=("backend", "sdist"),
            files=f"{NAME}-*.tar.gz",
        ),
        Row(
            "conda",
            f"{MAKE}.conda.channel",
            "Make dist/conda, a conda channel of the wheels in dist/; the solver picks by GPU.",
            groups=("runtime", "index", "conda"),
            linked=True,
            install_test="ci.install_tests.conda",
        ),
        Row(
            "index",
            f"{MAKE}.release.index",
            "Make dist/index, a static package index of the wheels in dist/: `-- --url URL`.",
            groups=("runtime", "index"),
            options=("--url",),
            partial=("--partial",),
        ),
        Row(
            "pypi",
            f"{MAKE}.release.pypi",
            "Make dist/pypi, the wheels of the default sets without a label, and check them: for "
            "PyPI.",
            groups=("backend", "index", "sdist"),
            partial=("--partial",),
        ),
        Row(
            "zipapp",
            f"{MAKE}.release.zipapp",
            f"Build dist/{NAME}.pyz: inspect, audit and doctor's what-if in one file, without "
            "torch.",
            groups=("runtime", "zipapp"),
            packed=("program",),
            files=f"{NAME}.pyz",
        ),
        *(
            Row(
                "toolkit",
                f"{MAKE}.release.toolkit_wheel",
                f"Build dist/toolkit/{DISTRIBUTION}-X.whl, the toolkit by itself, for others.",
                groups=("build", "sdist"),
            )
            for _ in range(EMBEDDED)  # no row in projects that only install the toolkit
        ),
        Row(
            "variants",
            f"{MAKE}.release.variants",
            "Make dist/variants: an index from which uv's preview picks the set for the GPU.",
            groups=("backend", "index"),
            released=False,
        ),
        Row(
            "hub",
            f"{MAKE}.release.hub",
            "Make dist/hub: one repository per wheel, for Hugging Face's `kernels`.",
            groups=("runtime", "index"),
            released=False,
        ),
    )
}


def released() -> list[Row]:
    """Return the channels that are part of a release, in the order of the release."""
    return [row for row in CHANNELS.values() if row.released]


def find_published(
    dist: Path, artefacts: Sequence[Artefact], rows: Sequence[Row]
) -> Iterator[tuple[Row, Published]]:
    """Yield the checked files of some channels, files made from wheels first.

    Raises:
        KernelsError: A channel differs from the output of its session.
    """
    found = [(row, file) for row in rows for file in row.load().check(dist, artefacts)]
    yield from sorted(found, key=lambda pair: pair[1].wheel is None)
