"""Generate pages: the command line, exit statuses, schemas, functions and classes, and findings.

`findings.html#ID` is the stable address of a finding: it leads to a row of the index, and a script
there opens the page of the finding's topic.
"""

from __future__ import annotations

import ast
import os
import re
import textwrap
from typing import TYPE_CHECKING, Final

import flash_dist
from flash_dist.toolkit.cli import (
    EXIT_CLOSED_PIPE,
    EXIT_INTERRUPTED,
    SUBCOMMANDS,
    load_subcommand,
    make_parser,
)
from flash_dist.toolkit.findings import SUBJECTS
from flash_dist.toolkit.make.project import ROOT

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from pathlib import Path

    from flash_dist.toolkit.findings import Entry

    Function = ast.FunctionDef | ast.AsyncFunctionDef

HELP_COLUMNS: Final = "88"
SEVERAL: Final = "Returned values"  # docstring section that Google's style lacks


def write_cli() -> Iterator[str]:
    """Print the help of every subcommand."""
    os.environ["COLUMNS"] = HELP_COLUMNS
    parser = make_parser()
    yield "# Command line\n"
    yield f"```text\n{parser.format_help()}```\n"
    for name, subparser in find_subparsers(parser).items():
        yield f"## {name}\n\n```text\n{subparser.format_help()}```\n"


def find_subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each subcommand; argparse has no public attribute for them."""
    actions = (one for one in parser._actions if one.metavar == "SUBCOMMAND")  # noqa: SLF001
    return dict(next(actions).choices or {})


def write_exit_statuses() -> Iterator[str]:
    """List the exit statuses that each help text explains."""
    yield "# Exit statuses\n"
    yield "| subcommand | 0 | 1 | 2 | 3 |\n|---|---|---|---|---|"
    for name in SUBCOMMANDS:
        told = dict(read_exit_statuses(load_subcommand(name).EPILOG))
        yield f"| {name} | {' | '.join(told.get(status, '') for status in range(4))} |"
    yield "\nEvery subcommand has these as well:\n\n| status | meaning |\n|---|---|"
    yield "| 2 | wrong usage, an input that cannot be read, an output that cannot be written |"
    yield f"| {EXIT_INTERRUPTED} | interrupted (Ctrl-C) |"
    yield f"| {EXIT_CLOSED_PIPE} | the reader of the output closed the pipe |\n"


def read_exit_statuses(epilog: str) -> list[tuple[int, str]]:
    """Return (status, meaning) pairs from the `exit status: 0 no failure, ...` of a help text."""
    told = " ".join(epilog.partition("exit status: ")[2].split())
    parts = re.split(r", (?=\d+ )", told) if told else []
    return [(int(part.partition(" ")[0]), part.partition(" ")[2]) for part in parts]


def write_schemas() -> Iterator[str]:
    """Show every schema of docs/schema."""
    yield "# JSON schemas\n"
    yield (
        "`--json` prints one document with `version`. A later version of the package adds keys; a "
        "change of meaning raises the number.\n"
    )
    for path in sorted((ROOT / "docs" / "schema").glob("*.json")):
        yield f"## {path.stem}\n"
        yield f"[{path.name}](docs/schema/{path.name})\n"
        yield f"```json\n{path.read_text(encoding='utf-8').strip()}\n```\n"


def write_api() -> Iterator[str]:
    """Document every public name from its docstring."""
    yield "# Functions and classes\n"
    yield "`import flash_dist` needs neither torch nor a GPU; the names load on first use.\n"
    for name, description in describe_public_names():
        yield f"## {name}\n\n```{{eval-rst}}\n{description}\n```\n"


def describe_public_names() -> Iterator[tuple[str, str]]:
    """Yield each public name with its description in reStructuredText."""
    for name in flash_dist.__all__:
        if not name.startswith("_"):
            yield name, describe(name, find_definition(ROOT / "flash_dist" / "__init__.py", name))


def find_definition(path: Path, name: str) -> Function | ast.ClassDef:
    """Return the definition of a name; follow imports inside of the package."""
    found: Function | ast.ClassDef | None = None
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            found = node  # keep the last definition: overloads come before it
        elif isinstance(node, ast.ImportFrom) and _imports(node, name):
            return find_definition(_locate(path, node.module or ""), name)
    if found is None:
        message = f"`{name}` is not defined in {path}"
        raise LookupError(message)
    return found


def _imports(node: ast.ImportFrom, name: str) -> bool:
    return node.level == 1 and any((one.asname or one.name) == name for one in node.names)


def _locate(path: Path, module: str) -> Path:
    place = path.parent.joinpath(*module.split("."))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def describe(name: str, node: Function | ast.ClassDef) -> str:
    """Write a directive for a function, or for a class with its public methods."""
    if not isinstance(node, ast.ClassDef):
        return _directive("py:function", name + _signature(node), _read_docstring(node))
    methods = [
        _describe_method(one)
        for one in node.body
        if isinstance(one, ast.FunctionDef)
        and not one.name.startswith("_")
        and ast.get_docstring(one)
    ]
    return _directive("py:class", name, "\n\n".join([_read_docstring(node), *methods]))


def _describe_method(node: ast.FunctionDef) -> str:
    kinds = {decorator.id for decorator in node.decorator_list if isinstance(decorator, ast.Name)}
    if "property" in kinds:
        return _directive("py:property", node.name, _read_docstring(node))
    option = "classmethod" if "classmethod" in kinds else ""
    signature = _signature(node, bound="staticmethod" not in kinds)
    return _directive("py:method", node.name + signature, _read_docstring(node), option)


def _signature(node: Function, *, bound: bool = False) -> str:
    """Write the arguments without annotations, to fit on a line; the text states the types."""
    arguments = node.args
    for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.kwarg):
        if one is not None:
            one.annotation = None
    if bound:
        del arguments.args[0]
    return f"({ast.unparse(arguments)})"


def _read_docstring(node: Function | ast.ClassDef) -> str:
    from sphinx.ext.napoleon import Config, GoogleDocstring  # noqa: PLC0415 - installed by `nox -s docs`

    sections = [(SEVERAL, "params_style")]
    config = Config(napoleon_use_rtype=False, napoleon_custom_sections=sections)
    text = ast.get_docstring(node) or ""
    text = re.sub(r"^Returns:(?=\n +\w+: )", f"{SEVERAL}:", text, flags=re.MULTILINE)
    return str(GoogleDocstring(text, config))


def _directive(kind: str, signature: str, text: str, *options: str) -> str:
    written = [f".. {kind}:: {signature}", *(f"   :{option}:" for option in options if option)]
    return "\n".join([*written, "", textwrap.indent(text.strip(), "   ")])


INTRODUCTION: Final = """\
# Findings

