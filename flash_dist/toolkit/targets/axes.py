"""Axes that tell the kernels of one role apart, such as a dtype, a size and a tile.

A package declares its axes once, in `product.json`. The names of kernels, the records, reports and
verdicts, and the dispatcher are all derived from them. The rule of an axis says how a call finds
its kernel:

    equal   a word, such as a dtype: kernel and call have the same word
    holds   a number, such as a head_dim: the smallest compiled one that is not below the call's
    fits    the KB of shared memory of the tile: the largest that the GPU has room for
    last    kernels with the axis are tried after kernels without the axis; the name of the axis
            is part of family names
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args

from ..errors import KernelsError
from ..product import PRODUCT
from .devices import ANY_GPU, Device

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Rule = Literal["equal", "holds", "fits", "last"]
Value = str | int
RULES: Final[tuple[str, ...]] = get_args(Rule)
MOST: Final = 8  # maximum number of axes

_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,30}")
_WORD: Final = re.compile(r"[a-z]+[0-9]+")  # letters, then digits, so that symbols can be parsed
_SPELLING: Final = re.compile(r"[a-z_]{0,15}\{\}")


class AxesError(KernelsError, ValueError):
    """Axes that are not valid for a table of kernels."""


class KernelKey(NamedTuple):
    """A kernel as requested by a call: its role, and words and sizes in the order of the axes."""

    role: str
    words: tuple[str, ...]
    sizes: tuple[int, ...]


class Place(NamedTuple):
    """The values of a variant's axes. With its target, they identify the variant in its family."""

    words: tuple[str, ...]
    sizes: tuple[int, ...]
    plan: int  # KB of shared memory; 0 needs no opt-in


NOWHERE: Final = Place((), (), 0)  # for kernels of plain files, which have no axes


@dataclass(frozen=True)
class Word:
    """A value of an axis with the rule `equal`."""

    name: str
    floor: Device  # the first compute capability with its instructions
    part_of: str = ""  # a word that implies this one, so that messages omit this one

    @classmethod
    def from_json(cls, name: str, data: Mapping[str, Any]) -> Word:
        """Read the word from plain data.

        Raises:
            AxesError: The name is malformed.
            ArchError: The floor is not a compute capability.
        """
        if not _WORD.fullmatch(name):
            message = f"a word of an axis looks like `bf16`, got `{name:.60}`"
            raise AxesError(message)
        return cls(name, Device.parse(str(data["floor"])), str(data.get("part_of", "")))

    def to_json(self) -> dict[str, str]:
        """Return the word as plain data, without its name."""
        return {"floor": str(self.floor), **({"part_of": self.part_of} if self.part_of else {})}


@dataclass(frozen=True)
class Axis:
    """One axis of a package.

    Symbols omit the number of an axis if its `default` axis has the same number, or if the rule is
    `fits` and the number is 0.
    """

    name: str
    rule: Rule
    symbol: str = "{}"  # how symbols spell a number, such as "d{}"
    default: str = ""  # the axis whose value is used if this axis has none; empty: no axis
    words: tuple[Word, ...] = ()
    # Pairs, ascending: a number, and the first compute capability with room for kernels of at least
    # this number.
    floors: tuple[tuple[int, Device], ...] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Axis:
        """Read the axis from plain data. Ignore keys that a newer version wrote.

        Raises:
            AxesError: A name, the rule, the spelling in symbols or a floor is malformed.
        """
        words = tuple(Word.from_json(name, one) for name, one in data.get("words", {}).items())
        told = {name: str(data[name]) for name in ("name", "symbol", "default") if name in data}
        axis = cls(**told, rule=data["rule"], words=words, floors=_read_floors(data))
        if not _NAME.fullmatch(axis.name):
            message = f"the name of an axis looks like `head_dim`, got `{axis.name:.60}`"
            raise AxesError(message)
        if axis.rule not in RULES:
            message = (
                f"the rule of axis `{axis.name}` must be {_either(RULES)}, got {axis.rule!r:.60}"
            )
            raise AxesError(message)
        if not _SPELLING.fullmatch(axis.symbol):
            message = f"`{axis.name}` must be spelled as in `d{{}}`, got `{axis.symbol:.60}`"
            raise AxesError(message)
        return axis

    def to_json(self) -> dict[str, Any]:
        """Return the axis as plain data."""
        words = {word.name: word.to_json() for word in self.words}
        floors = {str(number): str(floor) for number, floor in self.floors}
        told = {"symbol": self.symbol, "default": self.default, "words": words, "floors": floors}
        given = {name: value for name, value in told.items() if value not in ("", "{}", {})}
        return {"name": self.name, "rule": self.rule, **given}

    def floor_of(self, number: int) -> Device:
        """Return the first compute capability with room for a number of this axis, or ANY_GPU."""
        return next((floor for least, floor in reversed(self.floors) if number >= least), ANY_GPU)


