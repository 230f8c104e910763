"""Generate the index of findings, and a page for each topic.

`findings.html#ID` is the stable address of a finding: it leads to a row of the index, whose script
opens the page of the topic.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from flash_dist.toolkit.findings import SUBJECTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from flash_dist.toolkit.findings import Entry

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
    """List every id under its topic."""
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
    """Write the row of the index at the address of a finding."""
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
