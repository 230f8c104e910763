"""The tables of speed in the pages follow from the results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ci.speed import PAGES, TABLES, fill_page, main
from flash_dist.errors import FlashDistError
from flash_dist.toolkit.make.project import write_table

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_tables_of_a_page_are_those_of_the_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert fill_page(text) == text, "`python -m ci.speed --write` writes them again"


def test_every_table_is_in_a_page() -> None:
    texts = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert set(re.findall(r"<!-- ci\.speed: (\w+) -->", texts)) == set(TABLES)


def test_every_file_of_results_is_named_in_a_page() -> None:
    texts = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    found = set(re.findall(r"h200-[\w-]+\.json", texts))
    assert found == {path.name for path in (ROOT / "benchmarks" / "results").iterdir()}


def test_an_outdated_table_is_rewritten(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- ci.speed: calls -->\nold\n<!-- calls: end -->\nb\n", encoding="utf-8")
    assert main(["--write"], [page]) == 0
    assert page.read_text(encoding="utf-8").startswith("a\n<!-- ci.speed: calls -->\n| call |")
    assert "old" not in page.read_text(encoding="utf-8")


def test_a_table_without_an_end_is_refused() -> None:
    with pytest.raises(FlashDistError, match="calls: end"):
        fill_page("<!-- ci.speed: calls -->\nold\n")


def test_a_table_has_a_line_for_each_row() -> None:
    assert write_table(["a", "b"], [["1 ", "2"]]) == "| a | b |\n|---|---|\n| 1 | 2 |\n"
