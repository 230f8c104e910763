"""Collect the Markdown files for Sphinx, and add the generated pages."""

from __future__ import annotations

import re
import shutil
from functools import partial
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from flash_dist.toolkit.make.project import ROOT

from .pages import (
    write_api,
    write_cli,
    write_exit_statuses,
    write_findings,
    write_schemas,
    write_topics,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TEXTS: Final = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
    "examples/README.md",
    "examples/own_kernels/README.md",
)
_LINK: Final = re.compile(r"\]\(([^)\s:]+)\)")  # a Markdown link to a file

MENU: Final = """\

```{toctree}
:caption: Guide
:hidden:
Overview <self>
docs/install
docs/attention
docs/decoding
docs/same-bits
docs/doctor
docs/inspect
docs/building
docs/from-pybind
docs/channels
docs/own-kernels
docs/recipes
docs/torch
docs/transformers
docs/frameworks
Examples <examples/README>
A package to copy <examples/own_kernels/README>
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
docs/signing
```
"""

WHERE: Final = """\
- Something does not work: [`python -m flash_dist doctor`](docs/doctor.md) names the cause.
  [Findings](findings.md) explains it, and says what to do.
- You work in a pipeline, a container, Kubernetes, WSL or without network:
  [recipes](docs/recipes.md).
- A program reads the result: [exit statuses](exit-statuses.md) and [schemas](schemas.md).
"""

FOR_SPHINX: Final = {  # files of docs/ other than pages, and their paths for Sphinx
    "conf.py": "conf.py",
    "site.css": "_static/site.css",
    "search/minisearch.js": "_static/minisearch.js",
    "search/search.js": "_static/search.js",
    "search/search.html": "_templates/search.html",
}


def collect(source: Path) -> None:
    """Copy every Markdown file to the same relative path, and add the generated pages."""
    shutil.rmtree(source, ignore_errors=True)
    for name in TEXTS:
        copy(ROOT / name, source / name)
    not_texts = shutil.ignore_patterns("conf.py", "__*", "site.css", "search")
    shutil.copytree(ROOT / "docs", source / "docs", ignore=not_texts)
    for name, place in FOR_SPHINX.items():
        copy(ROOT / "docs" / name, source / place)
    make_first_page(source)
    for path in find_linked(source):
        copy(ROOT / path, source / path)
    for name, text in write_pages().items():
        page = source / f"{name}.md"
        page.parent.mkdir(exist_ok=True)
        page.write_text(text, encoding="utf-8")


def copy(path: Path, to: Path) -> None:
    """Copy a file, and create its folder."""
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path, to)


def write_pages() -> dict[str, str]:
    """Return the text of each generated page by its name."""
    return {
        "api": "\n".join(write_api()),
        "cli": "\n".join(write_cli()),
        "findings": "\n".join(write_findings()),
        **dict(write_topics()),
        "exit-statuses": "\n".join(write_exit_statuses()),
        "schemas": "\n".join(write_schemas()),
    }


def make_first_page(source: Path) -> None:
    """Make the README the first page, with the menu, and redirect links to it."""
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
    """Yield files, such as code, that copied pages link to but that were not copied."""
    for text in sorted(source.rglob("*.md")):
        for link in _LINK.findall(text.read_text(encoding="utf-8")):
            place = (text.parent / unquote(link.partition("#")[0])).resolve()
            if place.is_relative_to(source) and not place.exists():
                path = place.relative_to(source)
                if (ROOT / path).is_file():
                    yield path
