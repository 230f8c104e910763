"""One self-contained page of `doctor` results, to attach to a bug report: no script, no network.

The page has the content of `doctor --json`, without names of people and hosts.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from ..findings.result import EXIT_FINDINGS, EXIT_NOTHING_CHECKED
from ..product import NAME
from ..targets.wording import count
from .checks import group_checks, list_steps, show_check, show_meaning
from .facts import make_facts
from .markup import Markup, element, join, make_head
from .style import STYLE
from .tables import make_tables

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ..redaction import Redaction

    Json = Mapping[str, Any]

_STATUSES: Final = ("fail", "warn", "ok", "skip")
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"


def make_page(examination: Json, redaction: Redaction, *, version: str, written: str) -> str:
    """Return the page.

    Args:
        examination: `Examination.to_json()`.
        redaction: Removes private data from the page.
        version: Version of this package.
        written: Time of writing, for the reader.
    """
    data = redaction.data(examination)
    checks = data["checks"]
    title = conclude(data)
    groups = group_checks(checks)
    statuses = ("fail", "warn", "skip") if is_nothing_checked(data) else ("fail", "warn")
    steps = list(list_steps(groups, statuses))
    body = element(
        "body",
        _verdict(data, title, version, written),
        element(
            "main",
            _section("What to do", [element("ol", *steps, _class="steps")] if steps else []),
            make_tables(checks, data["environment"]["cuda"]["gpus"]),
            _section("Checks", [element("ul", *map(show_check, groups), _class="checks")]),
            _section("What the findings mean", _meanings(checks)),
            _section("Environment", [make_facts(data["environment"])]),
            _section("All of it as JSON", [_json(data)], style="json"),
        ),
        element("footer", f"Written by {NAME} {version}, {written}. {_PROMISE}"),
    )
    policy = Markup(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">')
    head = make_head(f"{NAME} doctor: {title}", STYLE, policy)
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


_PROMISE: Final = (
    "Home folders, names of users and of this host, credentials in addresses and the ends of "
    "device ids were left out; of the environment's variables only those above are told."
)


def conclude(data: Json) -> str:
    """Summarise the examination in a few words."""
    counts = Counter(check["status"] for check in data["checks"])
    if counts["fail"]:
        return f"{count(counts['fail'], 'check')} failed"
    if data["exit_code"] == EXIT_FINDINGS:
        return f"{count(counts['warn'], 'warning')}, which count as failures"
    if data["exit_code"] == EXIT_NOTHING_CHECKED:
        absent = "" if data["environment"]["cuda"]["gpus"] else ": there is no GPU"
        return f"Nothing could be checked{absent}"
    if is_nothing_checked(data):
        return "Nothing was checked"
    warned = f", {count(counts['warn'], 'warning')}" if counts["warn"] else ""
    skipped = f", {count(counts['skip'], 'check')} not run" if counts["skip"] else ""
    return f"No failure{warned}{skipped}"


def is_nothing_checked(data: Json) -> bool:
    """Tell if there was no GPU to check, or no check had a result."""
    results = {check["status"] for check in data["checks"]} - {"skip"}
    return data["exit_code"] == EXIT_NOTHING_CHECKED or not results


def colour(data: Json) -> str:
    """Return the style class of the verdict: "skip" instead of "ok" if nothing was checked."""
    if data["exit_code"] == EXIT_FINDINGS:
        return "fail"
    if data["status"] == "ok" and is_nothing_checked(data):
        return "skip"
    return str(data["status"])


def _verdict(data: Json, title: str, version: str, written: str) -> Markup:
    counts = Counter(check["status"] for check in data["checks"])
    chips = [
        join(element("span", f"{counts[status]} {status}", _class=f"chip {status}"), " ")
        for status in _STATUSES
        if counts[status]
    ]
    kind = "what if" if data["what_if"] else "examination"
    record = data.get("record")
    if record:
        kind += f" of a machine recorded elsewhere on {record['recorded']}"
    return element(
        "header",
        element("div", f"{NAME} doctor, {kind}, {written}", _class="program"),
        element("h1", title),
        element("p", *chips, f"exit status {data['exit_code']}"),
        element("p", " · ".join(_gist(data, version)), _class="facts"),
        _class=f"verdict {colour(data)}",
    )


def _gist(data: Json, version: str) -> Iterator[str]:
    """Yield the judged build, driver and GPUs, and for a real machine torch, Python and system."""
    environment = data["environment"]
    torch = environment["torch"]["version"]
    build = environment["installed"]["build"]
    if build or not data["what_if"]:  # otherwise a wheel's libraries are judged, not this build
        yield build or f"{NAME} {version}"
    yield from filter(None, [_describe_driver(environment["cuda"])])
    yield from _count_gpus(environment["cuda"]["gpus"])
    if not data["what_if"]:
        yield f"torch {torch}" if torch else "no torch"
        yield f"Python {environment['python']}"
        yield environment["system"]


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


def _meanings(checks: Sequence[Json]) -> list[Markup]:
    ids = [check["id"] for check in sorted(checks, key=lambda c: _STATUSES.index(c["status"]))]
    return [meaning for meaning in map(show_meaning, dict.fromkeys(filter(None, ids))) if meaning]


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
