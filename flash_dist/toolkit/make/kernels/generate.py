"""Write the C++ files of a table of kernels and an arch list, when CMake configures.

    python -m TOOLKIT.make.kernels.generate --table kernels.toml --archs "9.0a" --out OUT

Files are written only when their content changes, so that a build folder compiles a target once,
whatever arch lists it is configured with.

    OUT/product.h                the namespace of the package
    OUT/names.h                  its names, for host code
    OUT/plans.h                  shared-memory plans, and tile constants of every row
    OUT/<own>.h                  plans of families that name this header
    OUT/roles.h                  roles, families and axes, and their fallbacks
    OUT/targets/<target>/*.cu    kernels: one file per family; PTX: one per kernel
    OUT/variants.inc             KERNEL_VARIANT(...) lines of the arch list, for the dispatcher
    OUT/variants.json            these variants as data, for the audit
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
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import KernelsError
from ...product import NAME, NAMESPACE, SYMBOLS
from ...targets.archs import Arch, ArchSet
from ...targets.axes import AXES
from ...targets.devices import INTEGRATED
from ...targets.verdict import SMEM_VARIABLE
from .table import PLANS, Table, cpp_char

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from .table import Variant


def render_variant(variant: Variant) -> str:
    """Return the C++ source of a kernel and of its entry for the dispatcher."""
    family, symbol, config = variant.family, variant.symbol, f"{variant.symbol}_config"
    functions = [f"&{symbol}", f"{family.launch}<{config}>"]
    functions += [f"&{family.refuses}<{config}>"] if family.refuses else []
    return f"""
namespace {NAMESPACE} {{
using {config} = {variant.config};
extern "C" __global__ void __launch_bounds__({config}::THREADS, {config}::MIN_BLOCKS)
{symbol}(const __grid_constant__ {family.params} params) {{
  {family.kernel}<{config}>(params);
}}
extern "C" const KernelEntry {symbol}_entry =
    make_entry<{config}>({", ".join(functions)});
}}  // namespace {NAMESPACE}
"""


def render_source(variants: Sequence[Variant]) -> str:
    """Return the source of one translation unit."""
    headers = dict.fromkeys(["plans.h", "native/entry.h", *(v.family.header for v in variants)])
    includes = "".join(f'#include "{header}"\n' for header in headers)
    return includes + "".join(map(render_variant, variants))


def render_product() -> str:
    """Return the header with the package's namespace, for the headers common to all packages."""
    return f"""#pragma once

#define KERNEL_NAMESPACE {NAMESPACE}
"""


def render_names() -> str:
    """Return the header with names for host code alone: changing them recompiles no kernel."""
    return f"""#pragma once

#define KERNEL_C(name) {SYMBOLS}##name  // a function of the C interface
#define PRODUCT_NAME "{NAME}"
#define PRODUCT_PROGRAM "python -m {NAME}"
#define SMEM_LIMIT_VARIABLE "{SMEM_VARIABLE}"
"""


def render_exports() -> str:
    """Return the version script of both libraries, which exports the C interface only."""
    return f"{{\n  global: {SYMBOLS}*;\n  local: *;\n}};\n"


def render_plans(table: Table) -> str:
    """Return the header with shared-memory plans and tile constants, one struct per row."""
    lines = [
        "#pragma once",
        "",
        f"namespace {NAMESPACE} {{",
        "",
        "constexpr int smem_plan_bytes(int plan) {",
    ]
    lines += [f"  if (plan == {plan}) return {size};" for plan, size in table.smem_plans.items()]
    lines += ["  return -1;", "}", "", "// Compute capabilities of integrated GPUs, times 10."]
    lines.append("constexpr bool is_integrated(int number) {")
    lines += [f"  if (number == {10 * x + y}) return true;" for x, y in sorted(INTEGRATED)]
    lines += ["  return false;", "}"]
    lines += _plan_structs(table, PLANS)
    return "\n".join([*lines, "", f"}}  // namespace {NAMESPACE}", ""])


def render_own_plans(table: Table, header: str) -> str:
    """Return the header with the tile constants of the families whose `plans` names it."""
    lines = ["#pragma once", "", f"namespace {NAMESPACE} {{", *_plan_structs(table, header)]
    return "\n".join([*lines, "", f"}}  // namespace {NAMESPACE}", ""])


def _plan_structs(table: Table, header: str) -> Iterator[str]:
    for family in table.families:
        if family.plans != header:
            continue
        parameters = ", ".join(f"int {name.upper()}" for name in AXES.numbers)
        yield from ("", f"template <{parameters}> struct {family.plan_struct};")
        for row in family.rows:
            body = " ".join(
                f"static constexpr int {name.upper()} = {value};" for name, value in row.constants
            )
            name = f"{family.plan_struct}<{', '.join(map(str, row.numbers))}>"
            yield f"template <> struct {name} {{ {body} }};"


