"""What a package brings of its own: its name, operators, selftest cases, variables, subcommands.

`product.json` says so, in the package that this toolkit is a folder of. A toolkit that is installed
by itself works for the project in the current folder, whose `pyproject.toml` has a table
`[tool.kernels]`, and anywhere else for no package. What a product names is imported when it is
needed: the toolkit itself imports nothing of the package.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from dataclasses import dataclass
from importlib import import_module, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

FILE_NAME: Final = "product.json"
IMPORTED_AS: Final = (__package__ or "").rpartition(".")[0]  # empty: installed by itself
FOLDER: Final = __package__ or ""  # the toolkit, as Python names it
BINDING: Final = "_C.abi3.so"
PLACEHOLDER: Final = "https://INDEX/"  # for the address of an index that a project does not name
TABLE: Final = "kernels"  # of pyproject.toml, below `tool`

CAPABILITY: Final = re.compile(r"[1-9][0-9]?\.[0-9]")
PACKAGE_NAME: Final = re.compile("(?=.{1,41}$)[a-z][a-z0-9]*(_[a-z0-9]+)*")


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
    axes: tuple[Mapping[str, Any], ...] = ()  # of its kernels, see `targets.axes`
    namespace: str = ""  # of C++; empty: the name
    oldest_gpu: str = ""  # compute capability; empty: the least that a word of the axes needs
    main_role: str = ""  # the role of kernels that reports name first
    operators: str = ""  # importing it registers the torch operators; empty: loading the binding
    cases: str = ""  # returns what chooses the cases of the selftest, see `selftest.case`
    variables: tuple[Variable, ...] = ()
    torch_note: str = ""  # says what `doctor -v` shows below torch, given GPUs and torch's version
    subcommands: Mapping[str, str] = dataclasses.field(default_factory=dict)  # by name: a module
    # What compiling its PTX takes, measured: with CUDA_MODULE_LOADING `lazy` and `eager`.
    jit_cost: Mapping[str, str] = dataclasses.field(default_factory=dict)
    built_with: str = (
        ""  # the toolkit, if it is no folder of the sources: see `make.wheels.run_time`
    )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Product:
        """Read plain data."""
        variables = tuple(Variable(name, **one) for name, one in data.get("variables", {}).items())
        return cls(**{**data, "axes": tuple(data.get("axes", ())), "variables": variables})

    @property
    def libraries(self) -> tuple[str, ...]:
        """The compiled files: kernels that a table lists are apart from the binding."""
        return tuple(dict.fromkeys((self.library, BINDING)))

    def load(self, reference: str) -> Any:  # noqa: ANN401 - whatever it names
        """Import a part of the package."""
        module, _, name = reference.partition(":")
        found = import_module(f"{IMPORTED_AS or FOLDER}.{module}")
        return getattr(found, name) if name else found


def package_of(project: str) -> str:
    """Return the import package that a project of this name has unless it names another."""
    return re.sub(r"[-_.]+", "_", project).lower()


def describe_product(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the product of a project as `product.json` has it.

    Args:
        data: Its `pyproject.toml`. What is malformed in it is left out: `make.declaration` says so.
    """
    project, own = _table(data, "project"), _table(_table(data, "tool"), TABLE)
    dispatch, urls = _table(own, "dispatch"), _table(project, "urls")
    told = _text(own, "package") or package_of(_text(project, "name"))
    name = told if PACKAGE_NAME.fullmatch(told) else "package"
    index = _text(own, "index") or _text(urls, "Index") or f"{PLACEHOLDER}{name}"
    return {
        "name": name,
        "library": f"lib{name}_kernels.so" if dispatch else BINDING,
        "summary": _text(project, "description") or f"CUDA kernels of {name}.",
        "index": f"{index.rstrip('/')}/",  # names of sets follow
        "namespace": space if PACKAGE_NAME.fullmatch(space := _text(own, "namespace")) else "",
        "axes": _axes(dispatch),
        "oldest_gpu": told if CAPABILITY.fullmatch(told := _text(own, "oldest_gpu")) else "",
        "main_role": _text(dispatch, "main_role"),
        "operators": _text(own, "operators"),
        "cases": _text(_table(own, "selftest"), "cases"),
        "variables": {},
        "torch_note": "",
        "subcommands": {},
        "jit_cost": {},
        "built_with": "",
    }


