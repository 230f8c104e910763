"""Description of a package: its name, operators, selftest cases, variables and subcommands.

The description is read from `product.json` in the package that contains this toolkit. A standalone
toolkit, which is in no package, serves the project in the current folder, if its `pyproject.toml`
has a table `[tool.kernels]`; otherwise it serves no package. Parts that the description names are
imported on first use: the toolkit itself imports nothing of the package.
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
IMPORTED_AS: Final = (__package__ or "").rpartition(".")[0]  # the package; empty: standalone
FOLDER: Final = __package__ or ""  # import name of the toolkit
BINDING: Final = "_C.so"
PLACEHOLDER: Final = "https://INDEX/"  # default index address of a project that names none
TABLE: Final = "kernels"  # the table `[tool.kernels]` of pyproject.toml

CAPABILITY: Final = re.compile(r"[1-9][0-9]?\.[0-9]")
PACKAGE_NAME: Final = re.compile("(?=.{1,41}$)[a-z][a-z0-9]*(_[a-z0-9]+)*")


@dataclass(frozen=True)
class Variable:
    """An environment variable of the package."""

    name: str
    check: str  # names a function that returns what is wrong with a value, or ""
    finding: Mapping[str, Any]  # the fields of an `Entry` for a wrong value


@dataclass(frozen=True)
class Product:
    """Description of a package; its parts are named `module` or `module:function` within it."""

    name: str  # name of the distribution, and namespace of its torch operators
    library: str  # file name of the library that has the kernels
    summary: str  # one sentence: the `description` in its pyproject.toml
    index: str  # address of the package index with the releases
    axes: tuple[Mapping[str, Any], ...] = ()  # axes of its kernels, see `targets.axes`
    namespace: str = ""  # C++ namespace; empty: same as `name`
    oldest_gpu: str = ""  # compute capability; empty: the lowest that any axis needs
    main_role: str = ""  # the kernel role named first in reports
    operators: str = ""  # module that registers the torch operators; empty: load the binding
    cases: str = ""  # part that returns a function to choose selftest cases, see `selftest.case`
    variables: tuple[Variable, ...] = ()
    torch_note: str = ""  # function that returns the note below torch in `doctor -v`
    # Module of each subcommand, by its name.
    subcommands: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Measured cost of compiling its PTX with CUDA_MODULE_LOADING `lazy` and `eager`.
    jit_cost: Mapping[str, str] = dataclasses.field(default_factory=dict)
    built_with: str = (
        ""  # name of the toolkit that built it; empty if its own sources contain the toolkit
    )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Product:
        """Read the product from plain data."""
        variables = tuple(Variable(name, **one) for name, one in data.get("variables", {}).items())
        return cls(**{**data, "axes": tuple(data.get("axes", ())), "variables": variables})

    @property
    def libraries(self) -> tuple[str, ...]:
        """File names of the compiled libraries; the binding is last, or the only one."""
        return tuple(dict.fromkeys((self.library, BINDING)))

    def load(self, reference: str) -> Any:  # noqa: ANN401 - whatever it names
        """Import the module, or the function of a module, that a reference names."""
        module, _, name = reference.partition(":")
        found = import_module(f"{IMPORTED_AS or FOLDER}.{module}")
        return getattr(found, name) if name else found


def package_of(project: str) -> str:
    """Return the default import package of a project with this name."""
    return re.sub(r"[-_.]+", "_", project).lower()


def describe_product(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a project in the form of `product.json`.

    Args:
        data: The `pyproject.toml` of the project. Malformed parts are left out; `make.declaration`
            reports them.
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
        "index": f"{index.rstrip('/')}/",  # the name of an arch set follows
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
    """Return the product of a standalone toolkit: the project that it serves, or else itself.

    Operators and cases are left out: the toolkit in the wheel of the project loads them.
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
    """Return a value as one line of text; empty if it is not a text."""
    found = data.get(name)
    return " ".join(found.split()) if isinstance(found, str) else ""


def _axes(dispatch: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the axes if they have the types that `targets.axes` reads, else an empty list."""
    told = dispatch.get("axes")
    axes = told if isinstance(told, list) else []
    return axes if all(map(_is_axis, axes)) else []


def _is_axis(one: object) -> bool:
    if not isinstance(one, dict) or not one.keys() >= {"name", "rule"}:
        return False
    tables = {"words": one.get("words", {}), "floors": one.get("floors", {})}
    told = {key: value for key, value in one.items() if key not in tables}
    if not all(isinstance(table, dict) for table in tables.values()):
        return False
    words = tables["words"].values()
    return all(isinstance(word, dict) and "floor" in word for word in words) and all(
        isinstance(value, str)
        for table in (told, tables["floors"], *words)
        for value in table.values()
    )


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a text in TOML.

    Raises:
        ValueError: The text is not TOML.
        ImportError: This Python 3.10 has no TOML parser.
    """
    if sys.version_info >= (3, 11):
        import tomllib  # noqa: PLC0415 - no wheel needs it
    else:
        import tomli as tomllib  # noqa: PLC0415 - missing while the build backend examines the machine
    found: dict[str, Any] = tomllib.loads(text)
    return found


def read_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file. Return an empty table if it is absent or unreadable."""
    try:
        return parse_toml(path.read_text(encoding="utf-8"))
    except (ImportError, OSError, ValueError, RecursionError):
        return {}


def find_project(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of the project that a standalone toolkit serves; None if there is none.

    Raises:
        ValueError: PROJECT_VARIABLE names a folder without a readable table [tool.kernels].
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
    f"{FOLDER.upper()}_PROJECT"  # variable with the folder to use instead of the current one
)
PROJECT_FOLDER: Final = None if IMPORTED_AS else find_project()
PRODUCT: Final = _read_product()
NAME: Final = PRODUCT.name
PROGRAM: Final = f"python -m {NAME if IMPORTED_AS else FOLDER}"
SCRIPT: Final = NAME.replace("_", "-")  # the console script; also how indexes spell the name
VARIABLES: Final = f"{NAME.upper()}_"  # prefix of environment variables
NAMESPACE: Final = PRODUCT.namespace or NAME  # C++ namespace
SYMBOLS: Final = f"{NAME}_"  # prefix of kernel names and of the C interface
KERNELS: Final = PRODUCT.library
NO_CASES: Final = f"{NAME} declares no selftest"  # used if PRODUCT.cases is empty
HAS_DISPATCHER: Final = KERNELS != BINDING  # kernels of a table have their own library
