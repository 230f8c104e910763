"""Doctor and selftest from the command line: text, JSON, exit status."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from flash_dist.toolkit.cli import main
from flash_dist.toolkit.cli.doctor import ShownFixes
from flash_dist.toolkit.cli.terminal.results import layout_result, print_result
from flash_dist.toolkit.findings.driver import DRIVER_TOO_OLD
from flash_dist.toolkit.findings.result import CheckResult
from flash_dist.toolkit.loading.process import Outcome
from flash_dist.toolkit.machine.libcuda import Cuda
from flash_dist.toolkit.machine.torch_install import Torch
from flash_dist.toolkit.selftest.run import judge_outcome
from tests.unit.made.builds import ALL, HOPPER, TURING_AMPERE_ADA, make_environment, make_installed
from tests.unit.made.whole_wheel import write_whole_wheel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from flash_dist.toolkit.selftest.report import SelftestReport
    from tests.unit.made.command import Cli

DONE = ({"event": "case", "case": "odd"}, {"event": "case-done"}, {"event": "done"})


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make a build look installed."""

    def put(archs: str) -> None:
        monkeypatch.setattr(
            "flash_dist.toolkit.checks.environment.read_installed", lambda: make_installed(archs)
        )

    return put


def doctor(cli: Cli, *arguments: str) -> tuple[int, str]:
    status, out, _ = cli.run("doctor", *arguments)
    return status, out


