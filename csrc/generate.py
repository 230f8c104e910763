"""Write the C++ files that follow from kernels.toml and an arch list, for CMake at configure time.

One variant is one kernel for one target: `flash_dist_fwd_bf16_d64_smem99_sm90a`. Files are written
only when their content changes, so that a build folder compiles a target once, whatever arch lists
it is configured with.

    OUT/plans.h                  shared-memory plans, and tile constants of every row
    OUT/decode_plans.h           those of families that name a header of their own
    OUT/roles.h                  the names of roles and families, and what they leave to others
    OUT/wgmma_shapes.h           matrix instructions of Hopper, whose operands are named one by one
    OUT/mask_layout.h            the numbers that carry a mask, from flash_dist/masks/layout.py
    OUT/targets/<target>/*.cu    kernels: one file per family and head_dim, or per family where one
                                 kernel is a few lines; PTX: one per kernel
    OUT/variants.inc             FLASH_DIST_VARIANT(...) lines of the arch list, for dispatch.cpp
    OUT/variants.json            the same as data, for the audit
    OUT/fallbacks.json           what roles and families leave to others, for the manifest
    OUT/sources.cmake            sources and flags per target
"""

from __future__ import annotations

import argparse
import json
import re
import runpy
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flash_dist.toolkit.errors import FlashDistError
from flash_dist.toolkit.targets.archs import Arch, ArchSet
from flash_dist.toolkit.targets.compatibility import judge
from flash_dist.toolkit.targets.devices import INTEGRATED, KNOWN_DEVICES
from flash_dist.toolkit.targets.fallbacks import Fallbacks

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

CSRC = Path(__file__).resolve().parent
KERNELS = CSRC / "kernels.toml"
LAYOUT = CSRC.parent / "flash_dist" / "masks" / "layout.py"
CPP_DTYPES = {"fp16": "Fp16", "bf16": "Bf16", "fp32": "Fp32", "ieee32": "Ieee32"}
HALF_DTYPES = ("fp16", "bf16")
_A100 = 80
_SM = re.compile("Sm[0-9]+")  # in the names of types
PLANS = "plans.h"
WGMMA_COLUMNS = (32, 48, 64, 80, 96, 112, 128, 192, 256)  # of D, for which there are wrappers


@dataclass(frozen=True)
class Row:
    """A tile choice: one head_dim (of q and k; and of v) under one shared-memory plan."""

    head_dim: int
    head_dim_v: int
    plan: int
    constants: tuple[tuple[str, int], ...]

    @classmethod
    def from_toml(cls, data: dict[str, int]) -> Row:
        """Take head_dims and plan out; everything else becomes a constant of the plan struct."""
        own = {"head_dim", "head_dim_v", "plan"}
        constants = tuple((k, v) for k, v in data.items() if k not in own)
        head_dim = data["head_dim"]
        return cls(head_dim, data.get("head_dim_v", head_dim), data["plan"], constants)

    @property
    def size(self) -> str:
        """The head_dims as they stand in names: `d128`, `d192v128`."""
        same = self.head_dim == self.head_dim_v
        return f"d{self.head_dim}" if same else f"d{self.head_dim}v{self.head_dim_v}"


