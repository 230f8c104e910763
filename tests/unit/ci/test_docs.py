"""The documentation: its commands parse, and its pages repeat data correctly."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import flash_dist
from ci.docs import checks, pages, search, sources
from ci.docs.pages import find_definition
from flash_dist.masks import BlockMask
from flash_dist.toolkit.cli import SUBCOMMANDS, expand_alias, load_subcommand, make_parser
from flash_dist.toolkit.errors import UsageError
from flash_dist.toolkit.findings import FINDINGS, SUBJECTS
from flash_dist.toolkit.make.release.channels import CHANNELS

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
TEXTS = [*sorted((ROOT / "docs").glob("*.md")), *(ROOT / name for name in sources.TEXTS)]

COLUMNS = 100  # columns of code beside the menu, at 1280 pixels
PROGRAM = re.compile(
    r"(?:python3?|\.venv/bin/python|torchrun(?: --\S+)+) "
    r"(?:-m flash_dist|\S*flash_dist\.pyz)(?= |$)"
)
ENDS = {"|", "||", "&&", ";", ">", ">>", "2>", "&"}  # tokens that end a shell command


def find_commands(text: str) -> Iterator[list[str]]:
    """Yield the arguments of our commands, in blocks and in backticks, without their output."""
    typed = re.sub(
        r"^(```console\n\$ [^\n]*\n).*?^```", r"\1```", text, flags=re.DOTALL | re.MULTILINE
    )
    joined = re.sub(r"\\\n\s*", " ", typed)
    blocks = re.findall(r"^```\w*\n(.*?)^```", joined, re.DOTALL | re.MULTILINE)
    inline = re.sub(r"^```.*?^```", "", joined, flags=re.DOTALL | re.MULTILINE)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", inline)]
    for line in [line for block in blocks for line in block.splitlines()] + spans:
        for found in PROGRAM.finditer(line):
            yield read_arguments(line[found.end() :])


def read_arguments(text: str) -> list[str]:
    """Split the text after a command into words as a shell does, up to the end of the command."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;>")
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:  # a quote of the surrounding text, such as TOML
        words = text.rstrip("\"'").split()
    end = next((place for place, word in enumerate(words) if word in ENDS), len(words))
    return words[:end]


