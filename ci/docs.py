"""Build the documentation, an HTML site that needs no network: `python -m ci.docs dist/docs`.

Its pages are docs/*.md and the other texts of the tree, docstrings, the help of every subcommand,
and what is data elsewhere: findings, exit statuses, schemas. A warning of Sphinx, a link that
leads nowhere and a file from the network are errors.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import textwrap
from functools import partial
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

import flash_dist
from ci.project import ROOT
from flash_dist.cli import EXIT_CLOSED_PIPE, EXIT_INTERRUPTED, SUBCOMMANDS, make_parser
from flash_dist.errors import FlashDistError
from flash_dist.findings import SUBJECTS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    Function = ast.FunctionDef | ast.AsyncFunctionDef

TEXTS: Final = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
    "examples/README.md",
)
HELP_COLUMNS: Final = "88"
_LINK: Final = re.compile(r"\]\(([^)\s:]+)\)")  # of Markdown, to a file beside it

MENU: Final = """\

```{toctree}
:caption: Guide
:hidden:
Overview <self>
docs/install
docs/attention
docs/decoding
docs/doctor
docs/inspect
docs/building
docs/channels
docs/recipes
docs/torch
docs/transformers
docs/frameworks
Examples <examples/README>
```

```{toctree}
:caption: Concepts
:hidden:
docs/determinism
docs/masks
docs/memory
docs/selftest
docs/kernels
```

```{toctree}
:caption: Reference
:hidden:
api
cli
findings
exit-statuses
schemas
docs/environment
docs/speed
Measurements <benchmarks/README>
docs/debugging
```

```{toctree}
:caption: Project
:hidden:
CHANGELOG
CONTRIBUTING
SECURITY
docs/releasing
```
"""

WHERE: Final = """\
- Something does not work: [`python -m flash_dist doctor`](docs/doctor.md) says what;
  [findings](findings.md) what it means and what to do.
- In a pipeline, a container or Kubernetes, under WSL, on a machine without network:
  [recipes](docs/recipes.md).
- A program reads the answer: [exit statuses](exit-statuses.md) and [schemas](schemas.md).
"""

PROJECT: Final = "flash_dist"  # as docs/conf.py has it
SEVERAL: Final = "Returned values"  # by name, which Google's style has no section for


def build_docs(out: Path) -> None:
    """Collect the sources, let Sphinx build them, and check the site."""
    source = ROOT / "build" / "docs"
    collect(source)
    shutil.rmtree(out, ignore_errors=True)
    options = ["-W", "--keep-going", "-q", "-b", "html", "-d", str(ROOT / "build" / "doctrees")]
    subprocess.run([sys.executable, "-m", "sphinx", *options, str(source), str(out)], check=True)
    problems = list(check_site(out))
    if problems:
        raise FlashDistError("\n".join(problems))


def collect(source: Path) -> None:
    """Lay out what Sphinx reads as it lies in the tree, so that links between texts hold."""
    shutil.rmtree(source, ignore_errors=True)
    for name in TEXTS:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    not_texts = shutil.ignore_patterns("conf.py", "__*", "site.css")
    shutil.copytree(ROOT / "docs", source / "docs", ignore=not_texts)
    shutil.copy2(ROOT / "docs" / "conf.py", source)
    (source / "_static").mkdir()
    shutil.copy2(ROOT / "docs" / "site.css", source / "_static")
    make_first_page(source)
    for path in find_linked(source):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, source / path)
    pages = {
        "api": "\n".join(write_api()),
        "cli": "\n".join(write_cli()),
        "findings": "\n".join(write_findings()),
        "exit-statuses": "\n".join(write_exit_statuses()),
        "schemas": "\n".join(write_schemas()),
    }
    for name, text in pages.items():
        (source / f"{name}.md").write_text(text, encoding="utf-8")


def make_first_page(source: Path) -> None:
    """Make the overview the first page, with where to go and the menu; links to it lead there."""
    readme = source / "README.md"
    for text in sorted(source.rglob("*.md")):
        own = partial(_lead_to_first_page, text.parent, readme)
        text.write_text(_LINK.sub(own, text.read_text(encoding="utf-8")), encoding="utf-8")
    title, about, rest = readme.read_text(encoding="utf-8").split("\n\n", 2)
    page = f"{title}\n\n{about}\n\n{WHERE}\n{rest}{MENU}"
    (source / "index.md").write_text(page, encoding="utf-8")
    readme.unlink()


def _lead_to_first_page(folder: Path, readme: Path, link: re.Match[str]) -> str:
    place, _, _ = link[1].partition("#")
    if not place or (folder / unquote(place)).resolve() != readme:
        return link[0]
    return link[0].replace(readme.name, "index.md")


def find_linked(source: Path) -> Iterator[Path]:
    """Yield the other files of the tree that the texts link to, such as code: they go along."""
    for text in sorted(source.rglob("*.md")):
        for link in _LINK.findall(text.read_text(encoding="utf-8")):
            place = (text.parent / unquote(link.partition("#")[0])).resolve()
            if place.is_relative_to(source) and not place.exists():
                path = place.relative_to(source)
                if (ROOT / path).is_file():
                    yield path


def write_api() -> Iterator[str]:
    """Document every public name from its docstring."""
    yield "# Functions and classes\n"
    yield "`import flash_dist` needs neither torch nor a GPU; the names load on first use.\n"
    for name, description in describe_public_names():
        yield f"## {name}\n\n```{{eval-rst}}\n{description}\n```\n"


def write_cli() -> Iterator[str]:
    """Print the help of every subcommand."""
    os.environ["COLUMNS"] = HELP_COLUMNS
    parser = make_parser()
    yield "# Command line\n"
    yield f"```text\n{parser.format_help()}```\n"
    for name, subparser in find_subparsers(parser).items():
        yield f"## {name}\n\n```text\n{subparser.format_help()}```\n"


def find_subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each subcommand, which argparse has no public name for."""
    actions = (one for one in parser._actions if one.metavar == "SUBCOMMAND")  # noqa: SLF001
    return dict(next(actions).choices or {})


