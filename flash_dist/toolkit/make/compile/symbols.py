"""Checks the names that objects define, before or after they are linked.

No two objects may define the same mergeable symbol that mentions a kernel. A host template that is
instantiated for a kernel is a weak symbol, and a static variable inside the template is a unique
symbol. If two targets shared a symbol, the linker would keep one, and the wrong variant would be
launched or configured silently. So the target must be part of every such name.

No two files of a library may define the same function. Only compiled objects show this: a name
depends on macros, conditions, namespaces, templates and the types of arguments.
"""

from __future__ import annotations

import subprocess
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from ...binaries.demangle import demangle
from ...errors import KernelsError
from ...product import NAMESPACE, SYMBOLS
from ...targets.wording import list_few

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MERGEABLE = frozenset("WVwvu")
STRONG = frozenset("TDBR")  # nm's types of symbols that a library may define only once
_MOST_SHOWN = 3
# Part of the name of nvcc's host function for a kernel. The kernel's name follows it.
_STUB = "__device_stub_"
# Parts of mangled names: the template arguments Config and Target, or the start of a C name.
_CONFIG, _TARGET, _KERNEL = "Config", "TargetI", SYMBOLS


class SymbolError(KernelsError):
    """Two objects define the same symbol, or nm cannot read an object."""


def mentions_kernel(symbol: str) -> bool:
    """Tell if a mangled name belongs to a single kernel."""
    if NAMESPACE not in symbol:
        return False
    return _TARGET in symbol or _CONFIG in symbol or _KERNEL in symbol


def find_shared(definitions: Iterable[tuple[str, str, str]]) -> dict[str, list[str]]:
    """Return the mergeable kernel symbols that several objects define, with these objects.

    Args:
        definitions: (object, symbol, type) of each definition.
    """
    owners: defaultdict[str, list[str]] = defaultdict(list)
    for owner, symbol, kind in definitions:
        if kind in MERGEABLE and mentions_kernel(symbol):
            owners[symbol].append(owner)
    return {symbol: found for symbol, found in owners.items() if len(found) > 1}


def read_definitions(objects: Sequence[Path]) -> list[tuple[str, str, str]]:
    """Ask nm for (object, symbol, type) of each definition in the objects."""
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
    """Check that no two objects define the same mergeable symbol of a kernel.

    Returns:
        The number of mergeable symbols of kernels.

    Raises:
        SymbolError: Two objects define the same mergeable symbol of a kernel.
    """
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


def require_distinct(sources: Mapping[Path, str]) -> None:
    """Check that the objects of a library define each function and variable once.

    Args:
        sources: The objects, each with the name of its source.

    Raises:
        SymbolError: Two files define the same function or variable.
    """
    owners: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for owner, symbol, kind in read_definitions(list(sources)):
        if kind in STRONG and _STUB not in symbol:
            owners[symbol][sources[Path(owner)]] = None
    shared = {symbol: tuple(files) for symbol, files in owners.items() if len(files) > 1}
    if shared:
        files = next(iter(shared.values()))
        names = sorted(f"`{demangle(name)}`" for name, found in shared.items() if found == files)
        places = " and ".join(f"`{one}`" for one in files)
        message = f"{len(files)} files define {list_few(names, _MOST_SHOWN)}: {places}"
        hint = "rename it in one, make it `static`, or `inline` if it is in a header"
        raise SymbolError(message, hint=hint)