def understand(arguments: list[str]) -> str:
    """Return the error of our own parser; empty for a valid command, or for a mere mention."""
    if "--help" in arguments or arguments in ([], ["--version"], *([name] for name in SUBCOMMANDS)):
        return ""
    try:
        make_parser().parse_args(expand_alias(arguments))
    except UsageError as error:
        return f"{shlex.join(arguments)}: {error.message}"
    return ""


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_of_a_text_is_understood(path: Path) -> None:
    problems = [understand(arguments) for arguments in find_commands(path.read_text())]
    assert [problem for problem in problems if problem] == []


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_text_leads_to_a_file(path: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", path.read_text())
    inside = [link.partition("#")[0] for link in links if "://" not in link]
    assert [link for link in inside if link and not (path.parent / link).exists()] == []


def test_paths_in_contributing_exist() -> None:
    """Check every path in backticks, except places that a newcomer creates."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    folders = "csrc|flash_dist|ci|tests|docs|benchmarks|\\.github"
    named = re.findall(rf"`((?:{folders})/[\w./-]*)`", text)
    assert len(named) > 40
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_the_page_on_kernels_names_things_that_are_there() -> None:
    """A name in backticks after a link to a file of code is in that file."""
    page = ROOT / "docs" / "kernels.md"
    named = re.findall(r"\]\((\.\./[^)]+)\)[,:]? `(\w+)`", " ".join(page.read_text().split()))
    assert len(named) > 8
    missing = [(file, name) for file, name in named if name not in (page.parent / file).read_text()]
    assert missing == []


def test_the_page_on_channels_names_the_session_of_each() -> None:
    text = (ROOT / "docs" / "channels.md").read_text(encoding="utf-8")
    lacking = [name for name in CHANNELS if f"`nox -s {name}" not in text]
    assert not lacking, "docs/channels.md has a table of them"


def test_the_page_on_attention_names_every_kind_of_mask() -> None:
    text = (ROOT / "docs" / "attention.md").read_text(encoding="utf-8")
    kinds = [name for name, kind in vars(BlockMask).items() if isinstance(kind, classmethod)]
    assert {"full", "from_flex"} < set(kinds)
    lacking = [name for name in kinds if name[0] != "_" and f"`{name}`" not in text]
    assert not lacking, "docs/attention.md lists what makes a BlockMask"


def test_the_readme_is_read_in_two_minutes() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_of_a_text_has_lines_that_a_page_has_room_for(path: Path) -> None:
    """Output of programs may be longer: the page wraps it."""
    blocks = r"^```(?:sh|python|toml|yaml)\n(.*?)^```"
    code = re.findall(blocks, path.read_text(), re.DOTALL | re.MULTILINE)
    assert [line for block in code for line in block.splitlines() if len(line) > COLUMNS] == []


def test_the_first_page_is_the_overview_and_links_to_it_lead_there(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "README.md").write_text("# flash_dist\n\nAbout.\n\n## Build\n\n[x](docs/a.md)\n")
    (tmp_path / "docs" / "a.md").write_text("[o](../README.md#build) [m](../benchmarks/README.md)")
    (tmp_path / "benchmarks" / "README.md").write_text("[here](README.md)")
    sources.make_first_page(tmp_path)
    page = (tmp_path / "index.md").read_text()
    assert page.startswith("# flash_dist\n\nAbout.\n\n- Something does not work")
    assert "## Build\n\n[x](docs/a.md)" in page
    assert "Overview <self>" in page
    linked = (tmp_path / "docs" / "a.md").read_text()
    assert linked == "[o](../index.md#build) [m](../benchmarks/README.md)"
    assert (tmp_path / "benchmarks" / "README.md").read_text() == "[here](README.md)"
    assert not (tmp_path / "README.md").exists()


def test_two_pages_of_one_title_do_not_pass(tmp_path: Path) -> None:
    icon = "<svg><title>Menu</title></svg>"
    for name, text in SITE.items():
        (tmp_path / name).write_text(f"<title>{name} - flash_dist</title>{icon}{text}")
    assert list(checks.check_site(tmp_path)) == []
    (tmp_path / "page.html").write_text("<title>index.html</title>")
    assert list(checks.check_site(tmp_path)) == [
        "page.html is titled `index.html` as index.html is"
    ]


def test_the_commands_are_found_at_all() -> None:
    found = list(find_commands((ROOT / "docs" / "recipes.md").read_text()))
    assert ["audit", "{wheel}"] in found
    assert ["doctor", "--no-selftest"] in found
    assert ["doctor", "--strict", "--report", "doctor.html"] in found
    assert len(found) >= 9
    assert "invalid choice" in understand(["doktor"])
    assert "--gpus" in understand(["doctor", "--gpus", "8.6"])


@pytest.mark.parametrize("name", FINDINGS)
def test_every_command_of_a_finding_is_understood(name: str) -> None:
    entry = FINDINGS[name]
    for arguments in find_commands(f"{entry.meaning} {entry.remedy}"):
        assert understand(arguments) == ""


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_example_of_a_help_is_understood(name: str) -> None:
    epilog = load_subcommand(name).EPILOG
    found = list(find_commands(f"```\n{epilog}```\n"))
    assert len(found) >= 2
    assert [understand(arguments) for arguments in found] == [""] * len(found)


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_the_exit_statuses_of_a_help_are_read(name: str) -> None:
    statuses = pages.read_exit_statuses(load_subcommand(name).EPILOG)
    numbers = [number for number, _ in statuses]
    assert numbers == sorted(numbers)
    assert {0, 2} <= set(numbers)
    assert all(meaning for _, meaning in statuses)


def test_the_pages_hold_every_subcommand_and_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", os.environ.get("COLUMNS", "80"))  # restored afterwards
    page = "\n".join(pages.write_cli())
    assert all(f"usage: python -m flash_dist {name}" in page for name in SUBCOMMANDS)
    page = "\n".join(pages.write_exit_statuses())
    assert "| 130 | interrupted (Ctrl-C) |" in page
    assert "## doctor.json" not in (page := "\n".join(pages.write_schemas()))
    assert '"title": "python -m flash_dist doctor --json"' in page


@pytest.mark.parametrize("name", [name for name in flash_dist.__all__ if name[0] != "_"])
def test_every_public_name_is_found_in_the_source_with_its_docstring(name: str) -> None:
    node = find_definition(ROOT / "flash_dist" / "__init__.py", name)
    assert node.name == name
    first = node.body[0]
    assert first.value.value.strip()  # type: ignore[attr-defined] # its docstring


SITE = {
    "index.html": '<a href="findings.html#no-gpu">x</a><a href="https://elsewhere.org">y</a>',
    "findings.html": "".join(f'<span id="{name}"></span>' for name in FINDINGS),
}


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ("", None),
        ('<a href="absent.html">x</a>', "links to absent.html, which is no file"),
        ('<a href="findings.html#no-cpu">x</a>', "which has no such place"),
        ('<a href="#nowhere">x</a>', "links to #nowhere, which has no such place"),
        ('<img src="absent.png">', "links to absent.png, which is no file"),
        ('<script src="https://cdn.org/x.js"></script>', "loads https://cdn.org/x.js"),
        ('<link href="//fonts.org/x.css" rel="stylesheet">', "loads //fonts.org/x.css"),
    ],
)
def test_a_site_with_a_broken_link_does_not_pass(
    tmp_path: Path, page: str, problem: str | None
) -> None:
    for name, text in SITE.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "page.html").write_text(page)
    found = list(checks.check_site(tmp_path))
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]


def test_a_finding_without_its_place_does_not_pass(tmp_path: Path) -> None:
    (tmp_path / "findings.html").write_text(SITE["findings.html"].replace('id="no-gpu"', ""))
    assert list(checks.check_site(tmp_path)) == ["findings.html has no place for no-gpu"]


def test_every_finding_has_a_row_in_the_index_and_a_section_of_a_topic() -> None:
    index = "\n".join(pages.write_findings())
    topics = dict(pages.write_topics())
    for subject, entries in SUBJECTS:
        name = pages.name_page(subject)
        assert f"\n{name}\n" in index
        for entry in entries.values():
            assert f'<span id="{entry.id}" class="finding"></span>[`{entry.id}`]' in index
            assert f"({entry.id})=\n## {entry.title}\n" in topics[name]
            assert all(message in topics[name] for message in entry.messages)
    assert len(topics) == len(SUBJECTS)


def test_the_page_of_a_topic_is_named_after_it() -> None:
    assert pages.name_page("torch, Triton and CUDA's libraries") == (
        "findings/torch-triton-and-cudas-libraries"
    )


PAGE = """
<title>Install</title><div>menu</div><article><section id="install">
<h1>Install<a class="headerlink" href="#install">#</a></h1><p>One<br>two, <code>RTX</code> 3090</p>
<section id="more"><span id="old"></span><h2>More <code>sets</code></h2>
<div class="highlight-json"><div><pre>{"left": "out"}</pre></div></div>
<table><tr><td>a</td><td>b</td></tr></table></section>after</section></article><script>menu()</script>
"""


def test_the_search_knows_the_sections_of_a_page() -> None:
    assert list(search.read_sections(PAGE)) == [
        ("install", "Install", "One two, RTX 3090 after"),
        ("more", "More sets", "a b"),
    ]


def test_the_index_of_the_search_leads_to_sections(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "_static").mkdir()
    (tmp_path / "docs" / "install.html").write_text(PAGE)
    (tmp_path / "search.html").write_text(PAGE)
    search.write_index(tmp_path)
    script = (tmp_path / "_static" / "search-index.js").read_text()
    assert script.startswith("const SECTIONS = [")
    assert json.loads(script.removeprefix("const SECTIONS = ").removesuffix(";\n")) == [
        ["docs/install.html", "Install", "Install", "One two, RTX 3090 after"],
        ["docs/install.html#more", "Install", "More sets", "a b"],
    ]


@pytest.mark.parametrize(
    ("copied", "good"),
    [
        ("python -m flash_dist doctor", True),
        ("$ python -m flash_dist doctor", False),
        ("python -m flash_dist doctor\n[ok] driver", False),
        ("", False),
    ],
)
def test_a_copy_button_that_copies_prompt_or_output_does_not_pass(
    copied: str, *, good: bool
) -> None:
    shown = "$ python -m flash_dist doctor\n[ok] driver\n"
    assert (not list(checks.check_copied(shown, copied))) == good


def test_a_command_of_two_lines_is_copied_whole() -> None:
    shown = "$ python -m flash_dist \\\n    doctor\n[ok] driver\n"
    assert list(checks.check_copied(shown, "python -m flash_dist \\\n    doctor")) == []
