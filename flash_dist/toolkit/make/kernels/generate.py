"""Write the C++ files of a table of kernels and an arch list, when CMake configures.

    python -m TOOLKIT.make.kernels.generate --table kernels.toml --archs "9.0a" --out OUT

Files are written only when their content changes, so that a build folder compiles a target once,
whatever arch lists it is configured with.

    OUT/product.h                the namespace of the package
    OUT/names.h                  its names, for host code
    OUT/plans.h                  shared-memory plans, and tile constants of every row
    OUT/<own>.h                  those of families that name a separate header
    OUT/roles.h                  roles, families and axes, and their fallbacks
    OUT/targets/<target>/*.cu    kernels: one file per family and size, or per family where one
                                 kernel is a few lines; PTX: one per kernel
    OUT/variants.inc             KERNEL_VARIANT(...) lines of the arch list, for the dispatcher
    OUT/variants.json            the same as data, for the audit
    OUT/fallbacks.json           fallbacks of roles and families, for the manifest
    OUT/exports.map              exports of the libraries
    OUT/sources.cmake            sources and flags per target

The table may name a module with further headers of its own (own_headers).
"""

from __future__ import annotations

import argparse
import json
import runpy
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import KernelsError
from ...targets.archs import Arch, ArchSet
from ...targets.axes import AXES
from .render import (
    render_cmake,
    render_exports,
    render_names,
    render_own_plans,
    render_plans,
    render_product,
    render_roles,
    render_source,
    render_variants_inc,
)
from .table import PLANS, Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .table import Variant


def write_if_changed(path: Path, text: str) -> None:
    """Write a file, but keep the time stamp of an unchanged one."""
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def write_sources(out: Path, variants: Iterable[Variant]) -> list[str]:
    """Write the translation units of one target, delete others, and return their paths."""
    files: defaultdict[str, list[Variant]] = defaultdict(list)
    for variant in variants:
        files[variant.source].append(variant)
    for path, members in files.items():
        write_if_changed(out / path, render_source(members))
    for folder in {(out / path).parent for path in files}:
        for old in set(folder.glob("*.cu")) - {out / path for path in files}:
            old.unlink()
    return list(files)


def generate(table: Table, linked: Sequence[Arch], others: Sequence[Arch], out: Path) -> None:
    """Write everything; `others`, targets of earlier configurations, stay buildable."""
    variants = {arch: table.variants(arch) for arch in [*linked, *others]}
    sources = {arch: write_sources(out, variants[arch]) for arch in variants}
    compiled = [variant for arch in linked for variant in variants[arch]]
    texts = {
        "product.h": render_product(),
        "names.h": render_names(),
        "exports.map": render_exports(),
        PLANS: render_plans(table),
        "roles.h": render_roles(table),
        "variants.inc": render_variants_inc(compiled),
        "variants.json": json.dumps([v.to_json() for v in compiled], indent=1) + "\n",
        "fallbacks.json": json.dumps(table.fallbacks.to_json(), indent=1) + "\n",
        "sources.cmake": render_cmake(linked, others, sources),
    }
    if table.own_headers:
        texts |= runpy.run_path(str(table.own_headers))["headers"]()
    for header in sorted({family.plans for family in table.families} - {PLANS}):
        texts[header] = render_own_plans(table, header)
    for name, text in texts.items():
        write_if_changed(out / name, text)


def main() -> None:
    """Command line, called by CMakeLists.txt."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--archs", required=True, help='arch list to link, e.g. "7.5;8.0+PTX"')
    parser.add_argument(
        "--known", nargs="*", default=[], metavar="TARGET", help="targets of earlier configurations"
    )
    parser.add_argument("--out", required=True, type=Path, help="folder to write to")
    parser.add_argument("--table", type=Path, help="the table of kernels; without it there is none")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="VALUE", help="words and first sizes to keep"
    )
    args = parser.parse_args()
    linked = ArchSet.parse(args.archs, name="--archs").archs
    others = sorted(set(map(Arch.parse, args.known)) - set(linked))
    try:
        table = Table.load(args.table) if args.table else Table.none()
    except KernelsError as error:
        parser.error(str(error))
    sizes = {str(row.sizes[0]) for family in table.families for row in family.rows if row.sizes}
    unknown = set(args.only) - sizes - set(AXES.words)
    if unknown:
        allowed = [*AXES.words, *sorted(sizes, key=int)]
        parser.error(f"--only must be among {' '.join(allowed)}, got {' '.join(sorted(unknown))}")
    kept = [int(value) for value in args.only if value in sizes]
    table = table.only(kept, [value for value in args.only if value in AXES.words])
    generate(table, linked, others, args.out)


if __name__ == "__main__":
    main()
