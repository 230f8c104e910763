"""`flash_dist.check()`: doctor's GPU results as data."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import flash_dist
from flash_dist.toolkit.machine import installed
from flash_dist.toolkit.machine.installed import Installed
from flash_dist.toolkit.machine.libcuda import Cuda
from flash_dist.toolkit.targets.devices import Device
from tests.unit.made.builds import ALL, HOPPER, make_environment

if TYPE_CHECKING:
    from collections.abc import Callable

    from flash_dist.toolkit.checks.environment import Environment

    Put = Callable[..., Environment]

ROOT = Path(__file__).parents[4]


def with_build(machine: Environment, found: Installed, _: Cuda) -> Environment:
    return replace(machine, installed=found)


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Put:
    """Replace the machine and the build of this process."""

    def make(archs: str, *devices: str) -> Environment:
        machine = make_environment(archs, *devices)
        monkeypatch.setattr(
            "flash_dist.toolkit.doctor.gpu_report.gather_gpus", partial(with_build, machine)
        )
        monkeypatch.setattr(
            "flash_dist.toolkit.doctor.gpu_report.read_installed", lambda: machine.installed
        )
        monkeypatch.setattr(
            "flash_dist.toolkit.doctor.gpu_report.read_cuda_apart", lambda: machine.cuda
        )
        monkeypatch.setattr(installed, "read_installed", lambda: machine.installed)
        monkeypatch.setattr(installed, "read_cuda", lambda: machine.cuda)
        return machine

    return make


def test_gpus_that_are_served_make_it_true(put: Put, capsys: pytest.CaptureFixture[str]) -> None:
    put(ALL, "8.6", "9.0")
    report = flash_dist.check()
    assert report
    assert (report.usable, report.sentence) == ((0, 1), "")
    assert [(gpu.how, gpu.targets) for gpu in report.gpus] == [
        ("same-major", ("sm_80",)),
        ("native", ("sm_90a",)),
    ]
    assert capsys.readouterr() == ("", "")


def test_one_that_is_not_makes_it_false_in_the_operators_words(put: Put) -> None:
    put(HOPPER, "9.0", "8.6")
    report = flash_dist.check()
    assert not report
    assert report.usable == (0,)
    refused = report.gpus[1]
    assert (refused.status, refused.how, refused.id) == ("fail", "none", "no-matching-code")
    raised = installed.unsupported_error(Device(8, 6), name="GPU B")
    assert raised is not None
    assert (raised.message, raised.hint) == (refused.sentence, refused.fix)
    assert report.sentence == refused.sentence
    assert flash_dist.check(devices=[0])
    assert not flash_dist.check(devices=(1,))


def test_a_gpu_that_is_not_there_is_a_value_error(
    put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = put(ALL, "8.6", "9.0")
    with pytest.raises(ValueError, match=r"devices must be 0, 1, got 2"):
        flash_dist.check([2])
    with pytest.raises(ValueError, match=r"devices must be 0, 1, got \[0\]"):
        flash_dist.check([[0]])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"devices must be several numbers or None, got 0$"):
        flash_dist.check(0)  # type: ignore[arg-type]
    bare = replace(machine, cuda=Cuda("absent", reason="libcuda.so.1 was not found"))
    monkeypatch.setattr(
        "flash_dist.toolkit.doctor.gpu_report.gather_gpus", partial(with_build, bare)
    )
    with pytest.raises(ValueError, match=r"there is no GPU here, got 0"):
        flash_dist.check([0])
    report = flash_dist.check()
    assert (bool(report), report.sentence) == (False, "no GPU here: libcuda.so.1 was not found")


def test_without_a_build_it_is_false_with_the_reason(
    put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(ALL, "9.0")
    absent = Installed(manifest_problem="no _build.json")
    monkeypatch.setattr("flash_dist.toolkit.doctor.gpu_report.read_installed", lambda: absent)
    report = flash_dist.check()
    assert not report
    assert report.sentence.endswith(": no _build.json")
    assert report.gpus[0].status == "skip"


def test_it_becomes_plain_data(put: Put) -> None:
    put(HOPPER, "9.0", "8.6")
    data = flash_dist.check().to_json()
    assert data["usable"] == [0]
    assert [gpu["status"] for gpu in data["gpus"]] == ["ok", "fail"]
    assert data["gpus"][0]["id"] is None


def test_it_needs_neither_torch_nor_a_gpu() -> None:
    script = (
        "import sys; sys.modules['torch'] = None; import flash_dist; "
        "report = flash_dist.check(); print(bool(report), flash_dist.check is not None)"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.endswith("True\n")


def test_the_library_logs_nothing_by_itself() -> None:
    handlers = logging.getLogger("flash_dist").handlers
    assert any(isinstance(handler, logging.NullHandler) for handler in handlers)
