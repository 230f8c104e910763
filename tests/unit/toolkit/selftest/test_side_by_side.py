"""Selftests of several GPUs at once: number, progress, and results if one fails."""

from __future__ import annotations

import json
import os
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from flash_dist.toolkit.doctor.proof import Proof
from flash_dist.toolkit.loading.process import watch_child
from flash_dist.toolkit.selftest.run import make_command, run_selftest
from flash_dist.toolkit.selftest.side_by_side import (
    CHILD_BYTES,
    Progress,
    SideBySide,
    _Child,
    count_places,
    count_threads,
)
from tests.unit.made import fake_child
from tests.unit.made.builds import ALL, make_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

CHILD = (str(fake_child.__file__),)
ROOT = Path(__file__).parents[4]


@pytest.fixture(autouse=True)
def children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the folder of the children's reports; their temporary files are there, too."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    folder, temporary = tmp_path / "children", tmp_path / "tmp"
    folder.mkdir()
    temporary.mkdir()
    monkeypatch.setenv("TEST_CHILDREN", str(folder))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    return folder


def start(*devices: str, timeout: float = 60, **limits: int) -> closing[SideBySide]:
    commands = {device: make_command(device, 2, CHILD) for device in devices}
    limits = {"cores": 8, "free_bytes": 1 << 40, **limits}
    return closing(SideBySide(commands, timeout=timeout, **limits))


def told(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.iterdir())]


def overlaps(children: list[dict[str, Any]]) -> list[bool]:
    spans = sorted((child["began"], child["ended"]) for child in children)
    return [one[1] > other[0] for one, other in pairwise(spans)]


def test_they_run_at_the_same_time_with_threads_and_values_in_common(
    children: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_TOGETHER", "3")
    with start("0", "1", "2", cores=9) as together:
        assert [together.outcome(device).ending for device in "012"] == ["done"] * 3
        seen = told(children)
        assert overlaps(seen) == [True, True]
        assert {child["--threads"] for child in seen} == {"3"}
        (folder,) = {child["--exact"] for child in seen}
        assert {child["mode"] for child in seen} == {0o700}
        assert Path(folder).is_dir()
    assert not Path(folder).exists()


@pytest.mark.parametrize("limits", [{"cores": 1}, {"free_bytes": CHILD_BYTES}], ids=str)
def test_selftests_run_in_sequence_if_cores_or_memory_are_few(
    children: Path, limits: dict[str, int]
) -> None:
    with start("0", "1", **limits) as together:
        assert together.outcome("1").ending == "done"
    assert overlaps(told(children)) == [False]


def test_one_alone_shares_nothing(children: Path) -> None:
    with start("0") as together:
        assert together.outcome("0").ending == "done"
    assert "--exact" not in told(children)[0]


@pytest.mark.parametrize(
    ("devices", "cores", "free", "places"),
    [
        (8, 128, None, 8),
        (8, 128, 512 << 30, 8),
        (8, 4, 512 << 30, 4),
        (8, 128, 9 << 30, 2),
        (8, 128, 0, 1),
        (1, 1, None, 1),
    ],
)
def test_as_many_as_cores_and_memory_allow(
    devices: int, cores: int, free: int | None, places: int
) -> None:
    assert count_places(devices, cores, free) == places


@pytest.mark.parametrize(("places", "cores", "threads"), [(8, 128, 4), (8, 16, 2), (3, 2, 1)])
def test_cores_are_divided_among_them(places: int, cores: int, threads: int) -> None:
    assert count_threads(places, cores) == threads


def test_one_that_dies_or_hangs_leaves_the_others_alone(children: Path) -> None:
    with start("0", fake_child.DIES, fake_child.HANGS, timeout=8) as together:
        reports = {
            device: run_selftest(device, runs=2, child=CHILD, together=together)
            for device in ("0", fake_child.DIES, fake_child.HANGS)
        }
    assert [bool(report) for report in reports.values()] == [True, False, False]
    assert [report.cases for report in reports.values()] == [4, 1, 0]
    found = [report.findings[0] for report in list(reports.values())[1:]]
    assert [finding.entry.id for finding in found] == ["selftest-crashed", "selftest-timeout"]
    assert found[0].case == "case 1"
    assert "SIGABRT" in found[0].summary
    assert len(told(children)) == 3


def test_running_selftests_are_stopped_and_leave_nothing(children: Path) -> None:
    with start("0", fake_child.HANGS) as together:
        assert together.outcome("0").ending == "done"
        pids = [child["pid"] for child in told(children)]
        assert len(pids) == 2
        temporary = children.parent / "tmp"
        assert len(list(temporary.iterdir())) == 2
    assert list(temporary.iterdir()) == []
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_nothing_is_started_before_it_is_asked_for(children: Path) -> None:
    with start("0", "1"):
        pass
    assert told(children) == []
    assert list((children.parent / "tmp").iterdir()) == []


def test_progress_counts_the_cases_of_all_and_says_how_long_they_take() -> None:
    shown: list[Progress] = []
    with start("0", "1", cores=1) as together:
        together.show = shown.append
        together.outcome("1")
        last = together.progress()
    assert (last.done, last.total, last.seconds_left) == (8, 8, 0)
    done = [one.done for one in shown]
    assert done == sorted(done)
    half = next(one for one in shown if one.done >= 2)
    assert half.total == 8  # an unknown total counts like the known one
    assert half.seconds_left is not None
    assert 0 < half.seconds_left < 20


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (Progress(0, 0), "starting"),
        (Progress(0, 462), "0 of 462 cases"),
        (Progress(120, 462, 39.7), "120 of 462 cases, about 40 s left"),
        (Progress(1, 462, 700), "1 of 462 cases, about 12 min left"),
    ],
)
def test_progress_in_words(progress: Progress, words: str) -> None:
    assert str(progress) == words


