"""Decides from rules.toml alone whether code runs on a GPU, without flash_dist."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RULES: Final[dict[str, dict[str, Any]]] = {
    rule["id"]: rule
    for rule in tomllib.loads(Path(__file__).with_name("rules.toml").read_text("utf-8"))["rule"]
}
Number: TypeAlias = tuple[int, int]


def parse_number(text: str) -> Number:
    """Return 9.0 as (9, 0)."""
    major, minor = text.split(".")
    return int(major), int(minor)


@dataclass(frozen=True)
class Image:
    """A cubin, or PTX of an ISA, for one target."""

    number: Number
    suffix: str = ""
    isa: str = ""  # PTX ISA

    def __str__(self) -> str:
        """Return the name of the target, with the ISA of PTX."""
        name = f"{self.number[0]}{self.number[1]}{self.suffix}"
        return f"compute_{name} ({self.isa})" if self.isa else f"sm_{name}"


@dataclass(frozen=True)
class Library:
    """GPU code of a file."""

    name: str
    images: tuple[Image, ...]
    toolkit: str = ""  # the toolkit that compiled it, if known
    codec: str = "none"
    machine: str = "x86_64"
    of_tile: bool = False  # CUDA Tile kernels: their cubin headers lack the suffix


@dataclass(frozen=True)
class Case:
    """A GPU, its driver's branch and the environment variables that are set."""

    gpu: Number
    driver: int
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How code runs (native, jit, unpromised or no), and all obstacles that prevent it."""

    how: str
    obstacles: frozenset[str] = frozenset()


def write_isa(toolkit: str) -> str:
    """Return the ISA of the PTX that a toolkit writes."""
    return str(next(isa for isa, cuda, *_ in RULES["isa"]["history"] if cuda == toolkit))


def judge(library: Library, case: Case) -> Outcome:
    """Judge a library by the rules."""
    case = replace(case, gpu=_renumber(case.gpu))
    obstacles = {
        name
        for name, is_met in (
            ("begins", case.driver < _find_first(case.gpu)),
            ("ends", _is_dropped(case)),
            ("minor", bool(library.images) and case.driver < _need_driver(library)),
            (
                "compression",
                library.codec == "zstd" and case.driver < RULES["compression"]["first"],
            ),
        )
        if is_met
    }
    how, of_code = _choose(library.images, case)
    obstacles |= of_code
    return Outcome("no" if obstacles else how, frozenset(obstacles))


def _choose(images: tuple[Image, ...], case: Case) -> tuple[str, set[str]]:
    """Return how the driver would run one of the images, or why it runs none."""
    cubins = [image for image in images if not image.isa and _reaches(image, case.gpu)]
    promised = [image for image in cubins if not _is_tegra(image, case.gpu)]
    forced, disabled = _is_on("force", case), _is_on("disable", case)
    if promised and not forced:
        return "native", set()
    ptx = [image for image in images if image.isa and _reaches(image, case.gpu)]
    readable = [image for image in ptx if _need_isa(image) <= case.driver]
    if readable and not disabled:
        return ("jit" if any(map(_is_listed, readable)) else "unpromised"), set()
    if cubins and not forced:
        return "unpromised", set()
    reasons = {"force"} if cubins else set()
    if ptx:
        reasons |= {"disable"} if disabled else set()
        reasons |= {"isa"} if not readable else set()
    return "no", reasons or {"code"}


def _reaches(image: Image, gpu: Number) -> bool:
    """Tell if an image is for the GPU by number and suffix."""
    number = _renumber(image.number)
    if image.suffix == "a":
        return gpu == number
    if image.suffix == "f":
        return gpu in map(parse_number, RULES["family"]["members"][f"{number[0]}.{number[1]}"])
    return gpu >= number and (bool(image.isa) or gpu[0] == number[0])


def _renumber(number: Number) -> Number:
    """Return the number that newer releases use for a GPU."""
    text = f"{number[0]}.{number[1]}"
    return parse_number(RULES["isa"]["renumbered"].get(text, text))


def _is_tegra(image: Image, gpu: Number) -> bool:
    """Tell if the desktop rule does not apply, because one of the two is Tegra."""
    parts = set(map(parse_number, RULES["tegra"]["gpus"]))
    number = _renumber(image.number)
    return number != gpu and bool({number, gpu} & parts)


def _need_isa(image: Image) -> int:
    """Return the first driver branch for PTX of an ISA; for an unlisted ISA, one past the last."""
    rows = RULES["isa"]["history"]
    listed = (branch for isa, _, branch, _ in rows if isa == image.isa)
    return int(next(listed, rows[-1][2] + 1))


def _is_listed(image: Image) -> bool:
    return any(isa == image.isa for isa, *_ in RULES["isa"]["history"])


def _find_first(gpu: Number) -> int:
    """Return the first branch whose release lists the GPU; 0 for a GPU in no document."""
    rows = RULES["isa"]["history"]
    first = next((n for n, row in enumerate(rows) if gpu in _list_targets(row)), None)
    if first is None:
        return 0
    published = (row for row in rows[first:] if row[1] not in RULES["begins"]["unpublished"])
    return int(next(published)[2])


def _list_targets(row: list[Any]) -> set[Number]:
    return {_renumber(parse_number(target)) for target in row[3]}


def _is_dropped(case: Case) -> bool:
    rule = RULES["ends"]
    return case.gpu in map(parse_number, rule["gpus"]) and case.driver >= rule["last"] + 10


def _need_driver(library: Library) -> int:
    """Return the first branch that loads a toolkit's output, 0 if unknown."""
    return int(RULES["minor"]["first"].get(library.toolkit.split(".", maxsplit=1)[0], 0))


def _is_on(rule: str, case: Case) -> bool:
    """Tell if a pair of variables is on: the first that is set decides."""
    values = [case.variables[name] for name in RULES[rule]["variables"] if name in case.variables]
    return values[:1] == ["1"]
