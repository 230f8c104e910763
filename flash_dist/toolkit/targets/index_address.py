"""Address of the package index with the releases, from product.json, for printed commands.

A project without a public index has a placeholder: example.org serves nothing, because RFC 2606
reserves it for documentation. Every text with a placeholder says that it is one. The docs and
pyproject.toml contain the same address; a test reports any other address.
"""

from __future__ import annotations

from typing import Final

from ..product import PLACEHOLDER, PRODUCT

INDEX: Final = PRODUCT.index
_RESERVED: Final = ("//example.org/", PLACEHOLDER)


def index_of_set(name: str, index: str = INDEX) -> str:
    """Return the address of the index with the wheels of one published set."""
    return f"{index}{name}/"


def explain_placeholder(index: str = INDEX) -> str:
    """Return a sentence that says that an address is a placeholder; empty for a real address."""
    if not any(one in index for one in _RESERVED):
        return ""
    return f"{index} is a placeholder for the address of an index that has this release"
