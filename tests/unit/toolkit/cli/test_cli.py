"""Streams and unknown arguments of every subcommand."""

from __future__ import annotations

import errno
import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from flash_dist.__main__ import run
from flash_dist.toolkit.cli import expand_alias, main, make_parser
from flash_dist.toolkit.cli.terminal.results import make_console
from flash_dist.toolkit.make.project import README, read_pyproject
from flash_dist.toolkit.product import PRODUCT
from tests.unit.made.fatbin_builder import SASS, Kernel, container, cubin, entry, library
from tests.unit.made.names import ENTRY_POINTS

if TYPE_CHECKING:
    from tests.unit.made.command import Cli

ROOT = Path(__file__).parents[4]
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}


@pytest.fixture
def lib(tmp_path: Path) -> Path:
    path = tmp_path / "lib.so"
    path.write_bytes(library(container(entry(SASS, 80, cubin(Kernel("alpha")))), wrappers=1))
    return path


def run_in_shell(redirection: str, *argv: str, stdout: int = subprocess.PIPE) -> tuple[int, str]:
    """Run the module as a shell would with this redirection; return its status and stderr."""
    command = shlex.join([sys.executable, "-m", "flash_dist", *argv])
    done = subprocess.run(
        ["sh", "-c", f"exec {command} {redirection}"],
        cwd=ROOT,
        env=BUFFERED,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


TEXTS = [["inspect"], ["inspect", "--level", "kernels"], ["inspect", "--json"]]


@pytest.mark.parametrize("argv", TEXTS, ids=" ".join)
def test_a_reader_that_goes_away_is_no_failure(argv: list[str], lib: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        assert run_in_shell("", *argv, str(lib), stdout=write_end) == (141, "")
    finally:
        os.close(write_end)


def test_help_may_be_cut_short_too() -> None:
    assert run_in_shell("| true", "doctor", "--help")[1] == ""


def test_a_console_leaves_a_closed_pipe_to_main() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as stream:
        console = make_console(stream)
        with pytest.raises(BrokenPipeError):
            console.print("line")
        os.dup2(os.open(os.devnull, os.O_WRONLY), write_end)


def test_errors_on_a_closed_stream_change_no_status(tmp_path: Path) -> None:
    for redirection in (">/dev/full 2>&1", "2>&-", ">&- 2>&-"):
        assert run_in_shell(redirection, "inspect", str(tmp_path / "absent.so")) == (2, "")


@pytest.mark.parametrize("argv", TEXTS, ids=" ".join)
def test_a_full_disk_is_a_sentence(argv: list[str], lib: Path) -> None:
    status, said = run_in_shell(">/dev/full", *argv, str(lib))
    assert (status, said) == (2, "error: cannot write the output: No space left on device\n")


@pytest.mark.parametrize("argv", TEXTS, ids=" ".join)
def test_a_closed_stdout_is_a_sentence(argv: list[str], lib: Path) -> None:
    status, said = run_in_shell(">&-", *argv, str(lib))
    assert status == 2
    assert said == "error: stdout is closed\n\nhint: `>/dev/null` discards the output\n"


def test_no_argument_prints_the_help(cli: Cli) -> None:
    printed, said = cli()
    assert printed == make_parser().format_help()
    assert said == ""


def test_the_help_the_readme_and_the_summary_say_what_this_is() -> None:
    readme = README.read_text(encoding="utf-8")
    assert make_parser().description == PRODUCT.summary
    assert readme.startswith(f"# flash_dist\n\n{PRODUCT.summary}\n")
    assert f"{read_pyproject()['project']['description']}." == PRODUCT.summary


def test_the_console_script_is_the_one_that_wheels_are_held_against() -> None:
    (script,) = read_pyproject()["project"]["scripts"].items()
    assert ENTRY_POINTS.startswith(f"[console_scripts]\n{' = '.join(script)}\n\n[sglang.")
    assert EntryPoint(script[0], script[1], "console_scripts").load() is run


@pytest.mark.parametrize(
    ("argv", "sentence", "hint"),
    [
        (
            ["inspect"],
            "inspect must be given a PATH, --package or --pid, got none",
            "inspect --help`",
        ),
        (["frobnicate"], "select or bench, got `frobnicate`", "-m flash_dist --help`"),
        (["doctor", "--gpus", "x"], "unrecognized arguments: --gpus x", "doctor --help`"),
        (
            ["doctor", "--gpu", "9.x"],
            "`sm_86` or `RTX 3090`, got `9.x`",
            "`nvidia-smi --query-gpu=",
        ),
        (["doctor", "--gpu", ""], "looks like `8.6`, `sm_86` or `RTX 3090`, got ``", "compute_cap"),
        (
            ["doctor", "--gpu", "8.6", "--driver", "abc"],
            "looks like `580` or `580.65.06`, got `abc`",
            "driver_version",
        ),
        (["docter"], "select or bench, got `docter`", "did you mean `doctor`?"),
        (["doctor", "--driver", "580"], "--driver needs --gpu", "--gpu 8.6 --driver 580"),
        (["selftest", "--runs", "1"], "at least 2, got `1`", "--runs 30"),
        (["selftest", "--device", "-1"], "number or `cpu`, got `-1`", "doctor"),
        (["inspect", "--pid", "9" * 5000], f"got `{'9' * 60}`", "`ps -e`"),
        (["inspect", "--pid", "0"], "a number of at least 1, got `0`", "`ps -e`"),
        (["selftest", "--timeout", "x" * 70], f"got `{'x' * 60}`", "--timeout 900"),
        (["selftest", "--timeout", "0"], "got `0`", "--timeout 900"),
        (["selftest", "--timeout", "nan"], "got `nan`", "--timeout 900"),
        (["selftest", "--timeout", "inf"], "got `inf`", "--timeout 900"),
        (["selftest", "--timeout", "soon"], "got `soon`", "--timeout 900"),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else None,
)
def test_wrong_usage_is_a_sentence_and_a_hint(
    argv: list[str], sentence: str, hint: str, cli: Cli
) -> None:
    out, err = cli(*argv, status=2)
    assert out == ""
    said, empty, step, end = err.split("\n")
    assert said.startswith("error: ")
    assert sentence in said
    assert (empty, end) == ("", "")
    assert step.startswith("hint: ")
    assert hint in step


NUMBERS = (
    ["doctor", "--runs"],
    ["doctor", "--devices"],
    ["selftest", "--device"],
    ["fleet", "--rounds"],
    ["bench", "--batch"],
    ["bench", "--heads"],
    ["bench", "--mask"],
)


@pytest.mark.parametrize("text", ["\u0663", "9" * 5000, "+3", "1_000"], ids=lambda text: text[:9])
@pytest.mark.parametrize("option", NUMBERS, ids=" ".join)
def test_a_number_is_a_few_of_the_digits_0_to_9(option: list[str], text: str, cli: Cli) -> None:
    err = cli(*option, f"prefix:{text}" if option[-1] == "--mask" else text, status=2).err
    sentence = err.splitlines()[0]
    assert re.match(r"error: .*(number|mask).*, got `", sentence)
    assert len(sentence) < 200


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["doctor", "--explain", "no-gpu"], ["explain", "--", "no-gpu"]),
        (["doctor", "--json", "--explain=-x", "-q"], ["explain", "--json", "-q", "--", "-x"]),
        (["doctor", "--explain", "--fleet"], ["explain", "--", "--fleet"]),
        (["doctor", "--fleet", "--rounds", "3"], ["fleet", "--rounds", "3"]),
        (["doctor", "--runs", "9", "--fleet"], ["fleet", "--runs", "9"]),
        (["doctor", "--strict"], ["doctor", "--strict"]),
        (["inspect", "--fleet"], ["inspect", "--fleet"]),
        ([], []),
    ],
    ids=lambda words: " ".join(words) or "nothing",
)
def test_the_older_names_of_explain_and_fleet_are_understood(
    old: list[str], new: list[str]
) -> None:
    assert expand_alias(old) == new


