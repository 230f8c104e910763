"""What `ptxas -v` says about each kernel, and the rule that lets a kernel into a wheel."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from typing import TYPE_CHECKING

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SMEM = re.compile(r"(\d+) bytes smem")
# C7510 to C7520: products of a warpgroup are serialised, or a fence was put in where one was
# missing. Worse than spills.
_REFUSED = re.compile(r"\(C75[12]\d\)")


@dataclass(frozen=True)
class KernelResources:
    """What one kernel costs on one target."""

    symbol: str
    target: str
    registers: int = 0
    spill_bytes: int = 0
    stack_bytes: int = 0
    static_smem: int = 0

    def to_json(self) -> dict[str, object]:
        """Return the numbers as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class SpillException:
    """A written permission for some kernels to spill."""

    symbol: str  # a pattern such as *_bwd_*_sm75
    spill_bytes: int
    reason: str

    def covers(self, kernel: KernelResources) -> bool:
        """Whether this kernel may spill as much as it does."""
        return fnmatch(kernel.symbol, self.symbol) and kernel.spill_bytes <= self.spill_bytes


def parse_ptxas(text: str) -> list[KernelResources]:
    """Read the kernels out of the text of one ptxas run."""
    kernels: list[KernelResources] = []
    for line in text.splitlines():
        if match := _ENTRY.search(line):
            kernels.append(KernelResources(match[1], match[2]))
        elif kernels and (match := _FRAME.search(line)):
            spilled = max(int(match[2]), int(match[3]))
            # Functions that were not inlined have frames of their own: the kernel's comes first.
            if not kernels[-1].registers:
                kernels[-1] = replace(kernels[-1], stack_bytes=int(match[1]), spill_bytes=spilled)
        elif kernels and (match := _USED.search(line)):
            smem = _SMEM.search(line)
            found = int(smem[1]) if smem else 0
            kernels[-1] = replace(kernels[-1], registers=int(match[1]), static_smem=found)
    return kernels


def refusals(text: str, exceptions: Sequence[SpillException]) -> list[str]:
    """Return one sentence per reason not to ship what this ptxas run made."""
    found = [f"ptxas warns {line.strip()}" for line in text.splitlines() if _REFUSED.search(line)]
    return found + [
        f"{kernel.symbol} spills {kernel.spill_bytes} bytes for {kernel.target}, allowed are 0"
        for kernel in parse_ptxas(text)
        if kernel.spill_bytes and not any(e.covers(kernel) for e in exceptions)
    ]


def load_exceptions(path: Path | None) -> list[SpillException]:
    """Read the written exceptions, in TOML or JSON; without a file there are none."""
    if path is None:
        return []
    text = path.read_text(encoding="utf-8")
    data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    return [SpillException(**entry) for entry in data.get("exception", [])]


def ptxas_lines(text: str) -> list[str]:
    """Return the lines that ptxas wrote, without what other programs said."""
    return [x for x in text.splitlines() if x.startswith("ptxas") or _FRAME.search(x)]
