"""Reads the axes and the table of kernels of `[tool.kernels.dispatch]`, and checks them.

`kernels.table` reads the same file with the axes of the package that is built. This module checks
the file with the axes of the declaration that names the file.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import TYPE_CHECKING, Any, Final

from ...errors import KernelsError
from ...product import TABLE
from ...targets.axes import Axes
from .files import find_path
from .keys import KEYS, DeclarationError, read_toml_file, require_keys, spell
from .sets import read_targets

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from pathlib import Path

PLACE: Final = f"[tool.{TABLE}.dispatch]"

# Keys of a kernel's record that are not axes. No axis may have one of these names (see
# `Variant.to_json` and the manifest).
_RESERVED: Final = frozenset({
    "assembled_for", "dynamic_smem", "family", "proof", "registers", "role", "source",
    "spill_bytes", "stack_bytes", "static_smem", "symbol", "target", "threads",
})  # fmt: skip
_MOST_SIZE: Final = 999_999  # six digits: readers of symbols accept no more
_MOST_CONSTANT: Final = 2**31 - 1
_NEEDED: Final = ("name", "header", "config", "kernel", "params", "launch", "rows")


def read_axes(told: Iterable[object]) -> Axes:
    """Read the key `axes` of [tool.kernels.dispatch].

    Raises:
        DeclarationError: An axis is malformed, or two axes cannot be told apart.
    """
    where = f"`axes` of {PLACE}"
    tables = [require_keys(one, "axis", f"a table of {where}", ("name", "rule")) for one in told]
    for table in tables:
        _require_words(table, where)
        if table["name"] in _RESERVED or table["name"] in KEYS["family"]:
            message = (
                f"an axis of {where} is named `{table['name']}`, which records of kernels have"
            )
            raise DeclarationError(message, hint="give it another name, such as `hidden`")
    try:
        axes = Axes.from_json(tables)
    except KernelsError as error:
        message = f"{where}: {error.message}"
        raise DeclarationError(message, hint=error.hint or _AXIS) from error
    counts = Counter(word.name for axis in axes.every for word in axis.words)
    for word, count in counts.items():
        if count > 1:
            message = f"{where} has the word `{word}` {count} times"
            raise DeclarationError(message, hint="symbols name words alone: rename one")
    for before, after in zip(axes.of("holds"), axes.of("holds")[1:], strict=False):
        if after.symbol.startswith("{") and before.symbol.endswith("}"):
            message = f"{where} spells `{after.name}` after `{before.name}` as `{after.symbol}`"
            hint = f'their digits would run together: for example `symbol = "{after.name[0]}{{}}"`'
            raise DeclarationError(message, hint=hint)
    return axes


_AXIS: Final = 'an axis is for example `{ name = "hidden", rule = "holds", symbol = "d{}" }`'


def _require_words(table: Mapping[str, Any], where: str) -> None:
    axis, words = f"axis `{table['name']}` of {where}", table.get("words", {})
    if (table["rule"] == "equal") != bool(words):
        does = "lacks" if not words else "cannot have"
        message = f"{axis} with the rule `{table['rule']}` {does} `words`"
        raise DeclarationError(message, hint="the rule `equal` chooses by words, no other does")
    for name, word in words.items():
        require_keys(word, "word", f"word {spell(name)} of {axis}", ("floor",))
        if word.get("part_of", name) not in words or word.get("part_of") == name:
            got = spell(word["part_of"])
            message = f"`part_of` of word `{name}` of {axis} must be another word, got {got}"
            raise DeclarationError(message, hint=f"its words are {', '.join(words)}")


def read_table(path: Path, axes: Axes, root: Path, include: Iterable[Path]) -> tuple[str, ...]:
    """Check a table of kernels, and return its roles.

    Args:
        path: The file.
        axes: The declared axes.
        root: The folder of the project.
        include: Folders that #include searches for the headers of its families.

    Raises:
        DeclarationError: The file is not a valid table of kernels.
    """
    name = path.relative_to(root).as_posix()
    where = f"`{name}`"
    data = require_keys(read_toml_file(path, name), "kernel_table", where, ("smem_plans", "family"))
    plans = _read_plans(data["smem_plans"], f"`smem_plans` of {where}")
    if "own_headers" in data:
        own = (path.parent / data["own_headers"]).relative_to(root).as_posix()
        find_path(own, root, f"`own_headers` of {where}", (".py",))
    words = {axis.name: [word.name for word in axis.words] for axis in axes.of("equal")}
    defaults = data.get("defaults", {})
    require_keys(defaults, "family", f"`defaults` of {where}", others=words)
    folders = tuple(include)
    roles: dict[str, None] = {}
    kernels: set[tuple[Any, ...]] = set()
    for one in data["family"]:
        family = {**defaults, **_require_family(one, where, words, defaults)}
        told = f"family `{family['name']}` of {where}"
        _require_family_words(family, words, told)
        if "own_headers" not in data:  # otherwise the module `own_headers` may write the header
            _require_header(family["header"], folders, told, root)
        read_targets(family.get("targets", ()), f"`targets` of {told}")
        roles[family.get("role", family["name"])] = None
        for kernel in _list_kernels(family, axes, plans, told):
            if kernel in kernels:
                message = f"{told} has two rows for {_describe(kernel)}"
                raise DeclarationError(message, hint="leave one out: they have one symbol")
            kernels.add(kernel)
    _require_stand_ins(data.get("stand_ins", {}), roles, f"`stand_ins` of {where}")
    return tuple(roles)


def require_main_role(role: str, roles: Collection[str]) -> None:
    """Check that `role` is a role of the table; an empty `role` is allowed.

    Raises:
        DeclarationError: The table does not have the role.
    """
    if role and role not in roles:
        message = f"`main_role` of {PLACE} is `{role}`, which no family of the table has"
        raise DeclarationError(message, hint=f"its roles are {', '.join(roles)}")


def _read_plans(told: Mapping[str, object], where: str) -> frozenset[int]:
    for name, size in told.items():
        number = isinstance(size, int) and not isinstance(size, bool)
        if not (name.isascii() and name.isdigit() and number and 0 < int(str(size)) < 2**31):
            message = f"{where} must be bytes by KB, got `{name:.20} = {spell(size)[1:-1]}`"
            raise DeclarationError(message, hint="for example `99 = 101376`")
    if not told:
        message = f"{where} names no plan"
        raise DeclarationError(message, hint="`0 = 49152` is what every GPU has")
    return frozenset(map(int, told))


def _require_family(
    one: object, where: str, words: Collection[str], defaults: Mapping[str, Any]
) -> Mapping[str, Any]:
    told = f"a [[family]] of {where}"
    if isinstance(one, dict) and isinstance(one.get("name"), str):
        told = f"family `{one['name']:.60}` of {where}"
    needed = [key for key in _NEEDED if key not in defaults]
    return require_keys(one, "family", told, needed, others=words)


def _require_family_words(
    family: Mapping[str, Any], words: Mapping[str, list[str]], told: str
) -> None:
    for axis, known in words.items():
        given = family.get(axis)
        hint = f'for example `{axis} = ["{known[0]}"]`, here or in [defaults]'
        if not isinstance(given, list) or not given:
            got = f"got {spell(given)}" if axis in family else "which it lacks"
            message = f"`{axis}` of {told} must be a list of words, {got}"
            raise DeclarationError(message, hint=hint)
        wrong = [one for one in given if one not in known]
        if wrong or len(set(given)) < len(given):
            got = spell(wrong[0]) if wrong else f"{spell(given)}, with one twice"
            message = f"`{axis}` of {told} must be among {', '.join(known)}, got {got}"
            raise DeclarationError(message, hint=hint)


def _require_header(name: str, folders: Collection[Path], told: str, root: Path) -> None:
    if not any((folder / name).is_file() for folder in folders):
        places = ", ".join(f"`{folder.relative_to(root).as_posix()}`" for folder in folders)
        where = f"in none of {places}" if places else "in no folder, as `include` names none"
        message = f"`header` of {told} is {spell(name)}, which is {where}"
        raise DeclarationError(message, hint="`include` names the folders with headers")


def _list_kernels(
    family: Mapping[str, Any], axes: Axes, plans: Collection[int], told: str
) -> Iterator[tuple[Any, ...]]:
    """Yield a tuple of family name, words, sizes and plan for each kernel of a family."""
    every = [family[axis.name] for axis in axes.of("equal")]
    for number, row in enumerate(family["rows"], 1):
        where = f"row {number} of {told}"
        values = dict(_read_row(row, axes, where))
        place = _fill(values, axes, where)
        plan = values.get(axes.plan, 0) if axes.plan else 0
        if plan not in plans:
            known = ", ".join(map(str, sorted(plans)))
            message = f"{where} has the plan {plan}, and `smem_plans` has {known}"
            raise DeclarationError(message, hint=f"add `{plan} = {plan * 1024 or 49152}` to it")
        for words in product(*every):
            yield (family["name"], *words, *place, plan)


def _read_row(row: Mapping[str, Any], axes: Axes, where: str) -> Iterator[tuple[str, int]]:
    """Check the numbers of a row; yield names and values, without those of the axis `last`."""
    numbers = dict(row)
    last = numbers.pop(axes.last, {}) if axes.last else {}
    if not isinstance(last, dict):
        message = f"`{axes.last}` of {where} must be a table of constants, got {spell(last)}"
        raise DeclarationError(message, hint="it names the constants that differ")
    for name, value in (*numbers.items(), *last.items()):
        whole = isinstance(value, int) and not isinstance(value, bool)
        most = _MOST_SIZE if name in axes.numbers else _MOST_CONSTANT
        least = 0 if name in axes.numbers else -_MOST_CONSTANT
        if not (whole and least <= value <= most):
            allowed = f"a whole number from {least} to {most}"
            message = f"`{name:.60}` of {where} must be {allowed}, got {spell(value)}"
            raise DeclarationError(message, hint="rows have sizes and constants of C++")
        if not name.isidentifier() or not name.isascii():
            message = f"{where} has a constant {spell(name)}, which is no name of C++"
            raise DeclarationError(message, hint="for example `min_blocks = 2`")
    yield from numbers.items()


def _fill(values: Mapping[str, int], axes: Axes, where: str) -> tuple[int, ...]:
    found: dict[str, int] = {}
    for axis in axes.of("holds"):
        value = values.get(axis.name, found.get(axis.default))
        if not value:
            got = "which it lacks" if value is None else "got `0`"
            message = f"`{axis.name}` of {where} must be a number above 0, {got}"
            raise DeclarationError(message, hint=f"for example `{axis.name} = 128`")
        found[axis.name] = value
    return tuple(found.values())


def _describe(kernel: tuple[Any, ...]) -> str:
    return " ".join(map(str, kernel[1:]))


def _require_stand_ins(told: Mapping[str, object], roles: Collection[str], where: str) -> None:
    for role, others in told.items():
        named = [role, *others] if isinstance(others, list) and others else [None]
        wrong = [one for one in named if one not in roles]
        if wrong:
            message = (
                f"{where} must be lists of roles by role, got `{role:.60} = {spell(others)[1:-1]}`"
            )
            raise DeclarationError(message, hint=f"the roles are {', '.join(roles)}")
