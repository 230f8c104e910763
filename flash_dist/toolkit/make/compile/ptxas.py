"""Parses the output of `ptxas -v` on each kernel."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from dataclasses import asdict, dataclass, replace

from .gate import FRAME

_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
_PROPERTIES = re.compile(r"Function properties for (\S+)")
_USED = re.compile(r"Used (\d+) registers")
_SMEM = re.compile(r"(\d+) bytes smem")
# Notes such as C7510 and C7520: ptxas serialised wgmma, or added a missing fence. Both cost more
# than spills.
_REFUSED = re.compile(r"\(C75[12]\d\)")


@dataclass(frozen=True)
class KernelResources:
    """Resources of one kernel on one target."""

    symbol: str
    target: str
    registers: int = 0
    spill_bytes: int = 0
    stack_bytes: int = 0
    static_smem: int = 0

    def to_json(self) -> dict[str, object]:
        """Return the resources as data for JSON."""
        return asdict(self)


def parse_ptxas(text: str) -> list[KernelResources]:
    """Read the kernels in the output of one or several parallel ptxas runs.

    Lines of parallel runs may be mixed: the line of a stack frame counts for the first kernel of
    that name that has no frame yet. Frames of functions that were not inlined are ignored.
    """
    kernels: list[KernelResources] = []
    no_frame: defaultdict[str, deque[int]] = defaultdict(deque)
    no_registers: deque[int] = deque()
    frame_of = ""
    for line in text.splitlines():
        if match := _ENTRY.search(line):
            no_frame[match[1]].append(len(kernels))
            kernels.append(KernelResources(match[1], match[2]))
        elif match := _PROPERTIES.search(line):
            frame_of = match[1]
        elif (match := FRAME.search(line)) and no_frame[frame_of]:
            place = no_frame[frame_of].popleft()
            no_registers.append(place)
            spilled = max(int(match[2]), int(match[3]))
            kernels[place] = replace(kernels[place], stack_bytes=int(match[1]), spill_bytes=spilled)
        elif (match := _USED.search(line)) and no_registers:
            place = no_registers.popleft()
            smem = _SMEM.search(line)
            found = int(smem[1]) if smem else 0
            kernels[place] = replace(kernels[place], registers=int(match[1]), static_smem=found)
    return kernels


def find_warnings(text: str) -> list[str]:
    """Return the warnings of performance loss, which no kernel may have."""
    return [line for line in text.splitlines() if _REFUSED.search(line)]