def write_findings() -> Iterator[str]:
    """Explain every id."""
    yield "# Findings\n"
    yield (
        "What doctor, selftest and audit find has an id, which is stable. "
        "`python -m flash_dist explain ID` says the same as this page; in the JSON `docs` "
        "leads here.\n"
    )
    for subject, entries in SUBJECTS:
        yield f"## {subject}\n"
        for name, entry in entries.items():
            yield f"({name})=\n### {entry.title}\n"
            yield f"`{name}`\n\n{entry.meaning}\n\n**What to do:** {entry.remedy}\n"


def write_exit_statuses() -> Iterator[str]:
    """Say what each exit status means, from the end of each help."""
    yield "# Exit statuses\n"
    yield "| subcommand | 0 | 1 | 2 | 3 |\n|---|---|---|---|---|"
    for name in SUBCOMMANDS:
        told = dict(read_exit_statuses(import_module(f"flash_dist.cli.{name}").EPILOG))
        yield f"| {name} | {' | '.join(told.get(status, '') for status in range(4))} |"
    yield "\nEvery subcommand, beside these:\n\n| status | meaning |\n|---|---|"
    yield "| 2 | wrong usage, an input that cannot be read, an output that cannot be written |"
    yield f"| {EXIT_INTERRUPTED} | interrupted (Ctrl-C) |"
    yield f"| {EXIT_CLOSED_PIPE} | whoever read the output went away |\n"


def read_exit_statuses(epilog: str) -> list[tuple[int, str]]:
    """Read `exit status: 0 no failure, 1 at least one` at the end of a help."""
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


class Links(HTMLParser):
    """What a page links to, loads, and can be linked at."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.title = ""
        self._in_title = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what matters of an element."""
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in {"link", "script", "img", "iframe", "source"}:
            self.loaded += [values[name] for name in ("href", "src") if name in values]
        self._in_title = tag == "title" and not self.title  # those that follow are of icons

    def handle_data(self, data: str) -> None:
        """Keep the title of the page, without the site's behind it."""
        if self._in_title:
            self.title = data.strip().removesuffix(f" - {PROJECT}")
            self._in_title = False


def check_site(out: Path) -> Iterator[str]:
    """Say which links lead nowhere, what comes from the network, which finding has no place."""
    pages = {
        path.resolve(): Links(path.read_text(encoding="utf-8"))
        for path in sorted(out.rglob("*.html"))
    }
    titled: dict[str, Path] = {}
    for path, page in pages.items():
        where = path.relative_to(out.resolve())
        if page.title and titled.setdefault(page.title, where) != where:
            yield f"{where} is titled `{page.title}` as {titled[page.title]} is"
        for link in page.loaded:
            if urlsplit(link).netloc:
                yield f"{where} loads {link}"
        for link in (*page.links, *page.loaded):
            problem = check_link(path, link, pages)
            if problem:
                yield f"{where} links to {link}, {problem}"
    findings = pages[(out / "findings.html").resolve()]
    for _, entries in SUBJECTS:
        yield from (
            f"findings.html has no place for {name}" for name in entries.keys() - findings.ids
        )


def check_link(page: Path, link: str, pages: dict[Path, Links]) -> str:
    """Say what is wrong with a link inside of the site; of others nothing is known."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return ""
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if not target.is_file():
        return "which is no file"
    known = pages.get(target)
    if parts.fragment and known is not None and unquote(parts.fragment) not in known.ids:
        return "which has no such place"
    return ""


def describe_public_names() -> Iterator[tuple[str, str]]:
    """Yield each public name with its description in reStructuredText."""
    for name in flash_dist.__all__:
        if not name.startswith("_"):
            yield name, describe(name, find_definition(ROOT / "flash_dist" / "__init__.py", name))


def find_definition(path: Path, name: str) -> Function | ast.ClassDef:
    """Follow imports inside of the package to where a name is defined."""
    found: Function | ast.ClassDef | None = None
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
            found = node  # the last one: overloads stand in front of it
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
    """Write the arguments; without annotations they fit on a line, and the text says the types."""
    arguments = node.args
    for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.kwarg):
        if one is not None:
            one.annotation = None
    if bound:
        del arguments.args[0]
    return f"({ast.unparse(arguments)})"


def _read_docstring(node: Function | ast.ClassDef) -> str:
    from sphinx.ext.napoleon import Config, GoogleDocstring  # noqa: PLC0415 - of `nox -s docs`

    sections = [(SEVERAL, "params_style")]
    config = Config(napoleon_use_rtype=False, napoleon_custom_sections=sections)
    text = ast.get_docstring(node) or ""
    text = re.sub(r"^Returns:(?=\n +\w+: )", f"{SEVERAL}:", text, flags=re.MULTILINE)
    return str(GoogleDocstring(text, config))


def _directive(kind: str, signature: str, text: str, *options: str) -> str:
    written = [f".. {kind}:: {signature}", *(f"   :{option}:" for option in options if option)]
    return "\n".join([*written, "", textwrap.indent(text.strip(), "   ")])


if __name__ == "__main__":
    build_docs(Path(sys.argv[1]).resolve())
