"""Output of --json follows docs/schema."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from flash_dist.toolkit.cli import SUBCOMMANDS, main
from flash_dist.toolkit.cli.fleet import to_json
from flash_dist.toolkit.doctor.examine import Examination, examine
from flash_dist.toolkit.findings.proofs import SELFTEST_CRASHED
from flash_dist.toolkit.findings.result import CheckResult
from flash_dist.toolkit.loading.process import Outcome
from flash_dist.toolkit.machine.install_files import InstallFiles
from flash_dist.toolkit.machine.libcuda import Cuda
from flash_dist.toolkit.machine.torch_install import Torch
from flash_dist.toolkit.selftest.fleet import compare_members
from flash_dist.toolkit.selftest.run import judge_outcome
from tests.unit.made.builds import ALL, HOPPER, make_environment, make_what_if
from tests.unit.made.fatbin_builder import SASS, Kernel, container, cubin, entry, library
from tests.unit.toolkit.audit.test_own import make_contents
from tests.unit.toolkit.selftest.test_fleet import RIGHT, member

if TYPE_CHECKING:
    from flash_dist.toolkit.checks.environment import Environment
    from flash_dist.toolkit.selftest.report import SelftestReport
    from tests.unit.made.command import Cli

FOLDER = Path(__file__).parents[4] / "docs" / "schema"
SCHEMAS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}

MACHINES = {
    "healthy": make_environment(ALL, "8.6", "9.0"),
    "partly served": make_environment(HOPPER, "8.6", "9.0"),
    "what if": make_what_if(ALL, "7.5", "8.7", "6.1", driver=None),
    "no driver": replace(make_environment(ALL), cuda=Cuda("absent", reason="not found")),
    "nothing": replace(
        make_environment(ALL), torch=Torch("absent", reason="no torch"), files=InstallFiles()
    ),
}


def check(name: str, document: Any) -> None:  # noqa: ANN401 - any document
    jsonschema.validate(document, SCHEMAS[name], cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_one(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[name])
    command = "doctor --save" if name == "record" else name
    assert SCHEMAS[name]["title"].startswith(f"python -m flash_dist {command}")


def test_every_command_with_json_has_a_schema() -> None:
    assert set(SCHEMAS) - {"record"} == set(SUBCOMMANDS) - {
        "bench",  # its --json writes a run to a file
        "explain",  # doctor's schema contains explain's
        "fleet",
    }


@pytest.mark.parametrize("machine", MACHINES.values(), ids=list(MACHINES))
def test_an_examination_is_as_the_schema_says(machine: Environment) -> None:
    document = Examination(machine, tuple(examine(machine))).to_json()
    check("doctor", json.loads(json.dumps(document)))


def test_the_schema_of_doctor_describes_every_key() -> None:
    machine = MACHINES["healthy"]
    document = Examination(machine, tuple(examine(machine))).to_json()
    environment = document["environment"]
    parts = {
        "examination": document,
        "check": document["checks"][0],
        "environment": environment,
        "gpu": environment["cuda"]["gpus"][0],
        "loading": environment["loading"],
    }
    for name, part in parts.items():
        lacking = set(part) - set(SCHEMAS["doctor"]["$defs"][name]["properties"])
        assert not lacking, f"docs/schema/doctor.json does not describe it in `{name}`"


def test_the_schema_of_doctor_refuses_what_is_none() -> None:
    document = Examination(MACHINES["healthy"], tuple(examine(MACHINES["healthy"]))).to_json()
    document["checks"][-1]["data"]["how"] = "somehow"
    with pytest.raises(jsonschema.ValidationError):
        check("doctor", document)
    document["checks"][-1] = {**document["checks"][0], "status": "fail", "id": None}
    with pytest.raises(jsonschema.ValidationError):
        check("doctor", document)


def test_a_fleet_is_as_the_schema_says() -> None:
    wrong = replace(RIGHT, digests={"out": "a", "dk": "f"})
    dead = CheckResult(
        "fail", "it was killed by SIGABRT", entry=SELFTEST_CRASHED, name="selftest 0"
    )
    members = [member(0, RIGHT), member(1, RIGHT), member(2, wrong)]
    members.append(replace(member(3), gpu=None, result=dead))
    results = compare_members(members)
    check("doctor", json.loads(json.dumps(to_json(members, results, 1))))


def test_libraries_and_explanations_are_as_the_schema_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lib = tmp_path / "lib.so"
    lib.write_bytes(library(container(entry(SASS, 80, cubin(Kernel("alpha"))))))
    main(["doctor", "--wheel", str(lib), "--gpu", "8.6,9.0", "--json"])
    check("doctor", json.loads(capsys.readouterr().out))
    for text in ("install-twice", "CUDA error: no kernel image is available"):
        main(["explain", text, "--json"])
        check("doctor", json.loads(capsys.readouterr().out))


def report_findings(device: str, *, runs: int, timeout: float, **_: object) -> SelftestReport:
    difference = {"tensor": "dq", "count": 3}
    finding = {"case": "odd", "summary": "dq differs", "difference": difference}
    events = (
        {"event": "case", "case": "odd"},
        {"event": "finding", "id": "selftest-values-differ", **finding},
    )
    return judge_outcome(device, runs, Outcome("signal", "SIGABRT", events, ("FATAL",), timeout))


def test_a_selftest_is_as_the_schema_says(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    machine = MACHINES["healthy"]
    monkeypatch.setattr("flash_dist.toolkit.cli.selftest.gather_gpus", lambda _: machine)
    monkeypatch.setattr("flash_dist.toolkit.cli.selftest.read_installed", lambda: machine.installed)
    monkeypatch.setattr("flash_dist.toolkit.doctor.proof.run_selftest", report_findings)
    document = json.loads(cli("selftest", "--json", status=1).out)
    assert len(document["devices"][0]["findings"]) == 2
    check("selftest", document)
    machine = replace(machine, cuda=Cuda("absent"))
    check("selftest", json.loads(cli("selftest", "--json", status=3).out))


def test_an_audit_is_as_the_schema_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lib = tmp_path / "lib.so"
    lib.write_bytes(library(container(entry(SASS, 80, cubin(Kernel("alpha"))))))
    assert main(["audit", str(lib), "--require", "9.0", "--json"]) == 1
    check("audit", json.loads(capsys.readouterr().out))
    wheel = tmp_path / "flash_dist-0.1.0-py3-none-any.whl"
    wheel.write_bytes(b"PK\x05\x06" + bytes(18))  # an empty archive; the test supplies its contents
    monkeypatch.setattr("flash_dist.toolkit.audit.own.read_contents", lambda _: make_contents())
    main(["audit", str(wheel), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["package_version"] == "0.1.0+cu130.hopper"
    check("audit", document)
