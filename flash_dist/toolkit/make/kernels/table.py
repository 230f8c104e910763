"""The table of kernels: its families with their words, sizes and shared-memory plans.

One variant is one kernel for one target: `PREFIX_fwd_bf16_d64_smem99_sm90a`.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, Final

from ...errors import KernelsError
from ...product import SYMBOLS
from ...targets.archs import Arch
from ...targets.axes import AXES, KernelKey, Place
from ...targets.compatibility import judge
from ...targets.devices import KNOWN_DEVICES
from ...targets.fallbacks import Fallbacks
from ...targets.verdict import floor_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

_A100: Final = 80
_SM: Final = re.compile("Sm[0-9]+")  # in type names such as FwdSm90Config
PLANS: Final = "plans.h"
KEPT: Final = "kept_for"


@dataclass(frozen=True)
class Row:
    """A tile: the sizes that it serves, its shared-memory plan and its constants."""

    sizes: tuple[int, ...]
    plan: int
    constants: tuple[tuple[str, int], ...]
    kept_for: int = 0  # number of a target that gets this row although a larger plan fits; 0: none

    @property
    def numbers(self) -> tuple[int, ...]:
        """The values of the axes that `AXES.numbers` names."""
        return (*self.sizes, self.plan)[: len(AXES.numbers)]

    @classmethod
    def from_toml(cls, data: Mapping[str, int]) -> Row:
        """Read a row: its sizes and plan, KEPT, and the constants of the plan struct."""
        own = {KEPT, *(axis.name for axis in AXES.every)}
        constants = tuple((name, value) for name, value in data.items() if name not in own)
        place = AXES.place({**data, **{axis.name: "" for axis in AXES.of("equal")}})
        return cls(place.sizes, place.plan, constants, data.get(KEPT, 0))


@dataclass(frozen=True)
class Family:
    """Kernels of one template, which serve a role for some words such as dtypes.

    Several families may serve a role. A family with `targets` is only for these targets, and is
    tried before the general family. The general family is the fallback: it serves a call if
    `refuses`, a function in the header, rejects the arguments, if the GPU has too little shared
    memory, or if the call is left to it (`leaves_half_filled`).
    """

    name: str
    header: str
    config: str
    kernel: str
    params: str
    launch: str
    rows: tuple[Row, ...]
    words: tuple[tuple[str, ...], ...]  # each has one word for each axis with the rule `equal`
    role: str = ""  # from_toml: the family's name by default
    targets: frozenset[Arch] = frozenset()  # empty: all targets
    refuses: str = ""
    # True: calls of at most half of its first size, such as head_dim, go to the fallback.
    leaves_half_filled: bool = False
    plans: str = PLANS  # header with the tile constants

    @classmethod
    def from_toml(cls, data: Mapping[str, Any], defaults: Mapping[str, Any]) -> Family:
        """Read one [[family]] table; `defaults` has the values of keys that it lacks."""
        given = {**defaults, **data}
        words = [given.pop(axis.name) for axis in AXES.of("equal")]
        read = {
            "rows": tuple(map(Row.from_toml, data["rows"])),
            "words": tuple(product(*words)),
            "role": data.get("role", data["name"]),
            "targets": frozenset(map(Arch.parse, data.get("targets", ()))),
        }
        family = cls(**{**given, **read})
        family.require_name()
        return family

    def require_name(self) -> None:
        """Check that the family's name tells the role, because symbols contain only the name.

        Raises:
            KernelsError: The name is not allowed. A family for all targets has the name of its
                role. A family for some targets is named `<role>_sm<number>`, or
                `<role>_<axis>_sm<number>` with the axis `last`.
        """
        numbers = sorted({target.number for target in self.targets})
        kinds = (self.role, *([f"{self.role}_{AXES.last}"] if AXES.last else []))
        allowed = [f"{kind}_sm{number}" for number in numbers for kind in kinds] or [self.role]
        if self.name not in allowed:
            message = (
                f"a family that serves {self.role} for "
                f"{', '.join(sorted(map(str, self.targets))) or 'all targets'} must be named "
                f"{' or '.join(allowed)}, got `{self.name}`"
            )
            raise KernelsError(message)

    def serves(self, target: Arch) -> bool:
        """Tell if the kernels of the family are compiled for a target."""
        return not self.targets or target in self.targets

    def rows_for(self, sizes: Sequence[int]) -> tuple[Row, ...]:
        """Return the rows whose first size is in `sizes`, or all rows if `sizes` is empty.

        If all rows are larger than `sizes`, return the smallest rows. However, return none if the
        family has `targets`, or a row whose sizes differ from each other (MLA).
        """
        if not sizes:
            return self.rows
        least = min(row.sizes[0] for row in self.rows)
        alike = all(len(set(row.sizes)) == 1 for row in self.rows)
        holds_all = alike and not self.targets and least > max(sizes)
        wanted = {least} if holds_all else set(sizes)
        return tuple(row for row in self.rows if row.sizes[0] in wanted)

    @property
    def plan_struct(self) -> str:
        """Name of the struct template that holds the tile constants."""
        return self.config.removesuffix("Config") + "Plan"


def split_last(data: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a [[family]] table, and a second one for its rows with the axis `AXES.last`, if any.

    A row has the axis if it has a key of that name, which holds the constants that differ in the
    second table. There, type names contain the name of the axis: `FwdScoredSm90Config`.
    """
    rows = [{**row} for row in data["rows"]]
    changes = [row.pop(AXES.last, None) for row in rows]
    yield {**data, "rows": rows}
    last = [
        {**row, **change} for row, change in zip(rows, changes, strict=True) if change is not None
    ]
    if last:
        role = data.get("role", data["name"])
        name = f"{role}_{AXES.last}{data['name'].removeprefix(role)}"
        named = rf"{AXES.last.capitalize()}\g<0>"
        types = {key: _SM.sub(named, data[key]) for key in ("config", "params")}
        yield {**data, **types, "name": name, "role": role, "rows": last}