def render_roles(table: Table) -> str:
    """Return the header with the roles, families, axes and fallbacks of kernels, for host code."""
    lines = ["#pragma once", "", f"namespace {NAMESPACE} {{"]
    for kind, names in (("Role", table.roles), ("Family", table.names)):
        function = f"{kind.lower()}_name"
        values = ", ".join(name.upper() for name in names)
        lines += ["", f"enum class {kind} : int {{ {values} }};"]
        lines += [f"constexpr const char* {function}({kind} one) {{"]
        lines += ["  constexpr const char* NAMES[] = {"]
        lines += [f'      "{name}",' for name in names]
        lines += ["  };", "  return NAMES[static_cast<int>(one)];", "}"]
    lines += ["", f"constexpr int ROLE_COUNT = {len(table.roles)};"]
    lines += _axes()
    facts = table.fallbacks
    lines += _predicate("has_stand_ins", "Role", facts.stand_ins)
    lines += _predicate("leaves_half_filled", "Family", sorted(facts.leaves_half_filled))
    return "\n".join([*lines, "", f"}}  // namespace {NAMESPACE}", ""])


def _axes() -> Iterator[str]:
    """Yield C++ constants for the axes of a kernel's key, and the words of each word axis."""
    words = AXES.of("equal")
    yield from ("", f"constexpr int WORD_AXES = {len(words)};")
    yield f"constexpr int KEY_AXES = {len(AXES.key)};"
    for number, name in enumerate(AXES.key):
        yield f"constexpr int {name.upper()}_AXIS = {number};"
    names = ", ".join(f'"{name}"' for name in AXES.key)
    yield f"constexpr const char* AXIS_NAMES[] = {{{names}}};"
    yield f'constexpr const char* PLAN_AXIS = "{AXES.plan or "plan"}";'
    defaults = {axis.name: axis.default for axis in AXES.of("holds")}
    others = [AXES.key.index(defaults[n]) if defaults.get(n) else -1 for n in AXES.key]
    yield "// The axis whose value a size has where a call names none; -1: there is none."
    yield f"constexpr int DEFAULT_AXES[] = {{{', '.join(map(str, others))}}};"
    for axis in words:
        for number, word in enumerate(axis.words):
            yield f"constexpr int {axis.name.upper()}_{word.name.upper()} = {number};"
    most = max((len(axis.words) for axis in words), default=1)
    rows = (", ".join(f'"{word.name}"' for word in axis.words) for axis in words)
    table = ", ".join(f"{{{row}}}" for row in rows) or "{}"
    counts = ", ".join(str(len(axis.words)) for axis in words) or "0"
    yield "constexpr int word_count(int axis) {"
    yield f"  constexpr int COUNTS[] = {{{counts}}};"
    yield from ("  return COUNTS[axis];", "}")
    yield "constexpr const char* word_name(int axis, int number) {"
    yield f"  constexpr const char* NAMES[][{most}] = {{{table}}};"
    known = "0 <= number && number < word_count(axis)"
    yield from (f'  return {known} ? NAMES[axis][number] : "unknown";', "}")


def _predicate(name: str, kind: str, true_for: Iterable[str]) -> Iterator[str]:
    yield from ("", f"constexpr bool {name}([[maybe_unused]] {kind} one) {{")
    yield from (f"  if (one == {kind}::{each.upper()}) return true;" for each in true_for)
    yield from ("  return false;", "}")


def render_variants_inc(variants: Iterable[Variant]) -> str:
    """Return the text of variants.inc, the dispatcher's table."""
    return "".join(f"KERNEL_VARIANT({', '.join(_macro_arguments(v))})\n" for v in variants)


def _macro_arguments(variant: Variant) -> Iterator[str]:
    family, target = variant.family, variant.target
    yield from (variant.symbol, family.role.upper(), family.name.upper())
    yield from map(str, (int(bool(family.targets)), variant.row.plan, target.number))
    yield from (cpp_char(target.suffix), str(int(target.ptx)))
    for axis, word in zip(AXES.of("equal"), variant.words, strict=True):
        yield str([one.name for one in axis.words].index(word))
    yield from map(str, variant.row.sizes)


def render_cmake(
    linked: Sequence[Arch], others: Sequence[Arch], sources: dict[Arch, list[str]]
) -> str:
    """Return the CMake code that lists the targets, and for each its nvcc flag and its sources."""
    lines = [
        f"set(LINKED_TARGETS {' '.join(map(str, linked))})",
        f"set(OTHER_TARGETS {' '.join(map(str, others))})",
    ]
    for arch in [*linked, *others]:
        lines.append(f"set({arch}_GENCODE {arch.gencode})")
        lines.append(f"set({arch}_SOURCES\n    " + "\n    ".join(sources[arch]) + ")")
    return "\n".join([*lines, ""])


def write_if_changed(path: Path, text: str) -> None:
    """Write a file, unless it has this text already: then keep it and its modification time."""
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def write_sources(out: Path, variants: Iterable[Variant]) -> list[str]:
    """Write one target's translation units, and return their paths; delete its outdated units."""
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
    """Write all generated files, also for `others`: the targets of earlier configurations."""
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
    """Run the command, which CMakeLists.txt calls."""
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
        "--every-plan", action="store_true", help="compile the plans of smaller GPUs, too"
    )
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
    table = replace(table, every_plan=args.every_plan)
    generate(table, linked, others, args.out)


if __name__ == "__main__":
    main()
