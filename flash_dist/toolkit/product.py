"""What a package brings of its own: its name, operators, selftest cases, variables, subcommands.

`product.json` says so, in the package that this toolkit is a folder of. What it names is imported
when it is needed: the toolkit itself imports nothing of the package.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import import_module, resources
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

FILE_NAME: Final = "product.json"
IMPORTED_AS: Final = (__package__ or "").rpartition(".")[0]


@dataclass(frozen=True)
class Variable:
    """An environment variable of the package."""

    name: str
    check: str  # a function that says what is wrong with a value; it returns "" if nothing is
    finding: Mapping[str, Any]  # for such a value: the fields of an `Entry`


@dataclass(frozen=True)
class Product:
    """The package. Parts of it are named `module` or `module:function`, relative to it."""

    name: str  # of the distribution, and of the namespace of its torch operators
    library: str  # file of the kernels; a copy under another name has one of its own
    summary: str  # the first sentence of its README
    index: str  # address of the package index that has the releases
    axes: tuple[Mapping[str, Any], ...]  # of its kernels, see `targets.axes`
    main_role: str  # the role of kernels that reports name first
    operators: str  # importing it registers the torch operators
    cases: str  # returns what chooses the cases of the selftest, see `selftest.case.ChooseCases`
    variables: tuple[Variable, ...]
    torch_note: str  # says what `doctor -v` shows below torch, given GPUs and torch's version
    subcommands: Mapping[str, str]  # by name: a module with `add_parser`

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Product:
        """Read plain data."""
        variables = tuple(Variable(name, **one) for name, one in data["variables"].items())
        return cls(**{**data, "axes": tuple(data["axes"]), "variables": variables})

    def load(self, reference: str) -> Any:  # noqa: ANN401 - whatever it names
        """Import a part of the package."""
        module, _, name = reference.partition(":")
        found = import_module(f"{IMPORTED_AS}.{module}")
        return getattr(found, name) if name else found


def _read_product() -> Product:
    try:
        text = resources.files(IMPORTED_AS).joinpath(FILE_NAME).read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or error
        message = (
            f"`{IMPORTED_AS}` is incomplete: `{FILE_NAME}` cannot be read: {reason}"
            "\n\nhint: `pip install --force-reinstall --no-deps` the wheel again"
        )
        raise ImportError(message) from error
    return Product.from_json(json.loads(text))


PRODUCT: Final = _read_product()
NAME: Final = PRODUCT.name
PROGRAM: Final = f"python -m {NAME}"
SCRIPT: Final = NAME.replace("_", "-")  # the console script; also how indexes spell the name
VARIABLES: Final = f"{NAME.upper()}_"  # what the names of environment variables begin with
SYMBOLS: Final = f"{NAME}_"  # what the names of kernels and of the C interface begin with
KERNELS: Final = PRODUCT.library
BINDING: Final = "_C.abi3.so"
