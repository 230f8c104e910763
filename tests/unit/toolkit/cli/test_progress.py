"""Progress of several GPUs' selftests: on a terminal, in a log, beside JSON, on Ctrl-C."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.cli.terminal import progress
from tests.unit.made import fake_child
from tests.unit.toolkit.cli.test_talk import interruptible, is_running, read_terminal, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[4]
__all__ = ["interruptible"]

# Two imaginary GPUs, each with a child that takes half a second.
PROGRAM = """
import sys
from dataclasses import replace
from flash_dist.toolkit.cli import doctor, fleet, main, selftest
from flash_dist.toolkit.cli.terminal import progress
from flash_dist.toolkit.doctor import proof
from flash_dist.toolkit.selftest import side_by_side
from tests.unit.made.builds import ALL, make_environment

machine = make_environment(ALL, *["9.0"] * 9)
wanted = {devices}
gpus = tuple(gpu for gpu in machine.cuda.gpus if gpu.index in wanted)
machine = replace(machine, cuda=replace(machine.cuda, gpus=gpus))
doctor.gather_environment = lambda _: machine
selftest.gather_gpus = fleet.gather_gpus = lambda _: machine
side_by_side.count_cores = lambda: 4
side_by_side.read_free_memory = lambda: None
proof.make_command = lambda device, runs, child: [
    sys.executable, {child!r}, "--device", device, "--runs", str(runs)
]
progress.PATIENCE = 0.0
progress.SELDOM = fleet.SELDOM = {seldom}
sys.exit(main(sys.argv[1:]))
"""


def command(*argv: str, devices: tuple[int, ...] = (0, 1), seldom: float = 60.0) -> list[str]:
    child = str(fake_child.__file__)
    script = PROGRAM.format(devices=devices, child=child, seldom=seldom)
    return [sys.executable, "-c", script, *argv]


@pytest.fixture
def environ(tmp_path: Path) -> Iterator[dict[str, str]]:
    children = tmp_path / "children"
    children.mkdir()
    (tmp_path / "tmp").mkdir()
    given = {"TEST_CHILDREN": str(children), "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    yield os.environ | given | {"TMPDIR": str(tmp_path / "tmp"), "COLUMNS": "100"}
    assert list((tmp_path / "tmp").iterdir()) == []


def watch(argv: list[str], environ: dict[str, str], *, stop: bytes = b"") -> tuple[int, str, str]:
    """Run with stderr on a terminal; send Ctrl-C when `stop` is shown. Return the shown text."""
    main_end, child_end = pty.openpty()
    with subprocess.Popen(
        argv,
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=child_end,
        start_new_session=True,
    ) as process:
        os.close(child_end)
        shown = b""
        while chunk := read_terminal(main_end):
            shown += chunk
            if stop and stop in shown:
                os.kill(process.pid, signal.SIGINT)
                stop = b""
        assert process.stdout is not None
        out = process.stdout.read().decode()
        status = process.wait(30)
    os.close(main_end)
    return status, out, shown.decode()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["doctor", "selftest"])
def test_a_terminal_is_shown_how_many_cases_are_left_and_nothing_stays(
    name: str, environ: dict[str, str]
) -> None:
    status, out, shown = watch(command(name), environ)
    assert status == 0, out
    assert re.search(r"selftest of gpus 0, 1: \d of 8 cases, about \d+ s left", shown)
    assert shown.endswith("\x1b[?25h\r\x1b[1A\x1b[2K")  # the cursor is visible, the line is gone
    assert out.index("selftest 0") < out.index("selftest 1")


@pytest.mark.slow
@pytest.mark.parametrize(
    "option",
    [
        ("doctor", "--json"),
        ("selftest", "--json"),
        ("selftest", "--json", "--device", "cpu"),
        ("doctor", "--save", "-"),
    ],
)
def test_beside_json_nothing_is_shown(option: tuple[str, ...], environ: dict[str, str]) -> None:
    status, out, shown = watch(command(*option, seldom=0.0), environ)
    assert (status, shown) == (0, "")
    assert json.loads(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "which"), [(("doctor",), "gpus 0, 1"), (("selftest", "--device", "cpu"), "the cpu")]
)
def test_a_log_has_a_line_now_and_then(
    environ: dict[str, str], words: tuple[str, ...], which: str
) -> None:
    for seldom, lines in ((60.0, 0), (0.2, 1)):
        done = subprocess.run(
            command(*words, seldom=seldom),
            cwd=ROOT,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        said = done.stderr.splitlines()
        assert len(said) >= lines if lines else not said
        for line in said:
            assert re.fullmatch(rf"selftest of {which}: (starting|\d of \d cases.*)", line)


def run_fleet(environ: dict[str, str], *words: str) -> list[tuple[int, str, str]]:
    """Run a fleet of two ranks; return exit status, stdout and stderr of each."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    numbers = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            command("fleet", *words, seldom=0.2),
            cwd=ROOT,
            env=environ | numbers | {"RANK": rank, "LOCAL_RANK": rank, "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    said = [one.communicate(timeout=100) for one in ranks]
    return [(one.returncode, *texts) for one, texts in zip(ranks, said, strict=True)]


@pytest.mark.slow
def test_a_fleet_shows_its_round_its_cases_and_the_time_left(environ: dict[str, str]) -> None:
    pytest.importorskip("torch")
    first, second = run_fleet(environ, "--rounds", "2")
    assert (first[0], second) == (0, (0, "", "")), (first, second)
    lines = first[2].splitlines()
    for name in ("round 1 of 2", "round 2 of 2"):
        assert any(re.match(rf"{name}: selftest of gpu 0: \d of 4 cases, about", x) for x in lines)
    ends = [line for line in lines if "2 ranks on 1 host" in line]
    assert re.search(r"^round 1 of 2: 2 ranks on 1 host .*; \d s, about \d s left$", ends[0])
    assert re.search(r"^round 2 of 2: 2 ranks on 1 host .*; \d s$", ends[1])
    assert "round" not in first[1].replace("2 rounds", "")  # only the report goes to stdout


@pytest.mark.slow
def test_a_fleet_shows_nothing_beside_json(environ: dict[str, str]) -> None:
    pytest.importorskip("torch")
    first, second = run_fleet(environ, "--rounds", "2", "--json")
    assert (first[0], first[2], second) == (0, "", (0, "", "")), (first, second)
    assert json.loads(first[1])["exit_code"] == 0


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_all_selftests_and_leaves_the_terminal_as_it_was(
    environ: dict[str, str], tmp_path: Path
) -> None:
    hangs = int(fake_child.HANGS)
    status, out, shown = watch(command("doctor", devices=(0, hangs)), environ, stop=b"4 of 8 cases")
    assert status == 130
    assert "Traceback" not in shown + out
    assert shown.rstrip().endswith("\x1b[2K")
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is visible again
    children = [json.loads(one.read_text()) for one in (tmp_path / "children").iterdir()]
    assert len(children) == 2
    wait_until(lambda: not any(is_running(str(child["pid"])) for child in children))


def test_a_line_a_minute_and_no_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    seldom = progress.Seldom()
    for second in range(200):
        now[0] = 1000.0 + second
        seldom.say(f"{second}\x1b")
    assert capsys.readouterr().err == "60\\x1b\n120\\x1b\n180\\x1b\n"
