"""The integers that describe a mask to the kernels, defined once for Python and C++.

Operators take a mask as a list of integers. For a band these are BAND_INTS. For other masks they
are SIZES, then each array's offset in one int32 buffer, in the order of ARRAYS. `csrc/headers.py`
runs this file and writes `mask_layout.h`, which the compiler compares with csrc/core/band.h and
csrc/core/params.h. So this file imports nothing from the package.
"""

from __future__ import annotations

from typing import Final

TILE: Final = 64  # queries per tile, and keys per tile

# Kinds of masks.
BAND: Final = 0  # has no arrays
ROWS: Final = 1  # an interval of keys per query
TILES: Final = 2  # lists of visible tiles

# Codes of a tile. A code of 0 or more is an index into the array "bits".
FULL: Final = -1  # all pairs of query and key are visible
EMPTY: Final = -2  # no pair is visible
BY_ROWS: Final = -3  # the array "rows" has the visible keys of each query

ABSENT: Final = -1  # offset of a missing array, slot of an empty tile
ALIGNMENT: Final = 4  # offsets are multiples of this number of int32 values

LINES: Final = (1, 2)  # tiles per line of a list

BAND_INTS: Final = ("kind", "left", "right", "bottom_right")  # left or right -1: unbounded
SIZES: Final = ("kind", "batches", "heads", "seqlen_q", "seqlen_k")

LIST: Final = {"begin": 1, "entries": 4, "slots": 2}  # int32 values per element of a list's arrays

ARRAYS: Final[dict[str, int]] = {  # int32 values per element of a plan's arrays, see plan.py
    "key_bounds": 2,
    "rows": 2,
    "query_ranges": 4,
    "key_ranges": 2,
    "key_slots": 1,
    **{
        f"{axis}_{lines * TILE}_{field}": width
        for axis in ("by_query", "by_key")
        for lines in LINES
        for field, width in LIST.items()
    },
    "bits": 2,
}
