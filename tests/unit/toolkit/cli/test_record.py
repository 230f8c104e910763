"""`doctor --save` and `--load`: a loaded record gives the output of its own machine."""

from __future__ import annotations

import io
import json
import re
import sys
from typing import TYPE_CHECKING

import jsonschema
import pytest

from flash_dist.toolkit.cli import main
from flash_dist.toolkit.doctor.record import Record
from tests.unit.made.builds import ALL, make_environment
from tests.unit.made.fatbin_builder import SASS, Kernel, container, cubin, entry, library
from tests.unit.made.scenarios import PLACE, SCENARIOS
from tests.unit.toolkit.cli.test_doctor import report_crash, report_good
from tests.unit.toolkit.cli.test_schemas import SCHEMAS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from flash_dist.toolkit.checks.environment import Environment
    from tests.unit.made.command import Cli


@pytest.fixture
def be_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[Environment], None]:
    """Replace this machine by another one, on which every selftest passes."""

    def put(machine: Environment) -> None:
        monkeypatch.setattr("flash_dist.toolkit.cli.doctor.gather_environment", lambda _: machine)
        monkeypatch.setattr("flash_dist.toolkit.cli.doctor.prove_loading", lambda found: found)
        monkeypatch.setattr("flash_dist.toolkit.doctor.proof.run_selftest", report_good)

    return put


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, ("-v",)) for name in SCENARIOS),
        *(
            ("a torch without code for the GPU", one)
            for one in ((), ("--json",), ("-q", "--strict"))
        ),
    ],
)
def test_loaded_elsewhere_it_says_and_ends_as_it_did_there(
    be_at: Callable[[Environment], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    options: tuple[str, ...],
) -> None:
    be_at(SCENARIOS[name].environment)
    place = str(tmp_path / "record.json")
    status = main(["doctor", *options, "--save", place])
    there, err = capsys.readouterr()
    assert err == f"record written to {place}\n"
    assert main(["doctor", *options, "--load", place]) == status
    here = capsys.readouterr().out
    if "--json" in options:
        document = json.loads(here)
        jsonschema.validate(document, SCHEMAS["doctor"], cls=jsonschema.Draft202012Validator)
        assert set(document.pop("record")) == {"recorded", "flash_dist"}
        assert document == {k: v for k, v in json.loads(there).items() if k != "record"}
    elif "-q" in options:
        assert here == there
    else:
        first, _, rest = here.partition("\n")
        assert re.fullmatch(
            r"recorded elsewhere on [0-9-]+ [0-9:]+ UTC by flash_dist \S+, judged by \S+", first
        )
        assert rest == there


def test_a_failing_selftest_is_replayed_with_its_data(
    be_at: Callable[[Environment], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cli: Cli
) -> None:
    be_at(make_environment(ALL, "8.6", "9.0"))
    monkeypatch.setattr("flash_dist.toolkit.doctor.proof.run_selftest", report_crash)
    place = str(tmp_path / "record.json")
    there = json.loads(cli("doctor", "--json", "--save", place, status=1).out)["checks"]
    here = json.loads(cli("doctor", "--json", "--load", place, status=1).out)["checks"]
    assert here == there
    assert [one["id"] for one in here if one["id"]] == ["selftest-crashed"] * 2


def test_a_record_goes_through_a_pipe_alone(
    be_at: Callable[[Environment], None], monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    be_at(SCENARIOS["driver 470"].environment)
    out, err = cli("doctor", "--save", "-", status=1)
    assert err == ""
    jsonschema.validate(json.loads(out), SCHEMAS["record"], cls=jsonschema.Draft202012Validator)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(out.encode())))
    out = cli("doctor", "--load", "-", status=1).out
    assert "needs driver 580 or newer, not driver 470.82.01" in out


def test_checks_that_did_not_run_there_are_not_judged_here(
    be_at: Callable[[Environment], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    be_at(SCENARIOS["driver 470"].environment)
    place = str(tmp_path / "record.json")
    main(["doctor", "--only", "driver,gpu", "--save", place])
    main(["doctor", "-q", "--load", place])
    out = capsys.readouterr().out
    assert out.count("driver-too-old") == out.count("fix: same as driver") == 2
    assert main(["doctor", "--load", place, "--only", "driver"]) == 1
    assert "gpu 0" not in capsys.readouterr().out
    assert main(["doctor", "--load", place, "--only", "install"]) == 2
    assert "error: --only must name checks of the record, driver, gpu, got `install`" in (
        capsys.readouterr().err
    )


def test_other_gpus_and_a_wheel_are_judged_on_a_recorded_machine(tmp_path: Path, cli: Cli) -> None:
    place = str(PLACE / "driver-470.json")
    out = cli("doctor", "--load", place, "--gpu", "9.0,6.1", "--driver", "580", status=1).out
    assert out.startswith(
        "recorded elsewhere on 2026-11-22 12:00 UTC by flash_dist 0.1.0+cu130.test"
    )
    assert "flash_dist 0.1.0+cu130.test, " in out
    assert "gpu 0       compute capability 9.0: native code (sm_90a)" in out
    assert "[fail]  gpu 1" in out
    lib = tmp_path / "lib.so"
    lib.write_bytes(library(container(entry(SASS, 80, cubin(Kernel("alpha"))))))
    out = cli("doctor", "--load", place, "--wheel", lib).out
    assert "NVIDIA GeForce RTX 3090 (compute capability 8.6)" in out
    assert "[ok]    driver      driver 470.82.01 (CUDA 11.4)" in out
    err = cli("doctor", "--load", place, "--devices", "1", status=2).err
    assert "devices must be among 0, got 1" in err


@pytest.mark.parametrize("name", sorted(path.stem for path in PLACE.iterdir()))
def test_a_wheel_on_a_recorded_machine_is_fine_only_where_a_gpu_was_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    lib = tmp_path / "lib.so"
    lib.write_bytes(library(container(entry(SASS, 80, cubin(Kernel("alpha"))))))
    place = str(PLACE / f"{name}.json")
    status = main(["doctor", "--load", place, "--wheel", str(lib), "--json"])
    checks = json.loads(capsys.readouterr().out)["checks"]
    judged = [one for one in checks if one["gpu"] is not None]
    assert (status in {0, 1}) == (bool(judged) or any(one["status"] == "fail" for one in checks))
    assert judged or status


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--load", "x", "--save", "y"), "--save .*--load"),
        (("--load", "x", "--runs", "5"), "--runs .*--load"),
        (("--load", "x", "--package", "y"), "--load .*--package"),
        (("--save", "x", "--wheel", "y"), "--save .*--wheel"),
        (("--load", "x", "--driver", "580"), "--driver .*--gpu"),
        (("--load", "x", "--env", "CUDA_FORCE_PTX_JIT=1"), "--env .*--gpu"),
        (("--save", "-", "--json"), "--save - .*--json"),
        (("--save", ""), "--save .*``"),
        (("--save", "absent/x"), "--save .*`absent/x`.* `absent`.* not a folder"),
        (("--save", "."), r"--save .*`\.`.* a folder"),
        (("--load", ""), "--load .*empty"),
        (("--load", "absent"), "`absent` .*No such file or directory"),
        (("--load", "."), r"`\.` .*Is a directory"),
        (("--load", "x\0y"), r"`x\\x00y` .*embedded null byte"),
    ],
)
def test_impossible_requests_are_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cli: Cli,
    options: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    out, err = cli("doctor", *options, status=2)
    assert out == ""
    assert re.search(message, err.splitlines()[0])
    assert "\n\nhint: " in err
    assert list(tmp_path.iterdir()) == []


def test_a_page_of_a_record_says_that_it_is_one(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    place = str(PLACE / "driver-470.json")
    assert main(["doctor", "--load", place, "--report", str(page)]) == 1
    assert "of a machine recorded elsewhere on 2026-11-22 12:00 UTC" in page.read_text()


def test_a_damaged_record_is_one_sentence(tmp_path: Path, cli: Cli) -> None:
    place = tmp_path / "re\x1bcord.json"
    place.write_text('{"command": "doctor --save", "version": 1, "a": ')
    out, err = cli("doctor", "--load", place, status=2)
    assert (out, err.count("\n")) == ("", 3)
    assert "re\\x1bcord.json` is not a valid record of doctor: Expecting value" in err


def test_a_record_tells_who_wrote_it(
    be_at: Callable[[Environment], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(
        "flash_dist.toolkit.cli.doctor_files.read_version", lambda: "0.1.0+cu130.all"
    )
    be_at(SCENARIOS["a sound machine"].environment)
    place = tmp_path / "record.json"
    place.write_text("an older one, which is written over as a report is")
    assert main(["doctor", "--save", str(place)]) == 0
    record = Record.from_text(place.read_text(), source="")
    assert record.written_by == "0.1.0+cu130.all"
    assert [one.name for one in record.selftest] == ["selftest 0", "selftest 1"]
