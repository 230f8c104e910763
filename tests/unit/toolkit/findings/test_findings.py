"""The entries of flash_dist/toolkit/findings and the modules that use them, both ways."""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, get_args, get_type_hints

import pytest

from flash_dist.toolkit import findings
from flash_dist.toolkit.checks.loading import _find_entry
from flash_dist.toolkit.cli import make_parser
from flash_dist.toolkit.cli.terminal.results import layout_result
from flash_dist.toolkit.findings import FINDINGS, SUBJECTS, Entry
from flash_dist.toolkit.findings.audits import AUDIT_LOST
from flash_dist.toolkit.findings.driver import DRIVER_TOO_OLD
from flash_dist.toolkit.findings.install import INSTALL_TWICE
from flash_dist.toolkit.findings.loading import CHILD_CRASHED, EXTENSION_ABSENT
from flash_dist.toolkit.findings.own_sources import OWN_SENTENCE
from flash_dist.toolkit.findings.result import CheckResult, label, within
from flash_dist.toolkit.machine.torch_install import TORCH_PROBLEMS, Torch
from flash_dist.toolkit.product import PRODUCT
from flash_dist.toolkit.targets.verdict import Cause

if TYPE_CHECKING:
    from tests.unit.made.command import Cli

ENTRIES = [pytest.param(name, id=name) for name in FINDINGS]
PACKAGE = Path(findings.__file__).parents[2]
CAUSES = set(get_args(Cause)) - {""}
ENDS = {  # the finding for each part of loading and its outcome
    f"{stage}-{status}": (stage, status)
    for stage in ("kernels", "torch", "extension")
    for status in ("failed", "crashed")
}


@cache
def users() -> dict[str, set[Entry]]:
    """Return the entries that each module of the package imports or makes."""
    make_parser()  # imports every subcommand, and with them every check
    return {
        name: {value for value in vars(module).values() if isinstance(value, Entry)}
        for name, module in list(sys.modules.items())
        if name.startswith("flash_dist.")
    }


def test_every_entry_is_found_by_somebody_or_explains_a_message() -> None:
    sources = "".join(
        path.read_text(encoding="utf-8")
        for path in PACKAGE.rglob("*.py")
        if "findings" not in path.parts or path.name == "result.py"
    )
    named = set(re.findall(r"\b[A-Z][A-Z0-9_]+\b", sources))
    told = {name for name, entry in FINDINGS.items() if entry.messages or entry.codes}
    told |= {one.finding["id"] for one in PRODUCT.variables} | CAUSES | set(ENDS)
    told.add(OWN_SENTENCE.id)  # explains sentences of this package from its source
    unused = {name for name in FINDINGS if name.upper().replace("-", "_") not in named} - told
    assert not unused, "no module names it: delete the entry, or find it"


def test_every_entry_that_somebody_uses_is_registered() -> None:
    for name, entries in users().items():
        strangers = [entry.id for entry in entries if FINDINGS.get(entry.id) is not entry]
        assert not strangers, f"{name} has an entry that is in no subject of findings"


def test_every_cause_of_a_verdict_and_every_end_of_a_loading_has_an_entry() -> None:
    assert set(FINDINGS) >= CAUSES
    for name, (stage, status) in ENDS.items():
        assert _find_entry(stage, status) is FINDINGS[name]
    assert _find_entry("", "crashed") is CHILD_CRASHED
    statuses = set(get_args(get_type_hints(Torch)["status"])) - {"ok"}
    assert {f"torch-{status}" for status in statuses} == {
        entry.id for entry in TORCH_PROBLEMS.values()
    }


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


def test_an_id_is_explained(cli: Cli) -> None:
    out = cli("explain", "install-damaged").out
    entry = FINDINGS["install-damaged"]
    assert out == f"{entry.title}\n  {entry.meaning}\nfix: {entry.remedy}\n"
    document = json.loads(cli("explain", "--json", "install-damaged").out)
    assert document["id"] == "install-damaged"
    assert document["docs"] == "findings.html#install-damaged"


def test_a_misspelt_id_is_recognised(cli: Cli) -> None:
    err = cli("explain", "instal-damaged", status=3).err
    assert "`python -m flash_dist explain install-damaged`" in err


def test_a_result_names_its_page_once() -> None:
    result = CheckResult("fail", "1 file", ("detail",), "install again", INSTALL_TWICE)
    text = "\n".join(chain.from_iterable(layout_result(result, None)))
    assert text.endswith("fix: install again (more: `python -m flash_dist explain install-twice`)")
    assert text.count("explain") == 1
    assert result.to_json()["docs"] == "findings.html#install-twice"


def test_a_result_without_a_fix_names_its_page_too() -> None:
    result = CheckResult("skip", "nothing to load", entry=EXTENSION_ABSENT)
    last = list(chain.from_iterable(layout_result(result, None)))[-1]
    assert last.strip() == "(more: `python -m flash_dist explain extension-absent`)"


def test_a_good_result_names_none() -> None:
    shown = CheckResult("ok", "in use", entry=DRIVER_TOO_OLD)
    assert len(list(chain.from_iterable(layout_result(shown, None)))) == 1
    plain = CheckResult("ok", "torch 2.11.0")
    assert len(list(chain.from_iterable(layout_result(plain, None)))) == 1
    assert (plain.id, plain.to_json()["id"], plain.to_json()["docs"]) == ("", None, None)


def test_a_finding_is_its_sentence_and_says_where_it_was_made() -> None:
    (found,) = within("a.so", label(AUDIT_LOST, ["sm_80 is gone"]))
    assert (str(found), found.id) == ("a.so: sm_80 is gone", "audit-lost")
    assert found.to_json() == {
        "id": "audit-lost",
        "summary": "a.so: sm_80 is gone",
        "docs": "findings.html#audit-lost",
    }
