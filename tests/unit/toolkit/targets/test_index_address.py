"""The address of the index: one value, which every text and pyproject.toml repeat."""

from __future__ import annotations

import re

from flash_dist.toolkit.make.project import ROOT, read_pyproject
from flash_dist.toolkit.targets.index_address import INDEX, explain_placeholder, index_of_set

ADDRESS = re.compile(r"https?://(?:[\w-]+\.)*example\.org[^\s\"'`)]*")


def test_a_placeholder_is_explained_and_a_real_address_is_not() -> None:
    assert explain_placeholder("https://example.org/x/").startswith("https://example.org/x/ is a ")
    assert explain_placeholder("https://wheels.example.com/") == ""


def test_the_index_of_a_set_is_a_folder_below_the_address() -> None:
    assert INDEX.startswith("https://")
    assert INDEX.endswith("/")
    assert index_of_set("hopper") == f"{INDEX}hopper/"


def test_the_addresses_of_the_project_are_the_index() -> None:
    urls = read_pyproject()["project"]["urls"]
    assert list(urls) == ["Homepage", "Documentation", "Source", "Issues", "Changelog"]
    assert all(url.startswith(INDEX) for url in urls.values())


def test_every_text_names_the_same_index() -> None:
    texts = [*ROOT.glob("*.md"), *ROOT.glob("*.cff"), *ROOT.glob("docs/*.md")]
    assert len(texts) > 20
    found = [
        f"{path.relative_to(ROOT)}: {address}"
        for path in texts
        for address in ADDRESS.findall(path.read_text(encoding="utf-8"))
        if not address.startswith(INDEX)
    ]
    assert found == []


def test_no_module_holds_the_address() -> None:
    modules = [*ROOT.glob("flash_dist/**/*.py"), *ROOT.glob("ci/**/*.py"), ROOT / "noxfile.py"]
    holders = [
        path.relative_to(ROOT).as_posix()
        for path in modules
        if ADDRESS.search(path.read_text(encoding="utf-8"))
    ]
    assert not holders