@dataclass(frozen=True)
class Table:
    """The content of a table of kernels."""

    smem_plans: dict[int, int]  # bytes of shared memory by plan
    families: tuple[Family, ...]
    fallbacks: Fallbacks
    own_headers: Path | None = None  # a module whose `headers()` returns headers by file name
    every_plan: bool = False  # also build the plans of smaller GPUs

    @classmethod
    def none(cls) -> Table:
        """Return an empty table, for a package with plain files only."""
        return cls({}, (), Fallbacks({}, frozenset()))

    @classmethod
    def load(cls, path: Path) -> Table:
        """Read the table in a file."""
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        plans = {int(name): size for name, size in data["smem_plans"].items()}
        defaults = data.get("defaults", {})
        families = tuple(
            Family.from_toml(one, defaults) for f in data["family"] for one in split_last(f)
        )
        stand_ins = {role: tuple(roles) for role, roles in data.get("stand_ins", {}).items()}
        leaving = frozenset(one.name for one in families if one.leaves_half_filled)
        own = path.parent / data["own_headers"] if "own_headers" in data else None
        table = cls(plans, families, Fallbacks(stand_ins, leaving), own)
        table.require_fallbacks()
        return table

    def require_fallbacks(self) -> None:
        """Check that each role to which a family leaves calls has a general family.

        Raises:
            KernelsError: A family leaves calls to a role that has no general family.
        """
        rest = [one for one in self.families if one.targets or one.leaves_half_filled]
        general = {(one.role, w) for one in self.families if one not in rest for w in one.words}
        for family in rest:
            stand_ins = self.fallbacks.stand_ins.get(family.role, (family.role,))
            needed = {*stand_ins, family.role} if family.leaves_half_filled else stand_ins
            for role, words in product(sorted(needed), family.words):
                if (role, words) not in general:
                    message = f"{family.name} leaves calls to {role}, which has no general family"
                    hint = (
                        f"add a [[family]] of {role} for {' '.join(words)}, or change [stand_ins]"
                    )
                    raise KernelsError(message, hint=hint)

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles of all families, each once."""
        return tuple(dict.fromkeys(family.role for family in self.families))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of families, each once. Families for different dtypes may share a name."""
        return tuple(dict.fromkeys(family.name for family in self.families))

    def only(self, sizes: Sequence[int], words: Collection[str]) -> Table:
        """Return the table with these sizes and words only, for debug builds; empty: keep all."""
        families = (
            replace(
                family,
                rows=family.rows_for(sizes),
                words=tuple(one for one in family.words if not words or set(one) <= set(words)),
            )
            for family in self.families
        )
        return replace(self, families=tuple(families))

    def variants(self, target: Arch) -> list[Variant]:
        """Return a target's variant of every kernel, with the plans that its devices need.

        PTX also runs on newer devices. So PTX of 8.0 or newer also has the plans that fit an A100.
        """
        newer = target.ptx and target.number >= _A100
        most = max(target.smem_optin, Arch(8, 0).smem_optin) if newer else target.smem_optin
        rooms = [d.smem_optin for d in KNOWN_DEVICES if judge(target, d)]
        everywhere = min(rooms, default=target.smem_optin)
        return [
            Variant(family, words, row, target)
            for family in self.families
            if family.serves(target)
            for words in family.words
            if all(target.number >= floor_of(word).number for word in words)
            for row in family.rows
            if self.smem_plans[row.plan] <= most
            and (
                self.every_plan
                or row.kept_for == target.number
                or not self._outdone(family, row, everywhere)
            )
        ]

    def _outdone(self, family: Family, row: Row, room: int) -> bool:
        """Tell if a larger plan of the same kernel also fits, and serves all calls of this row."""
        return not family.refuses and any(
            row.sizes == other.sizes
            and self.smem_plans[row.plan] < self.smem_plans[other.plan] <= room
            for other in family.rows
        )


