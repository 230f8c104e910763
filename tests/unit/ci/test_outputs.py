"""Outputs of our commands in the texts are as recorded, and still true."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from ci.outputs import (
    OUTPUTS,
    RECORDS,
    TOLD,
    Output,
    OutputError,
    count_again,
    count_cases,
    find_changes,
    find_texts,
    main,
    make_environ,
    run_output,
    show,
)
from ci.speed import load
from flash_dist.bench.baselines.names import in_deterministic_mode
from flash_dist.bench.results import collect_ratios, geometric_mean
from flash_dist.toolkit.make.project import ROOT
from tests.unit.made.scenarios import SCENARIOS


@pytest.mark.parametrize("path", find_texts(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_text_shows_what_was_recorded(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert show(text) == text, "`python -m ci.outputs` puts the records into the texts"


def test_the_lines_of_doctor_in_the_readme_are_of_its_record() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```text\n(.*?)```", readme, re.DOTALL)
    record = next(one for one in OUTPUTS if one.name == "doctor").read()
    assert [line for line in shown.splitlines() if line not in record.splitlines()] == []


def test_every_record_is_shown_and_no_other_is_kept() -> None:
    texts = "".join(path.read_text(encoding="utf-8") for path in find_texts())
    assert [one.name for one in OUTPUTS if f"```console\n$ {one.command}\n" not in texts] == []
    assert {path.stem for path in RECORDS.iterdir()} == {one.name for one in OUTPUTS}


@pytest.mark.parametrize(
    "output", [one for one in OUTPUTS if one.needs == "tree"], ids=lambda one: one.name
)
def test_outputs_of_the_sources_alone_are_up_to_date(output: Output, tmp_path: Path) -> None:
    environ = make_environ(Path(sys.executable), tmp_path, tree=True)
    assert run_output(output, tmp_path, environ) == output.read()


@pytest.mark.parametrize("output", OUTPUTS, ids=lambda one: one.name)
def test_the_numbers_of_files_are_those_of_this_tree(output: Output) -> None:
    text = output.read()
    assert count_again(text) == text, "`python -m ci.outputs` counts again"


def test_the_numbers_of_files_are_looked_at_at_all() -> None:
    assert count_again("1 files as recorded") != "1 files as recorded"
    assert any("files as recorded" in one.read() for one in OUTPUTS)
    assert any("files are those that RECORD lists" in one.read() for one in OUTPUTS)


@pytest.mark.parametrize(
    "output", [one for one in OUTPUTS if one.needs == "wheel"], ids=lambda one: one.name
)
def test_the_numbers_of_kernels_are_those_of_the_table(output: Output) -> None:
    assert find_changes(output.read()) == [], "`nox -s outputs` prints it again, from a new wheel"


@pytest.mark.parametrize(
    "output", [one for one in OUTPUTS if one.needs == "gpu"], ids=lambda one: one.name
)
def test_outputs_of_a_gpu_are_up_to_date_or_marked_as_stale(output: Output) -> None:
    stale = bool(find_changes(output.read()))
    assert output.is_marked() == stale, "`python -m ci.outputs` marks it, `nox -s gpu_outputs` runs"


def test_every_number_is_looked_at_in_the_output_of_doctor() -> None:
    text = next(one for one in OUTPUTS if one.name == "doctor").read()
    assert all(pattern.search(text) for _, pattern, _ in TOLD)


def test_a_new_case_marks_the_record_of_a_gpu_until_it_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = Output("one", "gpu", "doctor")
    text = f"# today, H200\n$ doctor\n{count_cases()} cases, 30 runs each\n"
    output.path(tmp_path).write_text(text, encoding="utf-8")
    output.mark(tmp_path)
    assert not output.is_marked(tmp_path)
    number = count_cases()
    told = ("cases", re.compile(r"\d+(?= cases, 30 runs each)"), lambda: number + 1)
    monkeypatch.setattr("ci.outputs.TOLD", (told,))
    output.mark(tmp_path)
    assert output.is_marked(tmp_path)
    place, _, rest = output.path(tmp_path).read_text(encoding="utf-8").partition("\n")
    assert place == f"# today, H200; stale: {number + 1} cases instead of {number}"
    assert rest == output.read(tmp_path) == text.partition("\n")[2]
    monkeypatch.undo()
    output.mark(tmp_path)
    assert output.path(tmp_path).read_text(encoding="utf-8") == text


def test_the_hidden_gpu_of_the_text_is_a_scenario() -> None:
    text = " ".join((ROOT / "docs" / "doctor.md").read_text(encoding="utf-8").split())
    for sentence in SCENARIOS["a hidden GPU"].says:
        assert sentence in text


@pytest.mark.parametrize(
    ("start", "peer"),
    [
        ("torch's FLASH ", "sdpa-flash"),
        ("cuDNN 9.19", "sdpa-cudnn"),
        ("FlashAttention-4 ", "fa4-deterministic"),
        ("cuDNN's flex attention ", "cudnn-flex-deterministic"),
        ("the same, deterministic", "sdpa-flash-deterministic"),
    ],
)
def test_the_means_of_the_readme_are_those_of_the_results(start: str, peer: str) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (line,) = [one for one in readme.splitlines() if one.startswith(f"| {start}")]
    cells = [cell.strip() for cell in line.strip("|").split("|")[1:]]
    found = [collect_ratios(load("paper"), peer, one) for one in ("forward", "backward")]
    means = [f"{geometric_mean(x):.2f} ({min(x):.2f} to {max(x):.2f})" for x in found]
    if in_deterministic_mode(peer):
        means[0] = ""  # the mode changes only backwards
    assert cells == means


def test_a_command_that_is_not_recorded_is_not_shown() -> None:
    with pytest.raises(OutputError, match="not recorded"):
        show("```console\n$ python -m flash_dist selftest\nfine\n```\n")


def test_an_output_replaces_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    output = Output("one", "tree", "--version")
    output.path(tmp_path).write_text(f"# today\n$ {output.command}\nnew\n", encoding="utf-8")
    block = "before\n```console\n$ {}\n{}```\nafter\n"
    old = block.format(output.command, "old\nlines\n")
    assert show(old, [output], tmp_path) == block.format(output.command, "new\n")


def test_a_run_is_a_terminal_without_colours_and_with_a_home_of_its_own(tmp_path: Path) -> None:
    environ = make_environ(Path(sys.executable), tmp_path, tree=True)
    text = run_output(Output("version", "tree", "--version; pwd; echo $COLUMNS"), tmp_path, environ)
    assert text.splitlines()[2:] == ["~", "100"]


def test_an_unexpected_status_is_reported(tmp_path: Path) -> None:
    environ = make_environ(Path(sys.executable), tmp_path, tree=True)
    with pytest.raises(OutputError, match="ended with status 2"):
        run_output(Output("wrong", "tree", "doctor --gpu nonsense"), tmp_path, environ)


def test_an_output_of_another_wheel_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ci.outputs.run_output", lambda *_: "$ doctor\n1 files as recorded\n")
    assert main(["tree", "--records", str(tmp_path / "records")]) == 1
    assert "counts other files than a wheel of this tree has" in capsys.readouterr().err
    assert list((tmp_path / "records").iterdir()) == []


def test_a_missing_wheel_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--dist", str(tmp_path), "--records", str(tmp_path / "records")]
    assert main(["wheel", *options]) == 1
    assert "must hold one wheel, it holds 0" in capsys.readouterr().err