def test_a_line_of_a_report_that_is_not_whole_yet_waits(tmp_path: Path) -> None:
    report = tmp_path / "report.jsonl"
    child = _Child(watch_child(["true"], timeout=1))
    child.count(report)
    report.write_text('{"event": "start", "cases": 5}\n{"event": "case-do')
    child.count(report)
    assert (child.cases, child.done) == (5, 0)
    with report.open("a") as file:
        file.write('ne"}\n')
    child.count(report)
    child.count(report)
    assert (child.cases, child.done) == (5, 1)


def test_doctor_proves_gpus_side_by_side_in_their_order(
    monkeypatch: pytest.MonkeyPatch, children: Path
) -> None:
    monkeypatch.setenv("TEST_TOGETHER", "2")
    monkeypatch.setattr("flash_dist.toolkit.selftest.side_by_side.count_cores", lambda: 4)
    monkeypatch.setattr("flash_dist.toolkit.selftest.side_by_side.read_free_memory", lambda: None)
    machine = make_environment(ALL, "9.0", "9.0")
    proof = Proof(machine, runs=2, timeout=60, child=CHILD)
    with proof.side_by_side(machine.cuda.gpus):
        results = [proof.run(gpu) for gpu in machine.cuda.gpus]
    assert [result.status for result in results] == ["ok", "ok"]
    assert [gpu.index for gpu, _, _ in proof.proven] == [0, 1]
    assert overlaps(told(children)) == [True]
    assert proof.together is None


def outcomes(together: SideBySide, *devices: str) -> Iterator[str]:
    for device in devices:
        yield together.outcome(device).ending


def test_eight_run_at_the_same_time(children: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No child continues before all have started. Children in sequence would never end."""
    monkeypatch.setenv("TEST_TOGETHER", "8")
    with start(*"01234569", cores=8) as together:
        assert set(outcomes(together, *"01234569")) == {"done"}
    assert len({child["--exact"] for child in told(children)}) == 1
