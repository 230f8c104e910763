"""Generate the headers that only the attention kernels need; the toolkit generates the others.

wgmma_shapes.h    wrappers of Hopper's wgmma instructions, which name each register of an operand
mask_layout.h     the layout of a mask's integers and arrays, from flash_dist/masks/layout.py
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LAYOUT: Final = Path(__file__).resolve().parents[1] / "flash_dist" / "masks" / "layout.py"
WGMMA_COLUMNS: Final = (
    32,
    48,
    64,
    80,
    96,
    112,
    128,
    192,
    256,
)  # values of N, the number of columns of D


def headers() -> dict[str, str]:
    """Return a map from the name of each header to its text."""
    return {
        "wgmma_shapes.h": render_wgmma_shapes(),
        "mask_layout.h": render_mask_layout(load_layout()),
    }


def render_wgmma_shapes() -> str:
    """Return the header with the wgmma wrappers that ptx/wgmma.cuh includes."""
    lines = ["#pragma once", "", "#include <type_traits>", "", "namespace flash_dist {", ""]
    for in_registers in (False, True):
        flags = "bool TRANSPOSED_B" if in_registers else "bool TRANSPOSED_A, bool TRANSPOSED_B"
        a = "const uint32_t (&a)[4]" if in_registers else "uint64_t a"
        for columns in WGMMA_COLUMNS:
            lines += _wgmma(columns, flags, a, in_registers=in_registers)
    return "\n".join([*lines, "", "}  // namespace flash_dist", ""])


def _wgmma(columns: int, flags: str, a: str, *, in_registers: bool) -> Iterator[str]:
    tiles, count = columns // 8, columns // 2
    d = ", ".join(f"%{i}" for i in range(count))
    operand = (
        "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}" if in_registers else f"%{count}"
    )
    after = count + (4 if in_registers else 1)
    transposed = f"%{after + 1}" if in_registers else f"%{after + 1}, %{after + 2}"
    inputs = [f'"r"(a[{i}])' for i in range(4)] if in_registers else ['"l"(a)']
    inputs += ['"l"(b)'] + ([] if in_registers else ['"n"(int{TRANSPOSED_A})'])
    inputs += ['"n"(int{TRANSPOSED_B})']
    yield f"template <class T, {flags}, bool FIRST = false>"
    yield f"__device__ __forceinline__ void wgmma(float (&d)[{tiles}][4], {a}, uint64_t b) {{"
    for first in (True, False):
        yield f"  {'if constexpr (FIRST) {' if first else '} else {'}"
        mode, constraint = ("0", "=f") if first else ("1", "+f")
        outputs = ", ".join(f'"{constraint}"(d[{n}][{i}])' for n in range(tiles) for i in range(4))
        for dtype, condition in (
            ("f16", "if constexpr (std::is_same_v<T, Fp16>)"),
            ("bf16", "else"),
        ):
            yield (
                f'    {condition} asm volatile("wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.'
                f'{dtype}.{dtype} {{{d}}}, {operand}, %{after}, {mode}, 1, 1, {transposed};" '
                f": {outputs} : {', '.join(inputs)});"
            )
    yield "  }"
    yield "}"


def load_layout(path: Path = LAYOUT) -> dict[str, Any]:
    """Run flash_dist/masks/layout.py, which needs no torch, and return its global variables."""
    return runpy.run_path(str(path))


def render_mask_layout(layout: dict[str, Any]) -> str:
    """Return the header with the mask layout's constants, and asserts that core/params.h agrees."""

    def enum(name: str, values: Sequence[str]) -> str:
        listed = "".join(f"  {value.upper()},\n" for value in values)
        return f"enum {name} : int {{\n{listed}}};\n"

    same = {
        f"static_cast<int>(MaskKind::{kind})": layout[kind] for kind in ("BAND", "ROWS", "TILES")
    }
    same |= {f"TILE_{code}": layout[code] for code in ("FULL", "EMPTY")}
    same |= {"TILE_ROWS": layout["BY_ROWS"], "MASK_TILE": layout["TILE"]}
    checks = "".join(f"static_assert({name} == {value});\n" for name, value in same.items())
    arrays = layout["ARRAYS"]
    names = "".join(f'    "{name}",\n' for name in arrays)
    widths = ", ".join(map(str, arrays.values()))
    return f"""#pragma once

#include "core/params.h"

namespace flash_dist {{

{checks}
constexpr int MASK_ABSENT = {layout["ABSENT"]};  // offset of an array that is not there
constexpr int MASK_ALIGNMENT = {layout["ALIGNMENT"]};  // of offsets, in int32

// Positions in the list of a band.
{enum("BandInt", [f"BAND_{name}" for name in layout["BAND_INTS"]])}
constexpr int BAND_INTS = {len(layout["BAND_INTS"])};

// Positions in the list of any other mask: sizes, then the offset of each array.
{enum("MaskInt", [f"MASK_{name}" for name in layout["SIZES"]])}
constexpr int MASK_SIZES = {len(layout["SIZES"])};
{enum("MaskArray", [f"ARRAY_{name}" for name in arrays])}
constexpr int MASK_ARRAYS = {len(arrays)};
constexpr const char* MASK_ARRAY_NAMES[] = {{
{names}}};
constexpr int MASK_ARRAY_WIDTHS[] = {{{widths}}};  // int32 to an element
constexpr int LIST_ARRAYS = {len(layout["LIST"])};  // of a list of tiles

}}  // namespace flash_dist
"""
