"""The entries of flash_dist/findings against the ids that the source really uses, both ways."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from flash_dist.cli import main
from flash_dist.cli.terminal.results import layout_result
from flash_dist.findings import FINDINGS, SUBJECTS, find, hint_for, page_of, suggest
from flash_dist.findings.result import CheckResult

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(__file__).parents[3] / "flash_dist"

# The calls that carry an id: its place among the positional arguments, 0 for the first.
CARRIERS = {
    "CheckResult": 5,
    "Finding": 0,
    "Cause": 0,
    "CacheProblem": 0,
    "_fail": 2,
    "Problem": 0,
    "label": 0,
    "replace": None,
}

# An id that is computed: the expression as it stands in the source, and all it can become.
COMPUTED = {
    "f'torch-{torch.status}'": ("torch-absent", "torch-broken"),
    "f\"{loading.stage or 'child'}-{loading.status}\"": (
        "kernels-failed",
        "kernels-crashed",
        "torch-failed",
        "torch-crashed",
        "extension-failed",
        "extension-crashed",
        "child-crashed",
    ),
    "f'selftest-{cause}'": ("selftest-timeout", "selftest-crashed"),
    "cause": ("library-unreadable", "manifest-unreadable"),
    "verdict.cause": (
        "driver-too-old",
        "hardware-too-old",
        "jit-compiler-absent",
        "jit-variable",
        "no-kernels",
        "no-matching-code",
        "smem-limit",
    ),
    "report.findings[0].id": (),  # of a Finding, found where that is made
    "str(event['id'])": ("selftest-bits-differ", "selftest-values-differ"),
    "DIFFERS": ("load-prediction-differs",),
    # Of a Cause, a CacheProblem or a prediction, found where that is made:
    "cause.id": (),
    "name": (),
    "problem.id": (),
    "replaced[0][2].id": (),
    "predicted.id or result.id": (),
    "result.id": (),
    "loading.id or f'{loading.stage}-failed'": (),
}

ENTRIES = [pytest.param(name, id=name) for name in FINDINGS]


@cache
def used_ids() -> dict[str, str]:
    """Return every id in the source with the place that uses it."""
    found: dict[str, str] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                for expression in id_expressions(node):
                    place = f"{path.name}:{node.lineno}"
                    found.update(dict.fromkeys(read_ids(expression, place), place))
    return found


def id_expressions(call: ast.Call) -> Iterator[ast.expr]:
    name = getattr(call.func, "id", getattr(call.func, "attr", ""))
    if name not in CARRIERS:
        return
    place = CARRIERS[name]
    if place is not None and len(call.args) > place:
        yield call.args[place]
    yield from (keyword.value for keyword in call.keywords if keyword.arg == "id")


def read_ids(expression: ast.expr, place: str) -> Iterator[str]:
    if isinstance(expression, ast.Constant):
        yield from filter(None, [str(expression.value)])
    elif isinstance(expression, ast.IfExp):
        yield from read_ids(expression.body, place)
        yield from read_ids(expression.orelse, place)
    else:
        text = ast.unparse(expression)
        assert text in COMPUTED, f"{place}: say in COMPUTED what `{text}` can become"
        yield from COMPUTED[text]


def test_every_id_of_the_source_has_an_entry() -> None:
    missing = {name: place for name, place in used_ids().items() if name not in FINDINGS}
    assert not missing, "write an entry in the module of flash_dist/findings that fits"


def test_every_entry_is_an_id_of_the_source() -> None:
    silent = {name for name, entry in FINDINGS.items() if not entry.pattern}
    assert silent - set(used_ids()) == set()


def test_an_id_stands_in_one_subject_only() -> None:
    assert sum(len(entries) for _, entries in SUBJECTS) == len(FINDINGS)


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_is_plain_sentences(name: str) -> None:
    entry = FINDINGS[name]
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)
    assert not entry.title.endswith(".")
    assert len(entry.title) <= 70
    for text in (entry.meaning, entry.remedy):
        assert text.endswith(".")
        assert 1 <= len(re.findall(r"[.?](?: |$)", text)) <= 5
        assert text.count("`") % 2 == 0
        assert "  " not in text


@pytest.mark.parametrize("name", ENTRIES)
def test_ids_that_an_entry_refers_to_exist(name: str) -> None:
    entry = FINDINGS[name]
    for other in re.findall(r"\(`([a-z-]+)`\)", entry.meaning + entry.remedy):
        assert other in FINDINGS


def test_doctor_explains_an_id(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--explain", "install-damaged"]) == 0
    out = capsys.readouterr().out
    entry = FINDINGS["install-damaged"]
    assert out == f"{entry.title}\n  {entry.meaning}\nfix: {entry.remedy}\n"
    assert main(["doctor", "--json", "--explain", "install-damaged"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["id"] == "install-damaged"
    assert document["docs"] == "findings.html#install-damaged"


def test_a_misspelt_id_is_recognised(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--explain", "instal-damaged"]) == 3
    assert "hint: the id `install-damaged` is known" in capsys.readouterr().err
    assert suggest("a sentence that is about something else") is None


def test_a_result_names_its_page_once() -> None:
    result = CheckResult("install", "fail", "1 file", ("detail",), "install again", "install-twice")
    text = "\n".join(layout_result(result, None))
    assert text.endswith("fix: install again (more: `doctor --explain install-twice`)")
    assert text.count("--explain") == 1
    assert result.to_json()["docs"] == "findings.html#install-twice"


def test_a_result_without_a_fix_names_its_page_too() -> None:
    result = CheckResult("extension", "skip", "nothing to load", id="extension-absent")
    assert list(layout_result(result, None))[-1].strip() == hint_for("extension-absent")


def test_a_good_result_and_an_unknown_id_name_none() -> None:
    shown = CheckResult("compat", "ok", "in use", id="driver-too-old")
    assert len(list(layout_result(shown, None))) == 1
    assert len(list(layout_result(CheckResult("torch", "ok", "torch 2.11.0"), None))) == 1
    assert (find("no-such-id"), page_of("no-such-id"), hint_for("no-such-id")) == (None, None, "")