Look up the id that `doctor`, `selftest` or `audit` printed. `python -m flash_dist explain ID`
prints the same text, and `python -m flash_dist explain MESSAGE` finds the id for an error message
of any package. The search of this site finds ids and messages. Ids are stable.
"""

TOPIC: Final = """\
Read what a finding means and what to do about it. [Findings](../findings.md) lists all of them.
"""

CONTINUE: Final = """\
```{raw} html
<script>
  const follow = () => {
    const row = document.getElementById(location.hash.slice(1));
    if (row?.className === "finding") location.replace(row.nextElementSibling.href);
  };
  window.addEventListener("hashchange", follow);
  window.addEventListener("DOMContentLoaded", follow);
</script>
```
"""


def write_findings() -> Iterator[str]:
    """List the ids of all findings, grouped by topic."""
    yield INTRODUCTION
    yield "```{toctree}\n:hidden:"
    yield from (name_page(subject) for subject, _ in SUBJECTS)
    yield "```\n"
    for subject, entries in SUBJECTS:
        yield f"## {subject}\n\n| id | finding |\n|---|---|"
        yield from (write_row(entry) for entry in entries.values())
        yield ""
    yield CONTINUE


def write_row(entry: Entry) -> str:
    """Return the row of the index for a finding, with the id of the finding as its anchor."""
    title = entry.title.replace("|", "\\|")
    return f'| <span id="{entry.id}" class="finding"></span>[`{entry.id}`](#{entry.id}) | {title} |'


def write_topics() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each topic's page."""
    for subject, entries in SUBJECTS:
        explained = "\n".join(map(explain, entries.values()))
        yield name_page(subject), f"# {subject}\n\n{TOPIC}\n{explained}"


def explain(entry: Entry) -> str:
    """Write the section of a finding."""
    messages = "\n".join(entry.messages)
    printed = f"**Messages with this cause:**\n\n```text\n{messages}\n```\n" if messages else ""
    return (
        f"({entry.id})=\n## {entry.title}\n\n`{entry.id}`\n\n{entry.meaning}\n\n"
        f"**What to do:** {entry.remedy}\n\n{printed}"
    )


def name_page(subject: str) -> str:
    """Return the name of a topic's page, such as `findings/the-dynamic-loader`."""
    words = re.findall(r"[a-z0-9]+", subject.lower().replace("'", ""))
    return f"findings/{'-'.join(words)}"