def _read_floors(data: Mapping[str, Any]) -> tuple[tuple[int, Device], ...]:
    floors = data.get("floors", {})
    wrong = next((one for one in floors if not one.isdecimal()), "")
    if wrong or (floors and data["rule"] != "holds"):
        got = f"`{wrong:.60}`" if wrong else f"rule `{data['rule']!s:.60}`"
        message = (
            f"`floors` of axis `{data['name']!s:.60}` need numbers and rule `holds`, got {got}"
        )
        raise AxesError(message, hint='as in `floors = { 384 = "8.0" }`')
    given = {int(number): Device.parse(str(floor)) for number, floor in floors.items()}
    return tuple(sorted(given.items()))


@dataclass(frozen=True)
class Axes:
    """All axes of a package, in the declared order."""

    every: tuple[Axis, ...]

    @classmethod
    def from_json(cls, data: Iterable[Mapping[str, Any]]) -> Axes:
        """Read the axes from plain data.

        Raises:
            AxesError: There are more than 8 axes, two axes of one name, or two axes with the rule
                `fits` or `last`; or the default of an axis is not an earlier axis with the rule
                `holds`.
        """
        axes = cls(tuple(map(Axis.from_json, data)))
        names = [axis.name for axis in axes.every]
        rules = [axis.rule for axis in axes.every]
        if len(names) > MOST:
            message = f"a package has at most {MOST} axes, got {len(names)}: {', '.join(names)}"
            raise AxesError(message, hint="leave out an axis on which all kernels have one value")
        if len(set(names)) < len(names) or any(rules.count(one) > 1 for one in ("fits", "last")):
            told = ", ".join(f"{axis.name} ({axis.rule})" for axis in axes.every)
            message = f"axes must have different names, one may be `fits`, one `last`, got {told}"
            twice = next((one for one in names if names.count(one) > 1), "")
            rename = f"rename one of the axes `{twice}`"
            hint = rename if twice else "several axes may be `equal` or `holds`"
            raise AxesError(message, hint=hint)
        sizes = [axis.name for axis in axes.of("holds")]
        for axis in axes.every:
            before = sizes[: sizes.index(axis.name)] if axis.name in sizes else []
            if axis.default and axis.default not in before:
                message = (
                    f"the default of axis `{axis.name}` must be an axis `holds` before it, "
                    f"got `{axis.default:.60}`"
                )
                allowed = " or ".join(f"`{name}`" for name in before)
                first = "leave it out: no axis `holds` comes before this one"
                raise AxesError(message, hint=f"name {allowed}" if before else first)
        return axes

    def to_json(self) -> list[dict[str, Any]]:
        """Return the axes as plain data."""
        return [axis.to_json() for axis in self.every]

    def of(self, rule: Rule) -> tuple[Axis, ...]:
        """Return the axes that have this rule."""
        return tuple(axis for axis in self.every if axis.rule == rule)

    @cached_property
    def sizes(self) -> tuple[str, ...]:
        """The names of the axes with the rule `holds`."""
        return tuple(axis.name for axis in self.of("holds"))

    @cached_property
    def key(self) -> tuple[str, ...]:
        """The names of the axes of a key: those with the rule `equal`, then `holds`."""
        return (*(axis.name for axis in self.of("equal")), *self.sizes)

    @cached_property
    def words(self) -> dict[str, Word]:
        """All values of axes with the rule `equal`, by name."""
        return {word.name: word for axis in self.of("equal") for word in axis.words}

    @cached_property
    def plan(self) -> str:
        """The name of the axis with the rule `fits`; empty if there is none."""
        return next((axis.name for axis in self.of("fits")), "")

    @cached_property
    def numbers(self) -> tuple[str, ...]:
        """The names of the axes with numbers: those with the rule `holds`, then `fits`."""
        return (*self.sizes, *(axis.name for axis in self.of("fits")))

    @cached_property
    def last(self) -> str:
        """The name of the axis with the rule `last`; empty if there is none."""
        return next((axis.name for axis in self.of("last")), "")

    def describe(self, place: Place | KernelKey) -> dict[str, Value]:
        """Return the values by axis name, as in JSON.

        A kernel without axes has no values.
        """
        if not (place.words or place.sizes):
            return {}
        values: dict[str, Value] = dict(zip(self.key, (*place.words, *place.sizes), strict=True))
        if self.plan and isinstance(place, Place):
            values[self.plan] = place.plan
        return values

    def place(self, values: Mapping[str, Any]) -> Place:
        """Read the values of the axes from a mapping by axis name.

        An absent value is copied from the axis that `default` names, or is 0 for the rule `fits`.
        If all values are absent, return NOWHERE: the kernel has no axes.

        Raises:
            KeyError: An axis without a default has no value.
            TypeError: A value is not valid for its axis.
        """
        found: dict[str, Any] = {}
        if not any(axis.name in values for axis in self.every):
            return NOWHERE
        for axis in self.every:
            if axis.rule == "last":
                continue
            value = values.get(axis.name)
            if value is None:
                value = found[axis.default] if axis.default else 0 if axis.rule == "fits" else None
            if value is None:
                raise KeyError(axis.name)
            kind = str if axis.rule == "equal" else int
            if not isinstance(value, kind) or isinstance(value, bool):
                message = f"`{axis.name}` must be {kind.__name__}, got {value!r:.60}"
                raise TypeError(message)
            found[axis.name] = value
        words = tuple(found[axis.name] for axis in self.of("equal"))
        return Place(words, tuple(found[name] for name in self.sizes), found.get(self.plan, 0))

    def read_key(self, data: Mapping[str, Any]) -> KernelKey:
        """Read the key of a kernel, including its role, from plain data."""
        place = self.place(data)
        return KernelKey(str(data["role"]), place.words, place.sizes)

    def rank(self, key: KernelKey) -> tuple[bool, str, list[int]]:
        """Return a sort key for kernels: the package's main role first, words in declared order."""
        known = list(self.words)
        order = [known.index(word) if word in known else len(known) for word in key.words]
        return key.role != PRODUCT.main_role, key.role, order

    def spell(self, place: Place) -> str:
        """Return the values in the form of symbols: `bf16_d192v128_smem64`."""
        plan = "".join(axis.symbol.format(place.plan) for axis in self.of("fits") if place.plan)
        return "_".join(filter(None, [*place.words, self.spell_sizes(place.sizes)])) + plan

    def spell_sizes(self, sizes: tuple[int, ...]) -> str:
        """Return the sizes in the form of symbols: `d192v128`."""
        told = dict(zip(self.sizes, sizes, strict=True))
        axes = (a for a in self.of("holds") if not a.default or told[a.name] != told[a.default])
        return "".join(axis.symbol.format(told[axis.name]) for axis in axes)

    def read_symbol(self, symbol: str, prefix: str) -> tuple[str, Place] | None:
        """Return family and values of `PREFIX_fwd_bf16_d64_smem64_sm90a`; None for other forms."""
        found = re.fullmatch(re.escape(prefix) + self._pattern, symbol)
        if found is None:
            return None
        words = {axis.name: found[axis.name] for axis in self.of("equal")}
        numbers = {name: int(found[name]) for name in self.numbers if found[name]}
        return found["family"], self.place({**words, **numbers})

    @cached_property
    def _pattern(self) -> str:
        def number(axis: Axis) -> str:
            before, after = map(re.escape, axis.symbol.split("{}"))
            text = f"{before}(?P<{axis.name}>[0-9]{{1,6}}){after}"
            return f"(?:{text})?" if axis.default or axis.rule == "fits" else text

        words = "".join(f"_(?P<{axis.name}>{_WORD.pattern})" for axis in self.of("equal"))
        sizes = "".join(map(number, self.of("holds")))
        plan = "".join(map(number, self.of("fits")))
        between = "_" if sizes else ""
        return rf"(?P<family>\w+){words}{between}{sizes}{plan}_(?:sm|compute)[0-9]+[af]?"

    def role_of(self, family: str) -> str:
        """Return a family's role: `fwd` for `fwd`, `fwd_sm90` and `fwd_scored_sm90`.

        The generator requires that the name of a family for some targets ends with a suffix such as
        `_sm90`. If its kernels have the axis with the rule `last`, the axis name comes before the
        suffix. Any other family is the general family of its role.
        """
        return self._for_target.sub("", family)

    def comes_last(self, family: str) -> bool:
        """Tell if the kernels of a family have the axis with the rule `last`."""
        found = self._for_target.search(family)
        return found is not None and found[1] is not None

    @cached_property
    def _for_target(self) -> re.Pattern[str]:
        return re.compile(rf"(_{self.last or '(?!)'})?_sm[0-9]+$")


def is_plain(key: KernelKey) -> bool:
    """Tell if a kernel is from a plain .cu file: it has no axes, and its role is the file stem."""
    return not (key.words or key.sizes)


def name_kernel(key: KernelKey) -> str:
    """Name a kernel in a line of text: `fwd bf16 192/128`."""
    return " ".join(filter(None, [key.role, *key.words, name_sizes(key.sizes)]))


def name_sizes(sizes: Iterable[int]) -> str:
    """Name the sizes that a kernel is compiled for: `128`, `192/128`."""
    texts = list(map(str, sizes))
    return "/".join(texts[:1] if len(set(texts)) == 1 else texts)


def smallest_size(
    sizes: Iterable[tuple[int, ...]], asked: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return the smallest compiled sizes that hold the sizes of a call; None if none do.

    The sizes with the smallest sum are chosen and, if sums are equal, with the smallest last size:
    a call with 160 and 128 uses 192/128 and not 160/160.
    """
    holding = (one for one in sizes if all(a >= b for a, b in zip(one, asked, strict=True)))
    return min(holding, key=lambda one: (sum(one), one[::-1]), default=None)


def _either(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}"


AXES: Final = Axes.from_json(PRODUCT.axes)
