"""Address of the package index that has the releases, of product.json; commands take it from here.

A project without a public index has a placeholder: nothing is served from example.org, which RFC
2606 reserves for texts. Whatever prints a placeholder says so. The texts and pyproject.toml hold
the same address, and a test names each place that has another.
"""

from __future__ import annotations

from typing import Final

from ..product import PLACEHOLDER, PRODUCT

INDEX: Final = PRODUCT.index
_RESERVED: Final = ("//example.org/", PLACEHOLDER)


def index_of_set(name: str, index: str = INDEX) -> str:
    """Return the address of the index that has the wheels of one published set."""
    return f"{index}{name}/"


def explain_placeholder(index: str = INDEX) -> str:
    """Say what a placeholder stands for; an empty text for an address that is real."""
    if not any(one in index for one in _RESERVED):
        return ""
    return f"{index} is a placeholder for the address of an index that has this release"
