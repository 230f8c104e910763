"""The page of the package index for people: no script, no external files.

For each GPU the page shows the result of `select --index`, computed from the wheels.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING
from urllib.parse import quote

from ...builds.manifest import declare_build
from ...indexes.index import PROJECT, parse_wheel
from ...indexes.install_commands import Command, find_commands
from ...indexes.pages import Link
from ...indexes.selection import Candidate, select
from ...product import NAME, PRODUCT
from ...report_page.markup import (
    Markup,
    element,
    join,
    make_head,
    make_table,
    prose,
)
from ...report_page.style import STYLE
from ...targets.advice import describe_how
from ...targets.devices import Device
from ...targets.gpus import SOLD
from ...targets.wording import format_size
from ..wheels.artefacts import Artefact, newest_first

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

_LAYOUT = """
.commands {
  background: var(--card); border-radius: 4px; margin: 0.5rem 0 0; padding: 0.7rem 0.8rem;
}
.commands div { display: grid; grid-template-columns: 3.5rem minmax(0, 1fr); }
.commands b { color: var(--dim); font-weight: 400; user-select: none; }
.commands code { background: none; padding: 0; font-size: 1em; user-select: all; }
.set { border-top: 1px solid var(--line); padding: 0.9rem 0 1.1rem; break-inside: avoid-page; }
.scroll + h3 { margin-top: 1.2rem; }
.set h3 { font-size: 1.08rem; }
.set h3 small { font-weight: 400; color: var(--dim); margin-left: 0.5rem; }
.facts { display: grid; grid-template-columns: 7rem minmax(0, 1fr); gap: 0.1rem 0.8rem; margin: 0; }
.facts dd { margin: 0; color: var(--text); overflow-wrap: anywhere; }
@media (max-width: 40rem) {
  .facts { grid-template-columns: 1fr; }
  .facts dd { margin: 0 0 0.4rem; }
  th, td { padding-right: 0.5rem; }
  .commands div { grid-template-columns: 1fr; margin-bottom: 0.5rem; }
}
"""


@dataclass(frozen=True)
class Offer:
    """A file that another channel made from a wheel, as served by the index."""

    channel: str
    folder: Path  # folder of the channel in dist/, copied next to the page
    place: str  # path of the file, relative to the page
    wheel: str  # file name of the wheel
    commands: tuple[Command, ...]


def make_page(
    artefacts: Sequence[Artefact],
    indexes: Mapping[str, Sequence[str]],
    url: str,
    *,
    default: str,
    offers: Sequence[Offer],
) -> str:
    """Return the page as HTML.

    Args:
        artefacts: The wheels.
        indexes: Names of the arch sets in each index, by the index's folder next to the page.
        url: Address of the page's folder.
        default: The index for users who choose no set.
        offers: Files that other channels made from the wheels.
    """
    newest = _newest(artefacts)
    version = newest[0].version.public
    title = f"{NAME} {version}: wheels"
    head = make_head(title, STYLE + _LAYOUT)
    older = [one for one in newest_first(artefacts) if one not in newest]
    body = element(
        "body",
        element(
            "main",
            element("h1", title),
            prose(f"{PRODUCT.summary.rstrip('.')}. {_needs(newest)}"),
            *_install(newest, indexes.get(default, ()), url, default, offers),
            element("h2", "Which file for which GPU"),
            *_gpu_tables(newest),
            element(
                "p",
                prose(f"For the GPUs of a machine: `python -m {NAME} select --index {url}`"),
                _class="legend",
            ),
            element("h2", "Sets"),
            *(_describe_set(one, url, offers) for one in newest),
            *([element("h2", "Older versions"), *map(_describe_older, older)] if older else []),
        ),
        element("footer", *_indexes(indexes)),
    )
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _newest(artefacts: Sequence[Artefact]) -> list[Artefact]:
    ordered = newest_first(artefacts)
    return [one for one in ordered if one.version.public == ordered[0].version.public]


def _needs(artefacts: Iterable[Artefact]) -> str:
    """List the driver, torch, Python and system that the wheels need, each once."""
    drivers = {one.manifest.toolkit.driver_min: one.set_name for one in artefacts}
    newest = max(drivers, key=int)
    older = "".join(f" ({k} for {v})" for k, v in sorted(drivers.items()) if k != newest)
    pythons = {one.requires_python for one in artefacts}
    torches = {_torch_range(one) for one in artefacts}
    systems = {tag.rpartition("-")[2] for one in artefacts for tag in one.tags}
    return (
        f"Driver {newest} or newer{older}, torch {', '.join(sorted(torches))}, "
        f"Python {', '.join(sorted(pythons))}, {', '.join(sorted(systems))}."
    )


def _torch_range(one: Artefact) -> str:
    oldest, newest = one.manifest.torch_min, one.manifest.torch_tested_max
    return f"{oldest} to {newest}" if newest else f"{oldest} or newer"


def _install(
    artefacts: Iterable[Artefact],
    names: Sequence[str],
    url: str,
    index: str,
    offers: Sequence[Offer],
) -> Iterable[Markup]:
    """Show how to install the default wheel, for each kind of CPU."""
    picked = [one for one in artefacts if one.set_name in names]
    for place, one in enumerate(_x86_first(picked)):
        if place == 0:
            yield element("h2", "Install")
        on = f" on {_machine(one)}" if len(picked) > 1 else ""
        yield element("p", f"Without a choice{on}, {_for_whom(one)}:")
        yield _show_commands(_commands(one, url, index, offers))


def _machine(one: Artefact) -> str:
    return one.manifest.arch_set.machine


def _x86_first(artefacts: Iterable[Artefact]) -> list[Artefact]:
    return sorted(artefacts, key=_machine, reverse=True)


def _gpu_tables(artefacts: Sequence[Artefact]) -> Iterable[Markup]:
    """Show one table for each kind of CPU."""
    groups = [list(own) for _, own in groupby(_x86_first(artefacts), key=_machine)]
    for own in groups:
        if len(groups) > 1:
            yield element("h3", _machine(own[0]))
        yield _gpu_table(own)


def _gpu_table(artefacts: Sequence[Artefact]) -> Markup:
    """Show which set is for which GPU, for one kind of CPU."""
    head = ("GPU", "compute capability", "smallest set", "runs")
    candidates = [_candidate(one, "", one.set_name) for one in artefacts]
    rows = []
    is_arm = any(_machine(one) == "aarch64" for one in artefacts)
    for chip in SOLD:
        if chip.arm_only and not is_arm:
            continue
        chosen = select([Device(*chip.version)], None, candidates).chosen
        if chosen is None:
            link, how = Markup("none of these"), ""
        else:
            name_of_set = chosen.candidate.name
            link = element("a", name_of_set, href=f"#{name_of_set}")
            how = describe_how(chosen.verdicts[0])
        rows.append((chip.products, (str(chip), link, how)))
    return make_table("Which file for which GPU", head, rows)


def _describe_set(one: Artefact, url: str, offers: Sequence[Offer]) -> Markup:
    targets = ", ".join(map(str, one.embedded))
    facts = {
        "For": _for_whom(one),
        "Code inside": targets,
        "Download": format_size(one.size),
        "Installed": format_size(one.installed_size),
        "File": element("a", one.file_name, href=f"packages/{quote(one.file_name)}"),
        "SHA-256": element("span", one.sha256, _class="mono"),
    }
    for offer in _of_wheel(one, offers):
        name = offer.place.rpartition("/")[2]
        facts[offer.channel.capitalize()] = element("a", name, href=quote(offer.place))
    return element(
        "section",
        element("h3", one.set_name, element("small", str(one.version))),
        element("dl", *(_fact(name, value) for name, value in facts.items()), _class="facts"),
        _show_commands(_commands(one, url, one.set_name, offers)),
        _class="set",
        id=one.set_name,
    )


def _fact(name: str, value: str) -> Markup:
    return join(element("dt", name), element("dd", value))


def _describe_older(one: Artefact) -> Markup:
    link = element("a", one.file_name, href=f"packages/{quote(one.file_name)}")
    return element("p", link, f" {format_size(one.size)}, {', '.join(map(str, one.embedded))}")


def _for_whom(one: Artefact) -> str:
    told = one.manifest.arch_set.who
    return told if told not in {"", one.set_name} else f"GPUs that run {_targets(one)}"


def _targets(one: Artefact) -> str:
    return ", ".join(map(str, one.embedded))


def _candidate(one: Artefact, url: str, index: str) -> Candidate:
    link = Link(f"{url}packages/{quote(one.file_name)}", f"sha256={one.sha256}", size=one.size)
    wheel = parse_wheel(link, f"{url}{index}/{PROJECT}/")
    build = declare_build(one.manifest)
    return Candidate(one.set_name, build, one.size, one.version, wheel)


def _of_wheel(one: Artefact, offers: Iterable[Offer]) -> list[Offer]:
    return [offer for offer in offers if offer.wheel == one.file_name]


def _commands(one: Artefact, url: str, index: str, offers: Iterable[Offer]) -> tuple[Command, ...]:
    """Return the commands that install a wheel, from the index and from channels that have it."""
    others = (line for offer in _of_wheel(one, offers) for line in offer.commands)
    return (*find_commands(_candidate(one, url, index), None), *others)


def _show_commands(commands: Iterable[Command]) -> Markup:
    """Show commands to copy, each after the name of its tool."""
    rows = (
        element("div", element("b", command.tool), prose(f"`{command.line}`"))
        for command in commands
    )
    return element("div", *rows, _class="commands mono")


def _indexes(indexes: Iterable[str]) -> Iterable[Markup]:
    yield Markup("Package indexes: ")
    for place, name in enumerate(indexes):
        yield join("" if place == 0 else ", ", element("a", name, href=f"{name}/"))
    yield Markup(". With each wheel lie its metadata and SHA-256, which pip and uv check.")