@dataclass(frozen=True)
class Variant:
    """One kernel compiled for one target."""

    family: Family
    words: tuple[str, ...]
    row: Row
    target: Arch

    @property
    def place(self) -> Place:
        """The values of the axes for this variant."""
        return Place(self.words, self.row.sizes, self.row.plan)

    @property
    def key(self) -> KernelKey:
        """The key of the kernel that this variant belongs to."""
        return KernelKey(self.family.role, self.words, self.row.sizes)

    @property
    def symbol(self) -> str:
        """The kernel's name in C, in the fat binary and in every report."""
        values = AXES.spell(self.place)
        return f"{SYMBOLS}{self.family.name}_{values}_{self.target.identifier}"

    @property
    def config(self) -> str:
        """The C++ type of this kernel's compile-time settings, such as `RmsConfig<...>`."""
        words = (word.capitalize() for word in self.words)
        arguments = (cpp_target(self.target), *words, *self.row.numbers)
        return f"{self.family.config}<{', '.join(map(str, arguments))}>"

    @property
    def source(self) -> str:
        """Path of the variant's source file, relative to the output folder.

        Kernels of a family are alike and share a file, which becomes one image that is compressed
        as a whole. Kernels with a word that is part of another word get a separate file: in one
        file, nvcc would generate different code from the same templates.
        """
        apart = [word for word in self.words if AXES.words[word].part_of]
        sizes = [AXES.spell_sizes(self.row.sizes)] if apart else []
        stem = "_".join([self.family.name, *apart, *sizes])
        if self.target.ptx:  # one kernel per file: the driver compiles a whole PTX module
            stem = self.symbol.removeprefix(SYMBOLS)
        return f"targets/{self.target}/{stem}.cu"

    def to_json(self) -> dict[str, object]:
        """Return the variant's entry of variants.json."""
        return {
            "symbol": self.symbol,
            "role": self.family.role,
            "family": self.family.name,
            **AXES.describe(self.place),
            "target": str(self.target),
            "source": self.source,
        }


def cpp_char(suffix: str) -> str:
    """Return the suffix as a C++ character literal."""
    return f"'{suffix}'" if suffix else r"'\0'"


def cpp_target(arch: Arch) -> str:
    """Return the target as a C++ type."""
    return f"Target<{arch.number}, {cpp_char(arch.suffix)}, Code::{'PTX' if arch.ptx else 'SASS'}>"
