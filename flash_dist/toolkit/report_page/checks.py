"""Lists the report's checks and fixes; GPUs with the same result share an entry."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ..findings import FINDINGS
from ..targets.wording import count, list_ranges
from .markup import Markup, element, prose

if TYPE_CHECKING:
    from collections.abc import Iterator

Json = Mapping[str, Any]
Group = Sequence[tuple[int, Json]]  # (position, check) pairs; several if GPUs share a result

_SECONDS: Final = re.compile(r" \((\d+) s\)$")  # at the end of a summary; ignored in the comparison


def group_checks(checks: Sequence[Json]) -> list[Group]:
    """Group results that several GPUs share, at the position of the first GPU's result."""
    groups: dict[tuple[object, ...], list[tuple[int, Json]]] = {}
    for place, check in enumerate(checks):
        key: tuple[object, ...] = (place,)
        if check["gpu"] is not None:
            said = _SECONDS.sub("", check["summary"])
            key = (_kind(check), check["status"], check["id"], check["fix"], said)
            key = (*key, *check["details"])
        groups.setdefault(key, []).append((place, check))
    return list(groups.values())


def list_steps(groups: Sequence[Group], statuses: Sequence[str]) -> Iterator[Markup]:
    """Yield list items for the checks with these statuses.

    Checks with the same status, id and fix share an item. Without a fix, an item shows the
    first detail of its check.
    """
    steps: dict[tuple[object, ...], list[Group]] = {}
    for status in statuses:
        for group in groups:
            place, check = group[0]
            if check["status"] == status:
                own = (check["id"], check["fix"]) if check["fix"] else (place,)
                steps.setdefault((status, *own), []).append(group)
    for own_groups in steps.values():
        yield element("li", *map(_step_line, own_groups), *_step(own_groups[0][0][1]))


def _step_line(group: Group) -> Markup:
    place, check = group[0]
    link = element("a", _name(group), href=f"#check-{place}")
    return element("div", _chip(check), " ", link, ": ", prose(_summarize(group)))


def _step(check: Json) -> Iterator[Markup]:
    """Return the fix; if there is none, the first detail."""
    if check["fix"]:
        yield show_fix(check["fix"])
    else:
        yield from (element("p", prose(detail), _class="facts") for detail in check["details"][:1])


def show_fix(text: str) -> Markup:
    """Return the paragraph with a fix."""
    return element("p", element("b", "Fix:"), " ", prose(text), _class="fix")


def show_check(group: Group) -> Markup:
    """Return an entry of the list of checks."""
    place, check = group[0]
    parts = [element("div", prose(_summarize(group))), _details(check)]
    if check["fix"]:
        parts.append(show_fix(check["fix"]))
    if check["id"] and FINDINGS.get(check["id"]):
        link = element("a", f"what {check['id']} means", href=f"#{check['id']}")
        parts.append(element("p", link))
    return element(
        "li",
        element("div", _chip(check)),
        element("h3", _name(group)),
        element("div", *parts, _class="what"),
        id=f"check-{place}",
        _class="check",
    )


def _details(check: Json) -> Markup:
    """Write the details; collapse several if the status is `ok` or `skip`: tables repeat them."""
    details = check["details"]
    if not details:
        return Markup()
    aligned = any("  " in detail.strip() for detail in details)
    style = "lines mono" if aligned else "lines"
    written = element("div", prose("\n".join(details)), _class=style)
    if check["status"] not in {"ok", "skip"} or len(details) == 1:
        return written
    title = "kernels and plans" if check["data"].get("kernels") else count(len(details), "detail")
    return element("details", element("summary", title), written)


def _name(group: Group) -> str:
    check = group[0][1]
    if len(group) == 1:
        return str(check["name"])
    return f"{_kind(check)} {list_ranges(sorted({one['gpu'] for _, one in group}))}"


def _kind(check: Json) -> str:
    return str(check["name"]).partition(" ")[0]


def _summarize(group: Group) -> str:
    """Return the first summary; replace the seconds in it by their range over the GPUs."""
    summary = str(group[0][1]["summary"])
    found = [_SECONDS.search(one["summary"]) for _, one in group]
    took = sorted(int(match[1]) for match in found if match)
    if not took or took[0] == took[-1]:
        return summary
    return _SECONDS.sub(f" ({took[0]} to {took[-1]} s)", summary)


def _chip(check: Json) -> Markup:
    return element("span", check["status"], _class=f"chip {check['status']}")


def show_meaning(name: str) -> Markup:
    """Explain a finding; return empty markup for an id that this version does not have."""
    entry = FINDINGS.get(name)
    if entry is None:
        return Markup()
    return element(
        "div",
        element("h3", entry.title, " ", element("span", name, _class="mono")),
        element("p", prose(entry.meaning)),
        show_fix(entry.remedy),
        id=name,
        _class="meaning",
    )