@pytest.mark.parametrize("options", [[], ["--json"], ["-v"]], ids=" ".join)
@pytest.mark.parametrize("text", ["install-damaged", "device kernel image is invalid", "nothing"])
def test_an_alias_prints_what_its_subcommand_prints(
    text: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    older = main(["doctor", *options, "--explain", text]), capsys.readouterr()
    assert (main(["explain", *options, text]), capsys.readouterr()) == older


def test_a_fleet_asks_for_torchrun_under_both_names(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for argv in (["fleet"], ["doctor", "--fleet"]):
        err = cli(*argv, status=2).err
        assert err == (
            "error: a fleet must be started by torchrun, got no RANK\n\nhint: "
            "`torchrun --nproc-per-node=gpu -m flash_dist fleet`; with --nnodes for several "
            "machines\n"
        )


def test_a_report_that_a_full_disk_cuts_is_named(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.symlink_to("/dev/full")
    argv = ("doctor", "--gpu", "9.0", "--report", str(page))
    said = f"error: cannot write `{page}`: No space left on device\n"
    assert run_in_shell("", *argv) == (2, said)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EMFILE, "Too many open files"), "open another file: Too many open files"),
        (FileNotFoundError(errno.ENOENT, "No usable one"), "write a temporary file: No usable one"),
    ],
    ids=["open files", "temporary files"],
)
def test_errors_beside_the_output_are_not_blamed_on_it(
    monkeypatch: pytest.MonkeyPatch, cli: Cli, error: OSError, said: str
) -> None:
    def run(_: object) -> int:
        raise error

    monkeypatch.setattr("flash_dist.toolkit.cli._run", run)
    monkeypatch.setattr("flash_dist.toolkit.cli.discard", lambda _: None)
    assert cli(status=2).err == f"error: cannot {said}\n"


def test_a_name_that_the_encoding_of_stdout_lacks_is_escaped(tmp_path: Path) -> None:
    path = tmp_path / "\u00fc\u4e2d.so"
    path.write_bytes(library(container(entry(SASS, 80, cubin(Kernel("alpha")))), wrappers=1))
    command = [sys.executable, "-m", "flash_dist", "inspect", str(path)]
    environ = {**BUFFERED, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"/\xfc\u4e2d.so" in done.stdout
