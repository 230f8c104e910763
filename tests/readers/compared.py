"""Compares our reading of a file with cuobjdump's: images, their bytes, their kernels."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING

from flash_dist.toolkit.gpucode.libraries import Library, open_libraries
from tests.readers.tools import Resources, extract_images, list_images, list_resources

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from flash_dist.toolkit.gpucode.fatbin import Fatbin
    from flash_dist.toolkit.gpucode.images import FatbinEntry


class Ours:
    """Everything that we read of a file, including members of an archive."""

    def __init__(self, path: Path) -> None:
        self.entries: list[FatbinEntry] = []
        self.digests: list[str] = []
        self.kernels: Counter[Resources] = Counter()
        self.warnings: list[str] = []
        for item in open_libraries(path):
            assert isinstance(item, Library), item
            self._read(item.fatbin)

    def _read(self, fatbin: Fatbin) -> None:
        self.warnings += fatbin.report.warnings
        for entry in fatbin.report.entries:
            self.entries.append(entry)
            if entry.kind not in {"sass", "ptx"}:
                continue
            self.digests.append(digest(fatbin.payload(entry)))
            if entry.kind == "sass":
                self.kernels.update(
                    Resources(
                        str(entry.arch),
                        kernel.name,
                        kernel.registers,
                        kernel.stack,
                        kernel.static_smem,
                    )
                    for kernel in fatbin.kernels(entry)
                )

    @property
    def images(self) -> Counter[tuple[str, str]]:
        """The number of images by kind and target, in the form of cuobjdump's lists."""
        kinds = {"sass": "cubin", "ptx": "ptx"}
        return Counter(
            (kinds[entry.kind], their_target(entry))
            for entry in self.entries
            if entry.kind in kinds
        )

    @property
    def codecs(self) -> dict[str, set[str]]:
        """The codecs of the images of each kind."""
        found: dict[str, set[str]] = {}
        for entry in self.entries:
            found.setdefault(entry.kind, set()).add(entry.codec)
        return found


def their_target(entry: FatbinEntry) -> str:
    """Return a target as cuobjdump names it: `sm_` also for PTX, and no suffix `f` for SASS."""
    name = str(entry.arch).replace("compute_", "sm_")
    return name.removesuffix("f") if entry.kind == "sass" else name


def digest(image: bytes) -> str:
    """Hash an image; cuobjdump omits the NUL at the end of PTX."""
    return hashlib.sha256(image.rstrip(b"\0")).hexdigest()


def compare(path: Path, folder: Path) -> Ours:
    """Fail unless images, bytes and kernels of a file equal cuobjdump's."""
    ours = Ours(path)
    assert ours.warnings == []
    assert ours.images == list_images(path)
    assert sorted(ours.digests) == sorted(map(digest, extract_images(path, folder)))
    compare_kernels(ours.kernels, list_resources(path))
    return ours


def compare_kernels(ours: Counter[Resources], theirs: Counter[Resources]) -> None:
    """Fail unless our kernels equal cuobjdump's, which also lists device functions."""
    assert not ours - theirs
    functions = {one.name for one in theirs - ours}
    assert functions.isdisjoint(one.name for one in ours)


def names(kernels: Iterable[Resources]) -> set[str]:
    """Return the names of the kernels."""
    return {kernel.name for kernel in kernels}
