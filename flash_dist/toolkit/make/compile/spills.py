"""Finds the kernels of a build that spill registers although no exception allows it.

After compilation, all these kernels are reported at once, by their names in the source.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...binaries.demangle import demangle, short_name
from ...product import parse_toml
from ...targets.wording import count
from .ptxas import find_warnings, parse_ptxas

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_MANGLED: Final = re.compile(r"_Z[\w$.]+", re.ASCII)


@dataclass(frozen=True)
class SpillException:
    """An exception that lets some kernels spill up to `spill_bytes`."""

    symbol: str  # a pattern such as *_bwd_*_sm75
    spill_bytes: int
    reason: str

    def names(self, kernel: str) -> bool:
        """Tell if the exception covers a kernel: by its symbol, or by its name in the source."""
        readable = demangle(kernel)
        spellings = (kernel, readable, short_name(readable))
        return any(fnmatchcase(one, self.symbol) for one in spellings)


@dataclass(frozen=True)
class SpillVerdict:
    """The rejected kernels and warnings of a build; true if there are none."""

    lines: tuple[str, ...]  # one per rejected kernel, with its targets, or per warning
    spilling: int  # number of rejected kernels
    unused: tuple[str, ...]  # patterns of exceptions that match no kernel
    worst: str = ""  # pattern for the rejected kernel with the most spills
    most: int = 0  # spilled bytes of that kernel

    def __bool__(self) -> bool:
        return not self.lines

    @property
    def summary(self) -> str:
        """Describe the rejected kernels in a sentence."""
        spills = "spills" if self.spilling == 1 else "spill"
        warnings = count(len(self.lines) - self.spilling, "warning")
        told = [
            f"{count(self.spilling, 'kernel')} {spills} registers and may not"
            if self.spilling
            else "",
            f"ptxas gives {warnings} of C7510 to C7520, which no kernel may have"
            if len(self.lines) > self.spilling
            else "",
        ]
        return ", and ".join(filter(None, told))


def judge_spills(texts: Iterable[str], allowed: Sequence[SpillException]) -> SpillVerdict:
    """Check all output of `ptxas -v` of a build.

    Args:
        texts: The output of each run.
        allowed: Kernels that may spill.
    """
    spills: defaultdict[str, dict[str, int]] = defaultdict(dict)  # bytes by kernel and target
    warnings: dict[str, None] = {}
    for text in texts:
        warnings |= dict.fromkeys(map(_read, find_warnings(text)))
        for kernel in parse_ptxas(text):
            known = spills[kernel.symbol].get(kernel.target, 0)
            spills[kernel.symbol][kernel.target] = max(known, kernel.spill_bytes)
    refused: dict[str, str] = {}
    for symbol, by_target in spills.items():
        most = max(by_target.values())
        may = max((e.spill_bytes for e in allowed if e.names(symbol)), default=0) if most else 0
        if most > may:
            over = {target: size for target, size in by_target.items() if size > may}
            refused[symbol] = _describe(symbol, over, may)
    worst = max(refused, key=lambda one: max(spills[one].values()), default="")
    unused = [one.symbol for one in allowed if not any(map(one.names, spills))]
    return SpillVerdict(
        lines=(*refused.values(), *warnings),
        spilling=len(refused),
        unused=tuple(dict.fromkeys(unused)),
        worst=f"*{_name(worst).partition('<')[0]}*" if worst else "",
        most=max(spills[worst].values()) if worst else 0,
    )


def _name(symbol: str) -> str:
    return short_name(demangle(symbol))


def _describe(symbol: str, spills: Mapping[str, int], may: int) -> str:
    told = " and ".join(f"{size} bytes for {target}" for target, size in sorted(spills.items()))
    return f"{_name(symbol)} spills {told}{f', allowed are {may}' if may else ''}"


def _read(line: str) -> str:
    """Replace the mangled names in a line with the names in the source."""
    return _MANGLED.sub(lambda found: _name(found[0]), line.strip())


def load_exceptions(told: Path | Iterable[Mapping[str, Any]]) -> list[SpillException]:
    """Read the exceptions: rows, or a file with rows in TOML or JSON."""
    rows: Iterable[Mapping[str, Any]]
    if isinstance(told, Path):
        text = told.read_text(encoding="utf-8")
        data = json.loads(text) if told.suffix == ".json" else parse_toml(text)
        rows = data.get("exception", ())
    else:
        rows = told
    return [SpillException(**row) for row in rows]
