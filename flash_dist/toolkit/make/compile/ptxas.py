"""What `ptxas -v` says about each kernel."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace

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


def find_warnings(text: str) -> list[str]:
    """Return the warnings of a loss of performance that no kernel may have."""
    return [line for line in text.splitlines() if _REFUSED.search(line)]


def ptxas_lines(text: str) -> list[str]:
    """Return the lines that ptxas wrote, without what other programs said."""
    return [x for x in text.splitlines() if x.startswith("ptxas") or _FRAME.search(x)]