@dataclass(frozen=True)
class Family:
    """Kernels that share one template: one way to serve a role, for some dtypes.

    Several may serve a role. One with `targets` is for these only, and is tried there before the
    one without, which stays as its fall-back: where `refuses`, a function of the header, has a
    reason against the arguments, and where shared memory is short.
    """

    name: str
    header: str
    config: str
    kernel: str
    params: str
    launch: str
    rows: tuple[Row, ...]
    dtypes: tuple[str, ...] = HALF_DTYPES
    role: str = ""  # "" is the name
    targets: frozenset[Arch] = frozenset()  # empty: all
    refuses: str = ""
    leaves_half_filled: bool = False
    plans: str = PLANS  # the header with its tile constants

    @classmethod
    def from_toml(cls, data: dict[str, Any]) -> Family:
        """Read one [[family]] table."""
        read = {
            "rows": tuple(map(Row.from_toml, data["rows"])),
            "dtypes": tuple(data.get("dtypes", HALF_DTYPES)),
            "role": data.get("role", data["name"]),
            "targets": frozenset(map(Arch.parse, data.get("targets", ()))),
        }
        family = cls(**{**data, **read})
        family.require_name()
        return family

    def require_name(self) -> None:
        """Insist on a name from which the role can be told, in a symbol of any binary.

        Raises:
            FlashDistError: It is neither the role nor, for some targets only, `<role>_sm<number>`
                or `<role>_scored_sm<number>`, for calls whose scores are bent.
        """
        numbers = sorted({target.number for target in self.targets})
        kinds = (self.role, f"{self.role}_scored")
        allowed = [f"{kind}_sm{number}" for number in numbers for kind in kinds] or [self.role]
        if self.name not in allowed:
            message = (
                f"a family that serves {self.role} for "
                f"{', '.join(sorted(map(str, self.targets))) or 'all targets'} must be named "
                f"{' or '.join(allowed)}, got `{self.name}`"
            )
            raise FlashDistError(message)

    def serves(self, target: Arch) -> bool:
        """Whether a target gets kernels of it."""
        return not self.targets or target in self.targets

    def rows_for(self, head_dims: Sequence[int]) -> tuple[Row, ...]:
        """Return the rows of these sizes; of a family that has larger ones alone, the least.

        Not of one for values of fewer columns (MLA): its sizes are a problem's own.
        """
        if not head_dims:
            return self.rows
        least = min(row.head_dim for row in self.rows)
        own_values = all(row.head_dim == row.head_dim_v for row in self.rows)
        holds_all = own_values and not self.targets and least > max(head_dims)
        wanted = {least} if holds_all else set(head_dims)
        return tuple(row for row in self.rows if row.head_dim in wanted)

    @property
    def plan_struct(self) -> str:
        """Name of the struct template that holds the tile constants."""
        return self.config.removesuffix("Config") + "Plan"


