"""The name of a package stands in one place, and what the package brings is found by it."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.findings import FINDINGS
from flash_dist.toolkit.make.project import ROOT
from flash_dist.toolkit.product import NAME, PRODUCT, Product
from tests.unit.made.sources import find_modules

if TYPE_CHECKING:
    from pathlib import Path

TOOLKIT = ROOT / "flash_dist" / "toolkit"
OURS = re.compile(r"flash[_-]dist", re.IGNORECASE)


@pytest.mark.parametrize(
    "module",
    [path for path in find_modules() if TOOLKIT in path.parents],
    ids=lambda path: str(path.relative_to(TOOLKIT)),
)
def test_no_module_of_the_toolkit_holds_the_name_of_a_package(module: Path) -> None:
    lines = module.read_text(encoding="utf-8").splitlines()
    named = [f"{n}: {line.strip()}" for n, line in enumerate(lines, 1) if OURS.search(line)]
    assert not named


def test_the_product_of_this_package_is_read_from_its_file() -> None:
    data = json.loads((ROOT / "flash_dist" / "product.json").read_text(encoding="utf-8"))
    assert data["name"] == NAME == "flash_dist"
    assert Product.from_json(data) == PRODUCT


def test_all_that_the_product_names_is_there() -> None:
    for variable in PRODUCT.variables:
        assert PRODUCT.load(variable.check)("") == ""
        assert PRODUCT.load(variable.check)("banana").startswith(variable.name)
        assert variable.finding in FINDINGS
    assert callable(PRODUCT.load(PRODUCT.torch_note))
    assert callable(PRODUCT.load(PRODUCT.cases))
    assert all(PRODUCT.load(module).add_parser for module in PRODUCT.subcommands.values())
