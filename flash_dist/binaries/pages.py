"""The memory of a mapped file: pages that were read and are not needed again are given back."""

from __future__ import annotations

import mmap
from typing import Final

IMAGES_BETWEEN: Final = 128  # reading one header maps its neighbours too, up to 128 KiB


def release_pages(data: mmap.mmap) -> None:
    """Take a file's pages out of this process; the system keeps them and maps them when read."""
    if hasattr(data, "madvise"):
        data.madvise(mmap.MADV_DONTNEED)