def split_scored(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a [[family]] table, and the one of its rows with `scored`, for softcap and ALiBi."""
    rows = [{**row} for row in data["rows"]]
    changes = [row.pop("scored", None) for row in rows]
    yield {**data, "rows": rows}
    scored = [
        {**row, **change} for row, change in zip(rows, changes, strict=True) if change is not None
    ]
    if scored:
        role = data.get("role", data["name"])
        name = f"{role}_scored{data['name'].removeprefix(role)}"
        types = {key: _SM.sub(r"Scored\g<0>", data[key]) for key in ("config", "params")}
        yield {**data, **types, "name": name, "role": role, "rows": scored}


@dataclass(frozen=True)
class Table:
    """The content of kernels.toml."""

    dtypes: dict[str, int]
    smem_plans: dict[int, int]
    families: tuple[Family, ...]
    fallbacks: Fallbacks
    every_plan: frozenset[Arch] = frozenset()  # targets that carry smaller plans, too

    @classmethod
    def load(cls, path: Path = KERNELS) -> Table:
        """Read kernels.toml."""
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        plans = {int(name): size for name, size in data["smem_plans"].items()}
        every_plan = frozenset(map(Arch.parse, data.get("every_plan", ())))
        families = tuple(Family.from_toml(one) for f in data["family"] for one in split_scored(f))
        stand_ins = {role: tuple(roles) for role, roles in data.get("stand_ins", {}).items()}
        leaving = frozenset(one.name for one in families if one.leaves_half_filled)
        table = cls(data["dtypes"], plans, families, Fallbacks(stand_ins, leaving), every_plan)
        table.require_fallbacks()
        return table

    def require_fallbacks(self) -> None:
        """Insist on general families behind each family for some targets.

        Raises:
            FlashDistError: A role that serves the calls which a family leaves has none.
        """
        rest = [one for one in self.families if one.targets or one.leaves_half_filled]
        general = {(one.role, d) for one in self.families if one not in rest for d in one.dtypes}
        for family in rest:
            stand_ins = self.fallbacks.stand_ins.get(family.role, (family.role,))
            needed = {*stand_ins, family.role} if family.leaves_half_filled else stand_ins
            for role, dtype in product(sorted(needed), family.dtypes):
                if (role, dtype) not in general:
                    message = f"{family.name} leaves calls to {role}, which has no general family"
                    hint = f"add a [[family]] of {role} for {dtype}, or change [stand_ins]"
                    raise FlashDistError(message, hint=hint)

    @property
    def roles(self) -> tuple[str, ...]:
        """What kernels are there for."""
        return tuple(dict.fromkeys(family.role for family in self.families))

    @property
    def names(self) -> tuple[str, ...]:
        """The families; of one name are those that serve a role for dtypes of their own."""
        return tuple(dict.fromkeys(family.name for family in self.families))

    def only(self, head_dims: Sequence[int], dtypes: Sequence[str]) -> Table:
        """The part that a debug build compiles; nothing named: everything."""
        families = (
            replace(
                family,
                rows=family.rows_for(head_dims),
                dtypes=tuple(d for d in family.dtypes if not dtypes or d in dtypes),
            )
            for family in self.families
        )
        return replace(self, families=tuple(families))

    def variants(self, target: Arch) -> list[Variant]:
        """Every kernel that a target gets: its dtypes, and the plans that its devices need.

        PTX also runs on newer devices: from 8.0 on it carries the plans of an A100, whatever its
        own number.
        """
        newer = target.ptx and target.number >= _A100
        most = max(target.smem_optin, Arch(8, 0).smem_optin) if newer else target.smem_optin
        rooms = [d.smem_optin for d in KNOWN_DEVICES if judge(target, d)]
        everywhere = min(rooms, default=target.smem_optin)
        return [
            Variant(family, dtype, row, target)
            for family in self.families
            if family.serves(target)
            for dtype in family.dtypes
            if target.number >= self.dtypes[dtype]
            for row in family.rows
            if self.smem_plans[row.plan] <= most
            and (target in self.every_plan or not self._outdone(family, row, everywhere))
        ]

    def _outdone(self, family: Family, row: Row, room: int) -> bool:
        """Whether a larger plan of the same kernel fits, too."""
        return any(
            row.size == other.size
            and self.smem_plans[row.plan] < self.smem_plans[other.plan] <= room
            for other in family.rows
        )


@dataclass(frozen=True)
class Variant:
    """One kernel compiled for one target."""

    family: Family
    dtype: str
    row: Row
    target: Arch

    @property
    def symbol(self) -> str:
        """The kernel's name in C, in the fat binary and in every report."""
        plan = f"_smem{self.row.plan}" if self.row.plan else ""
        name = f"flash_dist_{self.family.name}_{self.dtype}_{self.row.size}{plan}"
        return f"{name}_{self.target.identifier}"

    @property
    def config(self) -> str:
        """The C++ type that carries every compile-time choice of this kernel."""
        arguments = (
            cpp_target(self.target),
            CPP_DTYPES[self.dtype],
            self.row.head_dim,
            self.row.head_dim_v,
            self.row.plan,
        )
        return f"{self.family.config}<{', '.join(map(str, arguments))}>"

    def to_json(self) -> dict[str, object]:
        """As an entry of variants.json."""
        return {
            "symbol": self.symbol,
            "role": self.family.role,
            "family": self.family.name,
            "dtype": self.dtype,
            "head_dim": self.row.head_dim,
            "head_dim_v": self.row.head_dim_v,
            "plan": self.row.plan,
            "target": str(self.target),
            "source": source_path(self),
        }


def cpp_char(suffix: str) -> str:
    """The suffix as a C++ character literal."""
    return f"'{suffix}'" if suffix else r"'\0'"


def cpp_target(arch: Arch) -> str:
    """The target as a C++ type."""
    return f"Target<{arch.number}, {cpp_char(arch.suffix)}, Code::{'PTX' if arch.ptx else 'SASS'}>"


def source_path(variant: Variant) -> str:
    """Where a variant's code is written, relative to the output folder.

    ieee32 is apart from fp32, of the same templates: nvcc made other code of fp32 beside it.
    """
    stem = variant.family.name
    if variant.dtype == "ieee32":
        stem += "_ieee32"
    if variant.row.plan:  # without tiles in shared memory a kernel takes no time to compile
        stem += f"_{variant.row.size}"
    if variant.target.ptx:  # the driver compiles a whole module at first use
        stem = variant.symbol.removeprefix("flash_dist_")
    return f"targets/{variant.target}/{stem}.cu"


def render_variant(variant: Variant) -> str:
    """The kernel and its entry for the dispatcher."""
    family, symbol, config = variant.family, variant.symbol, f"{variant.symbol}_config"
    functions = [f"&{symbol}", f"&{family.launch}<{config}>"]
    functions += [f"&{family.refuses}<{config}>"] if family.refuses else []
    return f"""
namespace flash_dist {{
using {config} = {variant.config};
extern "C" __global__ void __launch_bounds__({config}::THREADS, {config}::MIN_BLOCKS)
{symbol}(const __grid_constant__ {family.params} params) {{
  {family.kernel}<{config}>(params);
}}
extern "C" const KernelEntry {symbol}_entry =
    make_entry<{config}>({", ".join(functions)});
}}  // namespace flash_dist
"""


def render_source(variants: Sequence[Variant]) -> str:
    """One translation unit."""
    headers = dict.fromkeys(
        ["plans.h", "core/entry.h", "core/config.h", *(v.family.header for v in variants)]
    )
    includes = "".join(f'#include "{header}"\n' for header in headers)
    return includes + "".join(map(render_variant, variants))


def render_plans(table: Table) -> str:
    """Tile constants: one struct per family, head_dim and plan."""
    lines = [
        "#pragma once",
        "",
        "namespace flash_dist {",
        "",
        "constexpr int smem_plan_bytes(int plan) {",
    ]
    lines += [f"  if (plan == {plan}) return {size};" for plan, size in table.smem_plans.items()]
    lines += ["  return -1;", "}", "", "// Compute capabilities of integrated GPUs, times 10."]
    lines.append("constexpr bool is_integrated(int number) {")
    lines += [f"  if (number == {10 * x + y}) return true;" for x, y in sorted(INTEGRATED)]
    lines += ["  return false;", "}"]
    lines += _plan_structs(table, PLANS)
    return "\n".join([*lines, "", "}  // namespace flash_dist", ""])


def render_own_plans(table: Table, header: str) -> str:
    """Tile constants of the families that have a header of their own for them."""
    lines = ["#pragma once", "", "namespace flash_dist {", *_plan_structs(table, header)]
    return "\n".join([*lines, "", "}  // namespace flash_dist", ""])


def _plan_structs(table: Table, header: str) -> Iterator[str]:
    for family in table.families:
        if family.plans != header:
            continue
        parameters = "int HEAD_DIM, int HEAD_DIM_V, int PLAN"
        yield from ("", f"template <{parameters}> struct {family.plan_struct};")
        for row in family.rows:
            body = " ".join(
                f"static constexpr int {name.upper()} = {value};" for name, value in row.constants
            )
            name = f"{family.plan_struct}<{row.head_dim}, {row.head_dim_v}, {row.plan}>"
            yield f"template <> struct {name} {{ {body} }};"


def render_roles(table: Table) -> str:
    """The names of roles and families, once for all of the host code."""
    lines = ["#pragma once", "", "namespace flash_dist {"]
    for kind, names in (("Role", table.roles), ("Family", table.names)):
        function = f"{kind.lower()}_name"
        values = ", ".join(name.upper() for name in names)
        lines += ["", f"enum class {kind} : int {{ {values} }};"]
        lines += [f"constexpr const char* {function}({kind} one) {{"]
        lines += ["  constexpr const char* NAMES[] = {"]
        lines += [f'      "{name}",' for name in names]
        lines += ["  };", "  return NAMES[static_cast<int>(one)];", "}"]
    lines += ["", f"constexpr int ROLE_COUNT = {len(table.roles)};"]
    facts = table.fallbacks
    lines += _predicate("has_stand_ins", "Role", facts.stand_ins)
    lines += _predicate("leaves_half_filled", "Family", sorted(facts.leaves_half_filled))
    return "\n".join([*lines, "", "}  // namespace flash_dist", ""])


def _predicate(name: str, kind: str, true_for: Iterable[str]) -> Iterator[str]:
    yield from ("", f"constexpr bool {name}([[maybe_unused]] {kind} one) {{")
    yield from (f"  if (one == {kind}::{each.upper()}) return true;" for each in true_for)
    yield from ("  return false;", "}")


def render_wgmma_shapes() -> str:
    """The wrappers of ptx/wgmma.cuh."""
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
    """Run the description of what carries a mask to the kernels, which needs no torch."""
    return runpy.run_path(str(path))


def render_mask_layout(layout: dict[str, Any]) -> str:
    """The numbers of a mask by name, and that the headers of the kernels have the same ones."""

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


def render_variants_inc(variants: Iterable[Variant]) -> str:
    """The dispatcher's table."""
    return "".join(f"FLASH_DIST_VARIANT({', '.join(_macro_arguments(v))})\n" for v in variants)


def _macro_arguments(variant: Variant) -> Iterator[str]:
    family, row, target = variant.family, variant.row, variant.target
    yield from (variant.symbol, family.role.upper(), family.name.upper())
    yield str(int(bool(family.targets)))
    yield variant.dtype.upper()
    yield from map(str, (row.head_dim, row.head_dim_v, row.plan, target.number))
    yield from (cpp_char(target.suffix), str(int(target.ptx)))


def render_cmake(
    linked: Sequence[Arch], others: Sequence[Arch], sources: dict[Arch, list[str]]
) -> str:
    """Targets, their nvcc flag and their sources."""
    lines = [
        f"set(FLASH_DIST_LINKED_TARGETS {' '.join(map(str, linked))})",
        f"set(FLASH_DIST_OTHER_TARGETS {' '.join(map(str, others))})",
    ]
    for arch in [*linked, *others]:
        lines.append(f"set(FLASH_DIST_{arch}_GENCODE {arch.gencode})")
        lines.append(f"set(FLASH_DIST_{arch}_SOURCES\n    " + "\n    ".join(sources[arch]) + ")")
    return "\n".join([*lines, ""])


def write_if_changed(path: Path, text: str) -> None:
    """Leave an unchanged file's time stamp alone."""
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def write_sources(out: Path, variants: Iterable[Variant]) -> list[str]:
    """Write the translation units of one target, and nothing else, and return their paths."""
    files: defaultdict[str, list[Variant]] = defaultdict(list)
    for variant in variants:
        files[source_path(variant)].append(variant)
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
    write_if_changed(out / PLANS, render_plans(table))
    for header in sorted({family.plans for family in table.families} - {PLANS}):
        write_if_changed(out / header, render_own_plans(table, header))
    write_if_changed(out / "roles.h", render_roles(table))
    write_if_changed(out / "wgmma_shapes.h", render_wgmma_shapes())
    write_if_changed(out / "mask_layout.h", render_mask_layout(load_layout()))
    write_if_changed(out / "variants.inc", render_variants_inc(compiled))
    write_if_changed(
        out / "variants.json", json.dumps([v.to_json() for v in compiled], indent=1) + "\n"
    )
    told = json.dumps(table.fallbacks.to_json(), indent=1) + "\n"
    write_if_changed(out / "fallbacks.json", told)
    write_if_changed(out / "sources.cmake", render_cmake(linked, others, sources))


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
    parser.add_argument("--table", default=KERNELS, type=Path, help="the table of kernels")
    parser.add_argument(
        "--head-dims", nargs="*", default=[], type=int, help="compiled sizes to keep; none: all"
    )
    parser.add_argument("--dtypes", nargs="*", default=[], help="dtypes to keep; none: all")
    args = parser.parse_args()
    linked = ArchSet.parse(args.archs, name="--archs").archs
    others = sorted(set(map(Arch.parse, args.known)) - set(linked))
    try:
        table = Table.load(args.table)
    except FlashDistError as error:
        parser.error(str(error))
    sizes = sorted({row.head_dim for family in table.families for row in family.rows})
    if not set(args.head_dims) <= set(sizes):
        parser.error(f"--head-dims must be among {sizes}, got {args.head_dims}")
    if not set(args.dtypes) <= set(table.dtypes):
        parser.error(f"--dtypes must be among {list(table.dtypes)}, got {args.dtypes}")
    table = table.only(args.head_dims, args.dtypes)
    generate(table, linked, others, args.out)


if __name__ == "__main__":
    main()
