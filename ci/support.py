"""Make the README's table of supported GPUs from csrc/kernels.toml; `nox -s outputs` writes it."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Final

from ci.places import read_table
from flash_dist.toolkit.make.command import command
from flash_dist.toolkit.make.project import README, replace_between, write_table
from flash_dist.toolkit.targets.archs import Arch
from flash_dist.toolkit.targets.axes import name_sizes, smallest_size
from flash_dist.toolkit.targets.devices import KNOWN_DEVICES
from flash_dist.toolkit.targets.verdict import FLOOR

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from flash_dist.toolkit.make.kernels.table import Table, Variant
    from flash_dist.toolkit.targets.devices import Device

    Size = tuple[int, ...]  # head_dim of q and k, head_dim_v

MARKS: Final = (
    "<!-- nox -s outputs, from csrc/kernels.toml: from here -->\n",
    "<!-- to here, from csrc/kernels.toml -->\n",
)
SUFFIXED: Final = 90  # the first compute capability, times 10, with a target of suffix `a`

# Each pass and its kernels. The first kernel decides which sizes are supported. A backward may also
# store dS (`bwd_dq_gemm`), which affects only speed and memory.
PASSES: Final = {
    "forward": ("fwd",),
    "backward": ("bwd_dkdv", "bwd_dq_recompute"),
    "decoding": ("decode", "decode_fold", "append"),
    "decoding, MLA": ("mla", "mla_fold"),
}
DTYPES: Final = {
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "ieee32": "float32 `ieee`",
}


@dataclass(frozen=True)
class Row:
    """A row of the table: a pass, dtypes with the same supported sizes, and the sizes per GPU."""

    name: str
    dtypes: tuple[str, ...]
    sizes: tuple[tuple[Size, ...], ...]  # the supported sizes of each GPU

    @property
    def common(self) -> tuple[Size, ...]:
        """The sizes supported by every GPU that has any kernels for this pass and these dtypes."""
        first, *others = filter(None, self.sizes)
        return tuple(size for size in first if all(size in own for own in others))


def make_table(table: Table, devices: Sequence[Device]) -> str:
    """Make the Markdown table; consecutive GPUs with the same cells share a column."""
    variants = [table.variants(native_target(device)) for device in devices]
    rows = _find_rows(variants, list(DTYPES))
    columns = [list(own) for _, own in groupby(range(len(devices)), lambda at: _column(rows, at))]
    titles = [write_devices([devices[at] for at in own]) for own in columns]
    heads = ["pass", "dtype", "head_dim of the kernels", *titles]
    cells = (
        [row.name, _write_dtypes(row), write_sizes(row.common), *_cells(row, columns)]
        for row in rows
    )
    return write_table(heads, cells)


def _find_rows(variants: Sequence[Sequence[Variant]], dtypes: Sequence[str]) -> list[Row]:
    """Return the rows of all passes; dtypes with the same sizes on every GPU share a row."""
    rows = []
    for name, roles in PASSES.items():
        by_sizes: dict[tuple[tuple[Size, ...], ...], list[str]] = {}
        for dtype in dtypes:
            sizes = tuple(tuple(find_sizes(own, roles, dtype)) for own in variants)
            if any(sizes):
                by_sizes.setdefault(sizes, []).append(dtype)
        rows += [Row(name, tuple(alike), sizes) for sizes, alike in by_sizes.items()]
    return rows


def _write_dtypes(row: Row) -> str:
    return ", ".join(DTYPES[dtype] for dtype in row.dtypes)


def _column(rows: Sequence[Row], at: int) -> list[tuple[Size, ...]]:
    return [row.sizes[at] for row in rows]


def _cells(row: Row, columns: Sequence[Sequence[int]]) -> list[str]:
    return [_cell(row.sizes[own[0]], row.common) for own in columns]


def _cell(sizes: Sequence[Size], common: Sequence[Size]) -> str:
    """Write `no`, `yes`, or the additional sizes of a GPU: `yes, also 48, 80`."""
    if not sizes:
        return "no"
    more = [size for size in sizes if size not in common]
    return f"yes, also {write_sizes(more)}" if more else "yes"


def native_target(device: Device) -> Arch:
    """Return the most specific target of a GPU: sm_90a for compute capability 9.0."""
    return Arch(device.major, device.minor, "a" if device.number >= SUFFIXED else "")


def find_sizes(variants: Sequence[Variant], roles: Sequence[str], dtype: str) -> Iterator[Size]:
    """Yield the sizes of the first role's kernels that kernels of all other roles also support."""
    own = [
        {one.row.sizes for one in variants if one.words[0] == dtype and one.family.role == role}
        for role in roles
    ]
    yield from (size for size in sorted(own[0]) if all(smallest_size(o, size) for o in own[1:]))


def write_devices(devices: Sequence[Device]) -> str:
    """Write consecutive GPUs: `7.5`, `8.0 to 12.1`."""
    first, last = devices[0], devices[-1]
    return str(first) if first == last else f"{first} to {last}"


def write_sizes(sizes: Sequence[Size]) -> str:
    """Write a list of head_dims: `64, 128, 192/128`."""
    return ", ".join(map(name_sizes, sizes))


def load_table() -> str:
    """Make the table of the kernels of this tree, for every GPU that has kernels."""
    return make_table(read_table(), [one for one in KNOWN_DEVICES if one >= FLOOR])


@command
def main(argv: Sequence[str] | None = None, readme: Path = README) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m ci.support", description=__doc__)
    parser.add_argument("--write", action="store_true", help="put it into README.md")
    args = parser.parse_args(argv)
    table = load_table()
    print(table, end="")
    if args.write:
        text = replace_between(MARKS, readme.read_text(encoding="utf-8"), table)
        readme.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
