"""Folders of attention's C++ and CUDA sources."""

from __future__ import annotations

from functools import cache
from typing import Final

from flash_dist.toolkit.make.kernels.table import Table
from flash_dist.toolkit.make.project import ROOT, TOOLKIT

SOURCES: Final = ROOT / "csrc"
TABLE: Final = SOURCES / "kernels.toml"
INCLUDES: Final = (SOURCES, TOOLKIT)  # include folders, besides the folder of generated headers


@cache
def read_table() -> Table:
    """Read the table of the attention kernels."""
    return Table.load(TABLE)
