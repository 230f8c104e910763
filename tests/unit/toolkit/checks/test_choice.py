"""Doctor's --only, --skip, --devices, -v and -q: other checks do not run."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.checks import environment
from flash_dist.toolkit.doctor.examine import check_names
from flash_dist.toolkit.loading.parts import Loading
from flash_dist.toolkit.machine.torch_install import Torch
from tests.unit.made.builds import ALL, HOPPER, make_environment
from tests.unit.toolkit.cli.test_doctor import report_good

if TYPE_CHECKING:
    from flash_dist.toolkit.checks.environment import CheckChoice, Environment
    from flash_dist.toolkit.selftest.report import SelftestReport
    from tests.unit.made.command import Cli


class Machine:
    """A machine made by hand, which records the steps that ran."""

    def __init__(self, made: Environment) -> None:
        self.made = made
        self.tested: list[str] = []

    def gather(self, _choice: CheckChoice) -> Environment:
        return self.made

    def selftest(self, device: str, *, runs: int, **_: object) -> SelftestReport:
        self.tested.append(device)
        return report_good(device, runs=runs)


def on_machine(
    monkeypatch: pytest.MonkeyPatch, archs: str, *devices: str, proof: str = "native"
) -> Machine:
    machine = Machine(make_environment(archs, *devices, proof=proof))
    monkeypatch.setattr("flash_dist.toolkit.cli.doctor.gather_environment", machine.gather)
    monkeypatch.setattr("flash_dist.toolkit.doctor.proof.run_selftest", machine.selftest)
    return machine


def doctor(cli: Cli, *arguments: str) -> tuple[int, list[str], str]:
    status, out, _ = cli.run("doctor", *arguments)
    return status, [line.split()[1] for line in out.splitlines() if line.startswith("[")], out


def test_only_some_checks(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    machine = on_machine(monkeypatch, ALL, "8.6", "9.0")
    assert doctor(cli, "--only", "driver, gpu")[:2] == (0, ["driver", "gpu", "gpu"])
    assert machine.tested == []
    assert doctor(cli, "--only", "selftest")[:2] == (0, ["selftest", "selftest"])
    assert machine.tested == ["0", "1"]


def test_a_selftest_alone_says_that_torch_is_absent(
    monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    machine = on_machine(monkeypatch, ALL, "9.0")
    absent = Torch("absent", reason="torch is not installed")
    machine.made = replace(machine.made, torch=absent, loading=Loading("skipped"))
    status, names, out = doctor(cli, "--only", "selftest")
    assert (status, names, machine.tested) == (1, ["selftest"], [])
    assert "not run: torch is not installed" in out
    assert "explain torch-absent" in out


def test_all_but_some_checks(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    machine = on_machine(monkeypatch, ALL, "9.0")
    _, names, _ = doctor(cli, "--skip", "gpu,install")
    assert names == ["system", "torch", "build", "extension", "variables", "driver", "selftest"]
    assert set(names) < set(check_names())
    assert machine.tested == ["0"]
    data = json.loads((doctor(cli, "--skip", "gpu", "--only", "gpu,torch", "--json"))[2])
    assert [check["name"] for check in data["checks"]] == ["torch"]
    assert data["choice"] == {"only": ["gpu", "torch"], "skip": ["gpu"], "devices": None}


def test_data_of_skipped_checks_is_not_gathered(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    def refuse() -> None:
        pytest.fail("it was run")

    machine = make_environment(ALL)
    monkeypatch.setattr(environment, "read_installed", lambda: machine.installed)
    monkeypatch.setattr(environment, "try_loading", refuse)
    monkeypatch.setattr(environment, "read_install_files", refuse)
    assert doctor(cli, "--only", "system,torch", "--json")[0] in {0, 1}


def test_a_check_without_a_gpu_in_it_is_fine_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    on_machine(monkeypatch, ALL)
    assert doctor(cli, "--only", "system")[:2] == (0, ["system"])
    assert doctor(cli, "--only", "gpu")[:2] == (3, ["gpu"])


def test_some_gpus_alone(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    machine = on_machine(monkeypatch, HOPPER, "8.6", "9.0", "9.0")
    status, _, out = doctor(cli, "--devices", "2,1", "--json")
    data = json.loads(out)
    assert status == 0
    assert data["choice"]["devices"] == [1, 2]
    assert {check["gpu"] for check in data["checks"]} == {None, 1, 2}
    assert machine.tested == ["1", "2"]
    assert doctor(cli, "--devices", "0")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--only", "python"), "gpu or selftest, got `python`"),
        (("--skip", ""), "gpu or selftest, got ``"),
        (("--gpu", "9.0", "--only", "selftest"), "build, driver, variables or gpu, got `selftest`"),
        (("--only", "torch", "--skip", "torch"), "no check is left"),
        (("--only", "selftest", "--no-selftest"), "no check is left"),
        (("--devices", "3"), "devices must be among 0, got 3"),
        (("--devices", "-1"), "devices are numbers such as `0,2`, got `-1`"),
        (("--only", "gpu", "--package", "rich"), "--only has no effect with --package"),
        (("-q", "-v"), "not allowed with"),
    ],
)
def test_wrong_names_are_refused_with_the_right_ones(
    monkeypatch: pytest.MonkeyPatch, cli: Cli, arguments: tuple[str, ...], sentence: str
) -> None:
    on_machine(monkeypatch, ALL, "9.0")
    assert sentence in cli("doctor", *arguments, status=2).err


def test_quiet_leaves_warnings_failures_and_the_last_line(
    monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    on_machine(monkeypatch, HOPPER, "8.6", "9.0")
    _, names, out = doctor(cli, "-q")
    assert names == ["gpu", "gpus"]
    assert out.splitlines()[-1].endswith("at least one failure (exit status 1)")
    on_machine(monkeypatch, ALL, "9.0")
    assert doctor(cli, "-q")[2] == "9 ok: no failure (exit status 0)\n"


def test_gpus_with_equal_results_share_their_details_unless_verbose(
    monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    on_machine(monkeypatch, ALL, "7.5", "7.5", "8.6", proof="assembled")
    _, _, out = doctor(cli, "--only", "gpu")
    assert out.count("same details as gpu 0") == 1
    assert out.count("bf16 needs compute capability 8.0") == 1
    assert "bwd_delta" not in out
    _, _, out = doctor(cli, "--only", "gpu", "-v")
    assert "same details as" not in out
    assert out.count("bwd_delta") == 3


def test_a_healthy_gpu_is_one_line_and_verbose_tells_its_plans(
    monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    on_machine(monkeypatch, ALL, "9.0", "8.6")
    _, _, out = doctor(cli, "--only", "gpu")
    assert out == (
        "[ok]    gpu 0       GPU A (compute capability 9.0), 24 GiB, 82 SMs: native code (sm_90a)\n"
        "[ok]    gpu 1       GPU B (compute capability 8.6), 24 GiB, 82 SMs: code of the same "
        "major (sm_80)\n\n2 ok: no failure (exit status 0)\n"
    )
    _, _, verbose = doctor(cli, "--only", "gpu", "-v")
    told = [line.strip() for line in verbose.splitlines() if line.startswith(" ")]
    _, _, text = doctor(cli, "--only", "gpu", "--json")
    recorded = [line for check in json.loads(text)["checks"] for line in check["details"]]
    assert told == recorded
    assert sum("KB plan" in line for line in told) == 2


def test_important_facts_of_a_healthy_gpu_are_shown_without_verbose(
    monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    machine = on_machine(monkeypatch, ALL, "7.5", "12.0")
    machine.made = make_environment(ALL, "7.5", "12.0", proof="assembled")
    _, _, out = doctor(cli, "--only", "gpu")
    assert "not on this hardware: bf16 needs compute capability 8.0 or newer" in out
    assert out.count("was only assembled by its builder") == 2
    assert "KB plan" not in out
    assert "same details as" not in out
