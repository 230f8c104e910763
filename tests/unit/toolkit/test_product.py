"""The name of a package stands in one place, and what the package brings is found by it."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.findings import FINDINGS, Entry
from flash_dist.toolkit.make.project import PACKAGE
from flash_dist.toolkit.product import NAME, PRODUCT, Product

if TYPE_CHECKING:
    from pathlib import Path

TOOLKIT = PACKAGE / "toolkit"
OURS = re.compile(r"flash[_-]dist", re.IGNORECASE)


def find_files() -> dict[str, Path]:
    """Return modules and data of the toolkit, by their paths in it."""
    paths = (path for path in sorted(TOOLKIT.rglob("*")) if "__pycache__" not in path.parts)
    return {path.relative_to(TOOLKIT).as_posix(): path for path in paths if path.is_file()}


@pytest.mark.parametrize("name", find_files())
def test_no_file_of_the_toolkit_holds_the_name_of_a_package(name: str) -> None:
    lines = (TOOLKIT / name).read_text(encoding="utf-8").splitlines()
    named = [f"{n}: {line.strip()}" for n, line in enumerate(lines, 1) if OURS.search(line)]
    assert not named


def test_the_product_of_this_package_is_read_from_its_file() -> None:
    data = json.loads((PACKAGE / "product.json").read_text(encoding="utf-8"))
    assert data["name"] == NAME == "flash_dist"
    assert data["library"] == f"lib{NAME}_kernels.so"  # as the build names it
    assert Product.from_json(data) == PRODUCT


def test_all_that_the_product_names_is_there() -> None:
    for variable in PRODUCT.variables:
        assert PRODUCT.load(variable.check)("") == ""
        assert PRODUCT.load(variable.check)("banana").startswith(variable.name)
        assert FINDINGS[variable.finding["id"]] == Entry(**variable.finding)
    assert callable(PRODUCT.load(PRODUCT.torch_note))
    assert callable(PRODUCT.load(PRODUCT.cases))
    assert all(PRODUCT.load(module).add_parser for module in PRODUCT.subcommands.values())
