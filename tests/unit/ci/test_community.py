"""Files of the repository for reports, citations and dependencies: the forms of GitHub."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from flash_dist.toolkit.cli import SUBCOMMANDS, make_parser
from flash_dist.toolkit.make.project import PYPROJECT, ROOT, read_pyproject

if TYPE_CHECKING:
    from pathlib import Path

BUG = ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml"
GPU = ROOT / ".github" / "ISSUE_TEMPLATE" / "gpu.yml"
SECURITY = ROOT / "SECURITY.md"
ASKED = re.compile(r"`python -m flash_dist ([^`]+)`")


def read(path: str) -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))
    return data


@pytest.mark.parametrize("path", [BUG, GPU, SECURITY], ids=lambda path: path.name)
def test_commands_in_the_issue_forms_exist(path: Path) -> None:
    asked = ASKED.findall(path.read_text(encoding="utf-8"))
    assert any(words.startswith("doctor --report report.html") for words in asked)
    assert path == SECURITY or "--save record.json" in " ".join(asked)
    for words in asked:
        make_parser(SUBCOMMANDS).parse_args(shlex.split(words))


@pytest.mark.parametrize(
    ("name", "ids"),
    [("bug", ["what", "report", "install"]), ("gpu", ["gpu", "report"])],
    ids=["bug", "gpu"],
)
def test_a_form_asks_for_the_report_and_takes_no_answer_without_it(
    name: str, ids: list[str]
) -> None:
    fields = {
        field.get("id"): field for field in read(f".github/ISSUE_TEMPLATE/{name}.yml")["body"]
    }
    assert list(fields) == [None, *ids]
    assert all(field["validations"]["required"] for id_, field in fields.items() if id_)


def test_the_links_for_reporters_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", SECURITY.read_text(encoding="utf-8")):
        assert (ROOT / target).is_file(), target


def test_a_citation_has_what_the_format_requires() -> None:
    citation = read("CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "license"} <= citation.keys()
    assert citation["license"] == read_pyproject(PYPROJECT)["project"]["license"]
    assert all(author.get("name") or author.get("family-names") for author in citation["authors"])


def test_updates_are_offered_for_actions_and_tools_and_never_for_torch() -> None:
    offered = read(".github/dependabot.yml")["updates"]
    kinds = {update["package-ecosystem"]: update for update in offered}
    assert kinds.keys() == {"github-actions", "pip"}
    assert kinds["pip"]["ignore"] == [{"dependency-name": "torch"}]


def test_pre_commit_installs_a_hook_for_subjects_and_no_other_looks_at_messages() -> None:
    config = read(".pre-commit-config.yaml")
    assert config["default_install_hook_types"] == ["pre-commit", "commit-msg"]
    assert config["default_stages"] == ["pre-commit"]
    staged = [hook for hook in config["repos"][0]["hooks"] if "stages" in hook]
    assert [(hook["entry"], hook["stages"]) for hook in staged] == [
        ("python -m ci.commits", ["commit-msg"])
    ]


def test_the_table_of_examples_names_each() -> None:
    folder = ROOT / "examples"
    named = re.findall(r"^\| \[(\w+\.py)\]", (folder / "README.md").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(path.name for path in folder.glob("*.py"))
