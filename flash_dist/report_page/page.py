"""One self-contained page of an examination, to attach to a bug report: no script, no network.

What it tells of the machine is what `doctor --json` tells, without names of people and hosts.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from ..findings import find
from .markup import Markup, element, make_head, prose
from .style import STYLE
from .tables import make_tables

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .redaction import Redaction

    Json = Mapping[str, Any]

_STATUSES: Final = ("fail", "warn", "ok", "skip")
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
_LEFT_OUT: Final = frozenset({"archsets"})  # of the table of facts: what could be installed instead


def make_page(examination: Json, redaction: Redaction, *, version: str, written: str) -> str:
    """Return the page.

    Args:
        examination: `Examination.to_json()`.
        redaction: What the page does not tell.
        version: Of flash_dist.
        written: When, for the reader.
    """
    data = redaction.data(examination)
    checks = data["checks"]
    title = conclude(data)
    body = element(
        "body",
        _verdict(data, title, version, written),
        _steps(checks),
        make_tables(checks, data["environment"]["cuda"]["gpus"]),
        _section("Checks", [element("div", *(_check(*one) for one in enumerate(checks)))]),
        _section("What the findings mean", list(_meanings(checks))),
        _section("Environment", [_facts(data["environment"])]),
        _section("All of it as JSON", [_json(data)], style="json"),
        element("footer", f"Written by flash_dist {version}, {written}. {_PROMISE}"),
    )
    policy = Markup(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">')
    head = make_head(f"flash_dist doctor: {title}", STYLE, policy)
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


_PROMISE: Final = (
    "Home folders, names of users and of this host, credentials in addresses and the ends of "
    "device ids were left out; of the environment's variables only those above are told."
)


def conclude(data: Json) -> str:
    """Say in a few words what the examination came to."""
    counts = Counter(check["status"] for check in data["checks"])
    if counts["fail"]:
        return f"{_count(counts['fail'], 'check')} failed"
    if data["exit_code"] == 1:
        return f"{_count(counts['warn'], 'warning')}, which count as failures"
    if data["exit_code"] == 3:  # noqa: PLR2004 - EXIT_NOTHING_CHECKED
        return "Nothing could be checked: there is no GPU"
    warned = f", {_count(counts['warn'], 'warning')}" if counts["warn"] else ""
    return f"No failure{warned}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _verdict(data: Json, title: str, version: str, written: str) -> Markup:
    counts = Counter(check["status"] for check in data["checks"])
    chips = [
        element("span", f"{counts[status]} {status}", _class=f"chip {status}")
        for status in _STATUSES
        if counts[status]
    ]
    kind = "what if" if data["what_if"] else "examination"
    status = data["status"] if data["exit_code"] != 1 else "fail"
    return element(
        "header",
        element("div", f"flash_dist doctor, {kind}, {written}", _class="program"),
        element("h1", title),
        element("p", *_spaced(chips), f"exit status {data['exit_code']}"),
        element("p", " · ".join(_gist(data, version)), _class="facts"),
        _class=f"verdict {status}",
    )


def _gist(data: Json, version: str) -> Iterator[str]:
    """Name what was judged: a what-if has no machine around its GPUs."""
    environment = data["environment"]
    torch = environment["torch"]["version"]
    yield environment["installed"]["build"] or f"flash_dist {version}"
    yield from filter(None, [_describe_driver(environment["cuda"])])
    yield from _count_gpus(environment["cuda"]["gpus"])
    if not data["what_if"]:
        yield f"torch {torch}" if torch else "no torch"
        yield f"Python {environment['python']}"
        yield environment["system"]


def _spaced(parts: Sequence[Markup]) -> Iterator[str]:
    for part in parts:
        yield part
        yield " "


def _describe_driver(cuda: Json) -> str:
    if cuda["status"] != "ok":
        return "no driver" if cuda["status"] == "absent" else "a driver that does not answer"
    if not cuda["driver_cuda"]:
        return ""
    release = f"driver {cuda['driver_release']}" if cuda["driver_release"] else "a driver"
    return f"{release} (CUDA {cuda['driver_cuda']})"


def _count_gpus(gpus: Sequence[Json]) -> list[str]:
    kinds = Counter(
        f"{gpu['name']} ({gpu['compute_capability']})"
        if gpu["name"]
        else f"compute capability {gpu['compute_capability']}"
        for gpu in gpus
    )
    return [f"{count} x {kind}" if count > 1 else kind for kind, count in kinds.items()]


def _steps(checks: Sequence[Json]) -> Markup:
    """List what to do, the failures first."""
    todo = [
        (place, check)
        for status in ("fail", "warn")
        for place, check in enumerate(checks)
        if check["status"] == status
    ]
    if not todo:
        return Markup()
    items = [
        element(
            "li",
            element("span", check["status"], _class=f"chip {check['status']}"),
            " ",
            element("a", check["name"], href=f"#check-{place}"),
            ": ",
            prose(check["summary"]),
            *_step(check),
        )
        for place, check in todo
    ]
    return _section("What to do", [element("ol", *items, _class="steps")])


def _step(check: Json) -> Iterator[Markup]:
    """Give the fix; where there is none, what may make one needless."""
    if check["fix"]:
        yield element("p", prose(check["fix"]), _class="fix")
    else:
        yield from (element("p", prose(detail), _class="facts") for detail in check["details"][:1])


def _check(place: int, check: Json) -> Markup:
    parts = [element("div", prose(check["summary"]))]
    if check["details"]:
        parts.append(element("div", prose("\n".join(check["details"])), _class="details mono"))
    if check["fix"]:
        parts.append(element("p", prose(check["fix"]), _class="fix"))
    if check["id"] and find(check["id"]):
        link = element("a", f"what {check['id']} means", href=f"#{check['id']}")
        parts.append(element("p", link, _class="more"))
    return element(
        "div",
        element("div", element("span", check["status"], _class=f"chip {check['status']}")),
        element("div", check["name"], _class="name"),
        element("div", *parts, _class="what"),
        id=f"check-{place}",
        _class="check",
    )


def _meanings(checks: Sequence[Json]) -> Iterator[Markup]:
    ids = [check["id"] for check in sorted(checks, key=lambda c: _STATUSES.index(c["status"]))]
    for name in dict.fromkeys(ids):
        entry = find(name or "")
        if entry is not None:
            yield element(
                "div",
                element("h3", entry.title, element("span", name, _class="mono")),
                element("p", prose(entry.meaning)),
                element("p", prose(entry.remedy), _class="fix"),
                id=name,
                _class="meaning",
            )


def _facts(environment: Json) -> Markup:
    rows = [
        element("tr", element("th", name), element("td", value))
        for name, value in _flatten(environment, "")
    ]
    return element("div", element("table", *rows, _class="facts-table"), _class="scroll")


def _flatten(value: Any, name: str) -> Iterator[tuple[str, str]]:  # noqa: ANN401 - plain data
    """Yield `cuda gpus 0 name` and its value; what is empty or unknown is left out."""
    if isinstance(value, dict):
        for key, one in value.items():
            if key not in _LEFT_OUT:
                yield from _flatten(one, f"{name} {key}".strip())
    elif isinstance(value, list) and any(isinstance(one, (dict, list)) for one in value):
        for place, one in enumerate(value):
            yield from _flatten(one, f"{name} {place}")
    elif isinstance(value, list):
        if value:
            yield name, ", ".join(map(str, value))
    elif isinstance(value, bool):
        yield name, "yes" if value else "no"
    elif value not in {None, ""}:
        yield name, str(value)


def _json(data: Json) -> Markup:
    return element(
        "details",
        element("summary", "what doctor --json prints, less what this page leaves out"),
        element("pre", json.dumps(data, separators=(",", ":"), ensure_ascii=False)),
    )


def _section(title: str, parts: Sequence[Markup], *, style: str = "") -> Markup:
    if not parts:
        return Markup()
    return element("section", element("h2", title), *parts, _class=style)
