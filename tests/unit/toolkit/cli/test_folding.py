"""Wrapped and coloured sentences in a terminal, from which commands can be copied."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from flash_dist.toolkit.cli.terminal.folding import fold, print_line
from flash_dist.toolkit.cli.terminal.results import layout_result, make_console, print_result
from flash_dist.toolkit.doctor.examine import examine
from flash_dist.toolkit.findings.result import CheckResult
from tests.unit.made.scenarios import SCENARIOS

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMAND = (
    "`pip install --force-reinstall flash_dist==0.1.0+cu130.all --extra-index-url "
    "https://example.org/flash_dist/simple/ --no-deps`"
)
CODE = re.compile(r"`[^`\n]+`")
WORD = re.compile(r"\(more: `[^`\n]+`\)|`[^`\n]+`")  # unbroken text


def results() -> Iterator[CheckResult]:
    for name, scenario in SCENARIOS.items():
        for result in examine(scenario.environment):
            yield replace(result, name=name[:10])


@pytest.mark.parametrize("width", [40, 80, 120])
def test_no_command_of_any_result_is_broken(width: int) -> None:
    for result in results():
        whole = CODE.findall("\n".join(chain.from_iterable(layout_result(result, None))))
        assert CODE.findall("\n".join(chain.from_iterable(layout_result(result, width)))) == whole


@pytest.mark.parametrize("width", [80, 120])
def test_a_line_is_longer_than_the_terminal_only_for_one_long_word(width: int) -> None:
    for result in results():
        for line in chain.from_iterable(layout_result(result, width)):
            words = WORD.sub("x", line[20:]).split()
            assert len(line) <= width or len(words) <= 1


@pytest.mark.parametrize("width", [80, 120])
def test_a_command_that_is_too_long_stands_alone_and_runs_over_the_edge(width: int) -> None:
    lines = fold(f"fix: {COMMAND} installs the build", width, indent=20)
    assert [line.strip() for line in lines] == ["fix:", COMMAND, "installs the build"]
    assert fold(f"fix: {COMMAND}", None) == [f"fix: {COMMAND}"]


def test_references_to_more_help_stay_on_one_line() -> None:
    more = "(more: `python -m flash_dist explain some-id`)"
    lines = fold(f"fix: take the other file in its place {more}", 48)
    assert lines == ["fix: take the other file in its place", f"  {more}"]


def test_a_nul_in_a_name_breaks_nothing() -> None:
    assert fold("`a\0b` is a name", 40) == ["`a b` is a name"]


def printed(result: CheckResult, **options: object) -> str:
    stream = io.StringIO()
    print_result(Console(file=stream, highlight=False, **options), result)  # type: ignore[arg-type]
    return stream.getvalue()


def test_a_fix_is_coloured_and_its_words_are_the_same_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    result = CheckResult("fail", "prefix: `x` is absent", fix=f"{COMMAND} installs it", name="a")
    coloured = printed(result, force_terminal=True, width=80)
    assert "\x1b[1mfix:\x1b[0m" in coloured
    assert f"\x1b[36m{COMMAND}\x1b[0m" in coloured
    assert "\x1b[36m`x`" not in coloured
    assert "pre\x1b" not in coloured
    plain = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    monkeypatch.setenv("NO_COLOR", "1")
    bare = printed(result, force_terminal=True, width=80)
    assert "\x1b[36m" not in bare
    assert re.sub(r"\x1b\[[0-9;]*m", "", bare) == plain
    assert "\x1b" not in printed(result, force_terminal=False)
    assert printed(result, force_terminal=False).count("\n") == 2


def test_a_sentence_is_broken_on_a_terminal_alone() -> None:
    text = f"{'word ' * 30}{COMMAND}"
    stream = io.StringIO()
    print_line(make_console(stream), text)
    assert stream.getvalue() == f"{text}\n"
    terminal = io.StringIO()
    print_line(Console(file=terminal, force_terminal=True, width=80), text)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()).splitlines()
    assert lines[-1].strip() == COMMAND
    assert max(map(len, lines[:-1])) <= 80
