"""The name of a package is in one place, through which its parts are found."""

from __future__ import annotations

import copy
import json
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from flash_dist.toolkit import product
from flash_dist.toolkit.errors import ArchError
from flash_dist.toolkit.findings import FINDINGS, Entry
from flash_dist.toolkit.make.project import PACKAGE
from flash_dist.toolkit.product import (
    NAME,
    PRODUCT,
    PROJECT_VARIABLE,
    Product,
    describe_product,
    find_project,
)
from flash_dist.toolkit.targets.axes import Axes, AxesError
from tests.unit.made.projects import AXES, PYPROJECT, put, write

if TYPE_CHECKING:
    from pathlib import Path

TOOLKIT = PACKAGE / "toolkit"
OURS = re.compile(r"flash[_-]dist", re.IGNORECASE)


def find_files() -> dict[str, Path]:
    """Return modules and data of the toolkit by relative path."""
    built = {"__pycache__", "build", "fatwheel.egg-info"}  # two are of `pip install ./toolkit`
    paths = {path.relative_to(TOOLKIT): path for path in sorted(TOOLKIT.rglob("*"))}
    return {
        name.as_posix(): path
        for name, path in paths.items()
        if path.is_file() and not built & set(name.parts)
    }


@pytest.mark.parametrize("name", find_files())
def test_no_file_of_the_toolkit_holds_the_name_of_a_package(name: str) -> None:
    lines = (TOOLKIT / name).read_text(encoding="utf-8").splitlines()
    named = [f"{n}: {line.strip()}" for n, line in enumerate(lines, 1) if OURS.search(line)]
    assert not named


def test_the_product_of_this_package_is_read_from_its_file() -> None:
    data = json.loads((PACKAGE / "product.json").read_text(encoding="utf-8"))
    assert data["name"] == NAME == "flash_dist"
    assert data["library"] == f"lib{NAME}_kernels.so"  # the name in the build
    assert Product.from_json(data) == PRODUCT


def test_all_that_the_product_names_is_there() -> None:
    for variable in PRODUCT.variables:
        assert PRODUCT.load(variable.check)("") == ""
        assert PRODUCT.load(variable.check)("banana").startswith(variable.name)
        assert FINDINGS[variable.finding["id"]] == Entry(**variable.finding)
    assert callable(PRODUCT.load(PRODUCT.torch_note))
    assert callable(PRODUCT.load(PRODUCT.cases))
    assert all(PRODUCT.load(module).add_parser for module in PRODUCT.subcommands.values())


def test_a_project_is_described_by_its_table() -> None:
    data = copy.deepcopy(PYPROJECT)
    put(data, "/project.description", "Norms, fast.")
    described = describe_product(data)
    assert described.keys() == Product.__dataclass_fields__.keys()
    assert Product.from_json(described) == Product(
        name="my_norms",
        library="libmy_norms_kernels.so",
        summary="Norms, fast.",
        index="https://example.org/my_norms/",
        axes=tuple(AXES),
        namespace="my_norms",
        oldest_gpu="8.0",
        main_role="rms",
        operators="ops",
        cases="selftest:load_cases",
    )


def test_a_wheel_reads_what_its_project_is_described_as() -> None:
    described = describe_product(PYPROJECT)
    read = Product.from_json(json.loads(json.dumps(described)))
    assert read == Product.from_json(described)
    assert Axes.from_json(read.axes) == Axes.from_json(AXES)


def test_absent_fields_have_a_default() -> None:
    data = {"project": {"name": "My-Norms"}, "tool": {"kernels": {}}}
    assert Product.from_json(describe_product(data)) == Product(
        name="my_norms",
        library="_C.so",  # there is no table of kernels
        summary="CUDA kernels of my_norms.",
        index="https://INDEX/my_norms/",
    )


@pytest.mark.parametrize(
    ("place", "address"),
    [
        ("index", "https://a.org/x"),
        ("index", "https://a.org/x/"),
        ("/project.urls", "https://a.org/x"),
    ],
)
def test_the_address_of_a_set_follows_that_of_the_index(place: str, address: str) -> None:
    data = copy.deepcopy(PYPROJECT)
    put(data, "index", ...)
    put(data, place, {"Index": address} if place.startswith("/") else address)
    assert describe_product(data)["index"] == "https://a.org/x/"


ODD: list[Any] = [
    None,
    True,
    3,
    1.5,
    "",
    "x",
    "a\nb",
    [],
    [3],
    ["x"],
    [{}],
    {},
    {"a": 1},
    {"a": {}},
]


def list_places(data: object, place: str = "/") -> list[str]:
    items: Any = list(data.items()) if isinstance(data, dict) else []
    items = enumerate(data) if isinstance(data, list) else items
    found = []
    for key, value in items:
        found += [f"{place}{key}", *list_places(value, f"{place}{key}.")]
    return found


@pytest.mark.parametrize(
    "place", [*list_places(PYPROJECT), "/project.description", "/project.urls"]
)
def test_a_malformed_table_has_a_product_all_the_same(place: str) -> None:
    for value in ODD:
        data = copy.deepcopy(PYPROJECT)
        put(data, place, value)
        read = Product.from_json(json.loads(json.dumps(describe_product(data))))
        texts = (read.summary, read.index, read.main_role, read.operators, read.cases)
        assert all("\n" not in text for text in texts)
        with suppress(ArchError, AxesError):  # both are a ValueError, which __main__.py reports
            Axes.from_json(read.axes)


@pytest.mark.parametrize(
    "data", [{}, {"tool": 3}, {"tool": {"kernels": 3}}, {"project": []}], ids=str
)
def test_no_table_has_a_product_all_the_same(data: dict[str, Any]) -> None:
    assert describe_product(data)["name"] == "package"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"[tool.kernels]", True),
        (b"[tool.kernels", False),
        (b"tool = 3", False),
        (b"[project]", False),
        (b"\xff\xfe[tool.kernels]", False),
        (b"\xef\xbb\xbf[tool.kernels]", False),
        (b"a = " + b"[" * 100_000, False),
        (None, False),
    ],
    ids=["a table", "no TOML", "no table tool", "no table", "no UTF-8", "a mark", "deep", "none"],
)
def test_a_project_is_a_folder_whose_table_can_be_read(
    text: bytes | None, *, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / "pyproject.toml").write_bytes(text)
    assert find_project({}) == (tmp_path if found else None)
    assert find_project({PROJECT_VARIABLE: ""}) == (tmp_path if found else None)


def test_a_variable_names_another_project(tmp_path: Path) -> None:
    write(tmp_path / "pyproject.toml", "[tool.kernels]")
    assert find_project({PROJECT_VARIABLE: str(tmp_path)}) == tmp_path
    nowhere = {PROJECT_VARIABLE: str(tmp_path / "other")}
    with pytest.raises(ValueError, match=r"names `.*other`, and no `pyproject.toml` with a table"):
        find_project(nowhere)


def test_a_toolkit_by_itself_is_the_product_of_the_project_it_works_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        tmp_path / "pyproject.toml",
        '[project]\nname = "my-norms"\n[tool.kernels]\noperators = "ops"',
    )
    for folder, name in ((tmp_path, "my_norms"), (None, product.FOLDER)):
        monkeypatch.setattr(product, "PROJECT_FOLDER", folder)
        found = product._by_itself()
        assert (found.name, found.operators) == (name, "")
        assert found.subcommands.keys() == {"new", "requirements"}
