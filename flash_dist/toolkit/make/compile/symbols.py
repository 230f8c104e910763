"""Checks that no two objects define one mergeable symbol that mentions a kernel.

A host template that is instantiated for a kernel is a weak symbol, a static inside it a unique one.
If two targets shared it, the linker would keep one, and the wrong variant would be launched or
configured silently. So the target must be part of every such name.
"""

from __future__ import annotations

import subprocess
from collections import defaultdict
from typing import TYPE_CHECKING

from ...errors import KernelsError
from ...product import NAMESPACE, SYMBOLS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

MERGEABLE = frozenset("WVwvu")
# Mangled: a kernel's config and target are template arguments, its own name is plain C.
_CONFIG, _TARGET, _KERNEL = "Config", "TargetI", SYMBOLS


class SymbolError(KernelsError):
    """Objects that cannot be linked without mixing up targets."""


def mentions_kernel(symbol: str) -> bool:
    """Whether a mangled name belongs to a single kernel."""
    if NAMESPACE not in symbol:
        return False
    return _TARGET in symbol or _CONFIG in symbol or _KERNEL in symbol


def find_shared(definitions: Iterable[tuple[str, str, str]]) -> dict[str, list[str]]:
    """Return the mergeable kernel symbols with more than one object: (object, symbol, type)."""
    owners: defaultdict[str, list[str]] = defaultdict(list)
    for owner, symbol, kind in definitions:
        if kind in MERGEABLE and mentions_kernel(symbol):
            owners[symbol].append(owner)
    return {symbol: found for symbol, found in owners.items() if len(found) > 1}


def read_definitions(objects: Sequence[Path]) -> list[tuple[str, str, str]]:
    """Ask nm for the definitions in the objects."""
    command = ["nm", "--defined-only", "--format=posix", "--print-file-name", *map(str, objects)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        message = f"nm cannot read the objects: {done.stderr.strip()}"
        raise SymbolError(message)
    found = []
    for line in done.stdout.splitlines():
        owner, _, rest = line.partition(": ")
        symbol, kind, *_ = rest.split()
        found.append((owner, symbol, kind))
    return found


def check_symbols(objects: Sequence[Path]) -> int:
    """Raise if two objects share a kernel's symbol; return the number of such symbols."""
    definitions = read_definitions(objects)
    shared = find_shared(definitions)
    if shared:
        symbol, owners = next(iter(shared.items()))
        message = f"{len(shared)} symbols of kernels are defined twice: {symbol} by "
        raise SymbolError(
            message + " and ".join(owners),
            hint="make the target a template argument of whatever the symbol names",
        )
    return sum(kind in MERGEABLE and mentions_kernel(name) for _, name, kind in definitions)