def _by_itself() -> Product:
    """Return the product of a toolkit that is installed by itself.

    It has no module of the project's package, whose wheel has its own toolkit.
    """
    subcommands = {"new": "make.scaffold", "requirements": "make.requirements"}
    if PROJECT_FOLDER is None:
        summary = "Build, inspect, audit and publish CUDA wheels."
        return Product(FOLDER, "", summary, PLACEHOLDER, subcommands=subcommands)
    told = describe_product(read_toml(PROJECT_FOLDER / "pyproject.toml"))
    return Product.from_json({**told, "operators": "", "cases": "", "subcommands": subcommands})


def _table(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = data.get(name)
    return found if isinstance(found, dict) else {}


def _text(data: Mapping[str, Any], name: str) -> str:
    """Return a line of text; an empty one of what is none."""
    found = data.get(name)
    return " ".join(found.split()) if isinstance(found, str) else ""


def _axes(dispatch: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return axes of the types that `targets.axes` reads; none if one is of others."""
    told = dispatch.get("axes")
    axes = told if isinstance(told, list) else []
    return axes if all(map(_is_axis, axes)) else []


def _is_axis(one: object) -> bool:
    if not isinstance(one, dict) or not one.keys() >= {"name", "rule"}:
        return False
    words = one.get("words", {})
    tables = [one, *words.values()] if isinstance(words, dict) else [None]
    return all(
        isinstance(table, dict)
        and (table is one or "floor" in table)
        and all(isinstance(value, str) for key, value in table.items() if key != "words")
        for table in tables
    )


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a text.

    Raises:
        ValueError: It is no TOML.
        ImportError: This Python 3.10 has no reader of it yet.
    """
    if sys.version_info >= (3, 11):
        import tomllib  # noqa: PLC0415 - no wheel needs it
    else:
        import tomli as tomllib  # noqa: PLC0415 - absent while the build backend judges the machine
    found: dict[str, Any] = tomllib.loads(text)
    return found


def read_toml(path: Path) -> dict[str, Any]:
    """Read a file; nothing where there is none, or none that can be read."""
    try:
        return parse_toml(path.read_text(encoding="utf-8"))
    except (ImportError, OSError, ValueError, RecursionError):
        return {}


def find_project(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of the project that a toolkit which is installed by itself works for.

    Raises:
        ValueError: A variable names a folder that no project is in.
    """
    named = environ.get(PROJECT_VARIABLE, "")
    folder = Path(named or ".")
    data = read_toml(folder / "pyproject.toml")
    if TABLE in _table(data, "tool"):
        return folder.resolve()
    if named:
        message = (
            f"{PROJECT_VARIABLE} names `{named:.200}`, and no `pyproject.toml` with a table "
            f"[tool.{TABLE}] can be read there\n\nhint: unset it, or name the folder of a project"
        )
        raise ValueError(message)
    return None


def _read_product() -> Product:
    if not IMPORTED_AS:
        return _by_itself()
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


PROJECT_VARIABLE: Final = (
    f"{FOLDER.upper()}_PROJECT"  # names the folder in place of the current one
)
PROJECT_FOLDER: Final = None if IMPORTED_AS else find_project()
PRODUCT: Final = _read_product()
NAME: Final = PRODUCT.name
PROGRAM: Final = f"python -m {NAME if IMPORTED_AS else FOLDER}"
SCRIPT: Final = NAME.replace("_", "-")  # the console script; also how indexes spell the name
VARIABLES: Final = f"{NAME.upper()}_"  # what the names of environment variables begin with
NAMESPACE: Final = PRODUCT.namespace or NAME  # of C++
SYMBOLS: Final = f"{NAME}_"  # what the names of kernels and of the C interface begin with
KERNELS: Final = PRODUCT.library
NO_CASES: Final = f"{NAME} declares no selftest"  # where PRODUCT.cases is empty
HAS_DISPATCHER: Final = KERNELS != BINDING  # a table lists kernels, in a library of their own