# build, GPUs, driver -> exit status and, per GPU, how it runs the code
TABLE = [
    (
        ALL, "7.5,8.6,8.7,8.9,9.0,10.3,11.0,12.1", "580", 0,
        "native same-major jit same-major native same-major jit same-major",
    ),
    (TURING_AMPERE_ADA, "9.0,12.1", "580", 0, "jit jit"),
    (HOPPER, "8.6,12.1", "580", 1, "none none"),
    (ALL, "7.5,9.0,12.1", "535", 1, "none none none"),
    (TURING_AMPERE_ADA, "8.6", "535", 1, "none"),
    (HOPPER, "9.0", "535", 1, "none"),
    ("7.5+PTX", "8.6", "580", 0, "jit"),
    ("7.5", "9.0", "580", 1, "none"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("archs", "gpus", "driver", "status", "hows"),
    TABLE,
    ids=[f"{row[0]} on {row[1]} with {row[2]}" for row in TABLE],
)
def test_a_what_if_in_text_and_json(  # noqa: PLR0913, PLR0917 - a row of the table
    install: Callable[[str], None],
    cli: Cli,
    archs: str,
    gpus: str,
    driver: str,
    status: int,
    hows: str,
) -> None:
    install(archs)
    code, text = doctor(cli, "--gpu", gpus, "--driver", driver)
    assert code == status
    assert re.findall(r"gpu \d+ +compute capability ([0-9.]+)", text) == gpus.split(",")
    assert (text.count("[fail]  gpu") == len(gpus.split(","))) == (status == 1)
    code, text = doctor(cli, "--gpu", gpus, "--driver", driver, "--json")
    data = json.loads(text)
    assert (code, data["exit_code"], data["version"]) == (status, status, 1)
    verdicts = [check["data"] for check in data["checks"] if check["name"].startswith("gpu")]
    assert [verdict["how"] for verdict in verdicts] == hows.split()
    if driver == "535":
        assert {verdict["cause"] for verdict in verdicts} == {"driver-too-old"}
        assert all("580" in verdict["reason"] for verdict in verdicts)


def test_strict_turns_warnings_into_failures(install: Callable[[str], None], cli: Cli) -> None:
    install("7.5+PTX")
    assert doctor(cli, "--gpu", "8.6", "--strict")[0] == 1
    code, text = doctor(cli, "--gpu", "8.6", "--strict", "--json")
    assert (code, json.loads(text)["exit_code"]) == (1, 1)
    install(ALL)
    assert doctor(cli, "--gpu", "8.6", "--strict")[0] == 0


def test_a_whole_machine_with_its_selftest(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    machine = make_environment(ALL, "8.6", "9.0")
    monkeypatch.setattr("flash_dist.toolkit.cli.doctor.gather_environment", lambda _: machine)
    monkeypatch.setattr("flash_dist.toolkit.doctor.proof.run_selftest", report_good)
    code, text = doctor(cli)
    assert code == 0
    assert "[ok]    selftest 1" in text
    assert text.endswith("11 ok: no failure (exit status 0)\n")
    code, text = doctor(cli, "--no-selftest", "--json")
    assert "selftest 0" not in [check["name"] for check in json.loads(text)["checks"]]
    monkeypatch.setattr("flash_dist.toolkit.doctor.proof.run_selftest", report_crash)
    code, text = doctor(cli)
    assert code == 1
    assert "SIGABRT (odd)" in text


def report_good(device: str, *, runs: int, timeout: float = 1.0, **_: object) -> SelftestReport:
    return judge_outcome(device, runs, Outcome("done", events=DONE, seconds=timeout))


def report_crash(device: str, *, runs: int, timeout: float = 1.0, **_: object) -> SelftestReport:
    outcome = Outcome("signal", "SIGABRT", DONE[:1], ("FATAL",), timeout)
    return judge_outcome(device, runs, outcome)


@pytest.mark.parametrize(
    ("report", "status"), [(report_good, 0), (report_crash, 1)], ids=["good", "crash"]
)
def test_selftest_of_all_gpus(
    monkeypatch: pytest.MonkeyPatch, cli: Cli, report: object, status: int
) -> None:
    machine = make_environment(ALL, "8.6", "9.0")
    monkeypatch.setattr("flash_dist.toolkit.cli.selftest.gather_gpus", lambda _: machine)
    monkeypatch.setattr("flash_dist.toolkit.cli.selftest.read_installed", lambda: machine.installed)
    monkeypatch.setattr("flash_dist.toolkit.doctor.proof.run_selftest", report)
    text = cli("selftest", status=status).out
    assert text.count("selftest 0") == text.count("selftest 1") == 1
    data = json.loads(cli("selftest", "--device", "1", "--json", status=status).out)
    assert (data["version"], data["exit_code"], len(data["devices"])) == (1, status, 1)
    assert "device must be 0, 1 or cpu, got 2" in cli("selftest", "--device", "2", status=2).err


def test_selftest_without_a_gpu_checks_nothing(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    machine = replace(make_environment(ALL), cuda=Cuda("absent"))
    monkeypatch.setattr("flash_dist.toolkit.cli.selftest.gather_gpus", lambda _: machine)
    assert "[skip]" in cli("selftest", status=3).out
    assert json.loads(cli("selftest", "--json", status=3).out)["status"] == "skip"
    err = cli("selftest", "--device", "0", status=2).err
    assert re.search(r"device must be cpu\b.*, got 0", err)


def test_selftest_without_torch_fails_in_words(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    absent = Torch("absent", reason="torch is not installed")
    machine = replace(make_environment(ALL), torch=absent)
    monkeypatch.setattr("flash_dist.toolkit.cli.selftest.gather_gpus", lambda _: machine)
    text = cli("selftest", "--device", "cpu", status=1).out
    assert text == (
        "[fail]  selftest    not run: torch is not installed\n"
        "                    fix: `pip install 'torch>=2.10'` "
        "(more: `python -m flash_dist explain torch-absent`)\n"
    )
    out = cli("selftest", "--device", "cpu", "--json", status=1).out
    assert json.loads(out)["ids"] == ["torch-absent"]


RESULT = CheckResult(
    "fail",
    "RTX 5090 (compute capability 12.0) has no matching code in this build, which is old",
    ("built for: SASS sm_80, sm_90a; no PTX",),
    "install a build whose arch set includes sm_120",
    name="gpu 0",
)


def test_in_a_pipe_a_sentence_is_one_line() -> None:
    lines = list(chain.from_iterable(layout_result(RESULT, None)))
    assert lines == [
        f"[fail]  gpu 0       {RESULT.summary}",
        " " * 20 + "built for: SASS sm_80, sm_90a; no PTX",
        " " * 20 + "fix: install a build whose arch set includes sm_120",
    ]


def test_in_a_terminal_lines_are_wrapped_below_the_text() -> None:
    lines = list(chain.from_iterable(layout_result(RESULT, 70)))
    assert max(map(len, lines)) <= 70
    assert all(line.startswith(" " * 20) for line in lines[1:])
    assert " ".join(" ".join(lines).split()).startswith("[fail] gpu 0 RTX 5090 (compute")


def test_colour_repeats_the_word_and_no_color_is_honoured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable, coloured in (("TERM", True), ("NO_COLOR", False)):
        monkeypatch.setenv(variable, "xterm-256color" if coloured else "1")
        stream = io.StringIO()
        print_result(Console(file=stream, force_terminal=True, width=200), RESULT)
        assert "[fail]" in stream.getvalue()
        assert ("\x1b[1;31m[fail]" in stream.getvalue()) == coloured


def test_names_cannot_steer_the_terminal() -> None:
    stream = io.StringIO()
    result = replace(RESULT, summary="GPU \x1b[2J")
    print_result(Console(file=stream), result)
    assert "\x1b" not in stream.getvalue()


def test_help_shows_examples_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("doctor", "selftest"):
        with pytest.raises(SystemExit) as caught:
            main([name, "--help"])
        assert caught.value.code == 0
        text = capsys.readouterr().out
        assert text.count(f"python -m flash_dist {name}") >= 3
        assert "3 no GPU" in text
        assert max(map(len, text.splitlines())) <= 90


def test_what_if_takes_variables(install: Callable[[str], None], cli: Cli) -> None:
    install(ALL)
    arguments = ("--gpu", "9.0", "--driver", "580", "--env", "CUDA_FORCE_PTX_JIT=1")
    status, out = doctor(cli, *arguments)
    assert status == 0
    assert "PTX through the JIT (compute_80)" in out
    install(HOPPER)
    status, out = doctor(cli, *arguments)
    assert status == 1
    assert "CUDA_FORCE_PTX_JIT is set" in out


@pytest.mark.parametrize(
    "text",
    [
        "CUDA_FORCE_PTX_JIT",
        "PATH=/bin",
        "=1",
        "CUDA_CACHE_PATH=/tmp",
        "NVIDIA_VISIBLE_DEVICES=none",
        "NVIDIA_DRIVER_CAPABILITIES=graphics",
        "FLASH_DIST_CHECK=1",
        "FLASH_DIST_WORKSPACE_MB=64",
    ],
)
def test_a_variable_that_is_not_judged_is_refused(text: str, cli: Cli) -> None:
    assert f"got `{text}`" in cli("doctor", "--gpu", "9.0", "--env", text, status=2).err


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("CUDA_FORCE_PTX_JIT=yes", "CUDA_FORCE_PTX_JIT must be 0 or 1, got `yes`"),
        ("CUDA_MODULE_LOADING=eager!", "must be DEFAULT, EAGER or LAZY, got `eager!`"),
        ("FLASH_DIST_SMEM_LIMIT=0", "FLASH_DIST_SMEM_LIMIT must be a number of bytes, got `0`"),
    ],
)
def test_a_value_that_a_variable_cannot_have_is_wrong_usage(
    text: str, sentence: str, cli: Cli
) -> None:
    assert sentence in cli("doctor", "--gpu", "9.0", "--env", text, status=2).err


@pytest.mark.parametrize("place", [(), ("--wheel", "the wheel")], ids=["installed", "wheel"])
def test_no_variable_of_a_what_if_is_taken_without_a_word(
    place: tuple[str, ...],
    install: Callable[[str], None],
    tmp_path: Path,
    cli: Cli,
) -> None:
    install(HOPPER)
    wheel = str(write_whole_wheel(tmp_path))
    given = [wheel if word == "the wheel" else word for word in place]
    for name, value in (
        ("CUDA_VISIBLE_DEVICES", "1"),
        ("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
        ("CUDA_CACHE_DISABLE", "1"),
        ("CUDA_CACHE_MAXSIZE", "1000"),
        ("CUDA_MODULE_LOADING", "EAGER"),
        ("CUDA_FORCE_PTX_JIT", "1"),
        ("CUDA_FORCE_JIT", "1"),
        ("FLASH_DIST_SMEM_LIMIT", "1000"),
    ):
        _, out = doctor(cli, "--gpu", "9.0", "--env", f"{name}={value}", *given)
        assert name in out, out


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (["--env", "CUDA_FORCE_PTX_JIT=1"], "--env .*--gpu"),
        (["--rounds", "3"], "unrecognized .*--rounds 3"),
        (["--backend", "nccl"], "unrecognized .*--backend nccl"),
        (["--fleet", "--gpu", "8.6"], "unrecognized .*--gpu 8.6"),
        (["--fleet", "--report", "a.html"], "unrecognized .*--report a.html"),
        (["--fleet", "--no-selftest"], "unrecognized .*--no-selftest"),
        (["--explain", "no-gpu", "--fleet"], "unrecognized .*--fleet"),
        (["--explain", "", "--strict"], "unrecognized .*--strict"),
        (["--explain"], "required: TEXT"),
        (["--package", "rich", "--runs", "3"], "--runs .*--package"),
        (["--wheel", "a.so", "--only", "gpu"], "--only .*--wheel"),
        (["--wheel", "a.so", "--skip", "gpu"], "--skip .*--wheel"),
        (["--gpu", "8.6", "--runs", "3"], "--runs .*--gpu"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(
    arguments: list[str], values: str, cli: Cli
) -> None:
    assert re.match(f"error: .*{values}.*\n\nhint: ", cli("doctor", *arguments, status=2).err)


def test_usable_gpus_are_named_if_some_are_not(install: Callable[[str], None], cli: Cli) -> None:
    install(HOPPER)
    status, out = doctor(cli, "--gpu", "8.6,9.0,9.0", "--driver", "580")
    assert status == 1
    assert "2 of 3 GPUs can use this build: GPU 1, GPU 2" in out
    assert "`export CUDA_VISIBLE_DEVICES=1,2` hides the others" in out
    assert re.search(r"arch set for all of them: all$", out, re.MULTILINE)
    assert "the arch set `all`" in out
    given = ("--env", "CUDA_VISIBLE_DEVICES=3,GPU-7,0")
    _, out = doctor(cli, "--gpu", "8.6,9.0,9.0", "--driver", "580", *given)
    assert "CUDA_VISIBLE_DEVICES=GPU-7,0" in out
    _, out = doctor(cli, "--gpu", "8.6,9.0,9.0", "--driver", "580", "--json")
    data = json.loads(out)["checks"][-1]["data"]
    assert (data["usable"], data["cuda_visible_devices"]) == ([1, 2], "1,2")
    assert data["covering_set"]["name"] == "all"
    status, out = doctor(cli, "--gpu", "9.0,9.0", "--driver", "580")
    assert status == 0
    assert "GPUs can use" not in out


def test_a_fix_for_several_gpus_is_printed_once(install: Callable[[str], None], cli: Cli) -> None:
    install(HOPPER)
    what_if = ("--gpu", "8.6,6.1,8.6", "--driver", "580")
    _, out = doctor(cli, *what_if, "--json")
    first, other, again = json.loads(out)["checks"][-3:]
    assert again["fix"] == first["fix"] != other["fix"]
    for verbose in ((), ("-v",)):
        _, out = doctor(cli, *what_if, *verbose)
        assert out.count(f"fix: {first['fix']} (more: ") == 1
        assert out.count(f"fix: {other['fix']} (more: ") == 1
        assert out.rstrip().splitlines()[-3].strip() == "fix: same as gpu 0"


def test_a_fix_that_was_printed_is_named_by_its_result() -> None:
    shown = ShownFixes()
    result = replace(RESULT, name="gpu 1")
    assert shown.shorten(result) is result
    assert shown.shorten(RESULT).fix == "same as gpu 1"
    assert shown.shorten(replace(result)).fix == "same as above"
    other = replace(RESULT, entry=DRIVER_TOO_OLD)
    assert shown.shorten(other).entry is DRIVER_TOO_OLD
    assert shown.shorten(replace(RESULT, fix="")).fix == ""


def test_the_set_for_the_others_does_not_hide_what_none_serves(
    install: Callable[[str], None], cli: Cli
) -> None:
    install(HOPPER)
    _, out = doctor(cli, "--gpu", "7.0,8.6,9.0", "--driver", "580")
    assert re.search(r"arch set for 8\.6, 9\.0: all; .* 7\.0$", out, re.MULTILINE)


def test_no_other_set_is_named_where_the_build_serves_all_that_any_could(
    install: Callable[[str], None], cli: Cli
) -> None:
    install(ALL)
    _, out = doctor(cli, "--gpu", "7.0,8.6,5.2", "--driver", "580")
    assert "1 of 3 GPUs can use this build: GPU 1" in out
    assert "no build serves 5.2, 7.0" in out
    assert "arch set" not in out


def test_a_warning_does_not_list_every_tile_before_it_is_asked(
    install: Callable[[str], None], cli: Cli
) -> None:
    install(ALL)
    what_if = ("--gpu", "8.7", "--driver", "580", "--env", "CUDA_DISABLE_PTX_JIT=1")
    _, out = doctor(cli, *what_if)
    assert "KB plan" not in out
    _, out = doctor(cli, *what_if, "-v")
    assert "KB plan" in out


def test_a_disabled_jit_is_to_be_enabled_not_another_wheel_to_be_installed(
    install: Callable[[str], None], cli: Cli
) -> None:
    install(ALL)
    _, out = doctor(cli, "--gpu", "8.7", "--env", "CUDA_DISABLE_PTX_JIT=1")
    assert "`unset CUDA_DISABLE_PTX_JIT`" in out
    assert re.search(r"8\.7 comes .*Arm machines, whose set is `arm`", out)
    assert "dist/all" not in out
