"""-v and -q of every subcommand, their terminal output, and Ctrl-C."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.cli import SUBCOMMANDS, main
from tests.unit.made.fatbin_builder import SASS, Kernel, container, cubin, entry, library

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.unit.made.command import Cli

ROOT = Path(__file__).parents[4]


@pytest.fixture
def lib(tmp_path: Path) -> str:
    path = tmp_path / "lib.so"
    path.write_bytes(library(container(entry(SASS, 80, cubin(Kernel("alpha"))))))
    return str(path)


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_subcommand_takes_them_and_has_two_examples(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "-v, --verbose" in text
    assert "-q, --quiet" in text
    assert (
        len(re.findall(rf"^  (?:python|torchrun .*) -m flash_dist {name}", text, re.MULTILINE)) >= 2
    )


def test_quiet_leaves_out_tables(lib: str, cli: Cli) -> None:
    assert cli("inspect", "-q", lib).out.count("\n") == 1
    assert cli("audit", "-q", lib, lib).out == "2 of 2 releases passed\n"
    problem, end = cli("audit", "-q", lib, "--require", "9.0", status=1).out.splitlines()
    assert problem.startswith(f"[fail]  {lib}: ")
    assert end == "0 of 1 release passed"


def test_verbose_shows_the_log_on_stderr(cli: Cli) -> None:
    err = cli("select", "-v", "--gpu", "9.0", "--index", "http://127.0.0.1:1/", status=2).err
    assert "debug: GET http://127.0.0.1:1/" in err
    err = cli("select", "--gpu", "9.0", "--index", "http://127.0.0.1:1/", status=2).err
    assert "debug" not in err


WAITING = """
import time
from flash_dist.toolkit.cli.terminal import progress
progress.PATIENCE = 0.3  # not a second, as the test has little
with progress.{name}({what}) as show:
"""
STEPS = {
    "working": ("'counting'", "    time.sleep({seconds})"),
    "downloading": ("", "    show(1, 10); time.sleep({seconds}); show(5, 10)"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("seconds", [0.01, 0.5])
def test_a_terminal_is_shown_what_takes_longer_than_its_patience(name: str, seconds: float) -> None:
    what, step = STEPS[name]
    script = WAITING.format(name=name, what=what) + step.format(seconds=seconds)
    main_end, child_end = pty.openpty()
    environ = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, cwd=ROOT, stderr=child_end, env=environ) as process:
        os.close(child_end)
        shown = b""
        while chunk := read_terminal(main_end):
            shown += chunk
        assert process.wait() == 0
    os.close(main_end)
    assert (name[:5].encode() in shown or b"counting" in shown) == (seconds > 0.3)


def read_terminal(descriptor: int) -> bytes:
    """Read until the other side closes, which Linux reports as an error."""
    try:
        return os.read(descriptor, 4096)
    except OSError:
        return b""


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let children receive SIGINT even if the tests were started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("argv", [["selftest", "--device", "cpu"]], ids=" ".join)
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_the_children_and_is_130(argv: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flash_dist", *argv]
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environ, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        children = wait_for_children(process)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert children
    wait_until(lambda: not any(map(is_running, children)))  # a child may end slightly later
    assert list(tmp_path.iterdir()) == []


CHILD = """
import os, sys, time
from pathlib import Path
from flash_dist.toolkit.loading.process import end_with
end_with(int(sys.argv[-1]))
Path(sys.argv[1]).write_text(f"{os.getpid()} ")
time.sleep(60)
"""
PARENT = """
import sys
from flash_dist.toolkit.loading.process import run_child
run_child(sys.argv[1:], timeout=60)
"""


def test_the_child_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    command = [sys.executable, "-c", PARENT, sys.executable, "-c", CHILD, str(mark)]
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, env=environ) as process:
        wait_until(lambda: mark.exists() and mark.read_text().endswith(" "))
        process.kill()
    wait_until(lambda: not is_running(mark.read_text().strip()))


def test_a_child_whose_parent_has_ended_does_not_begin() -> None:
    script = (
        "import os; from flash_dist.toolkit.loading.process import end_with; end_with(os.getpid())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=False
    )
    assert done.returncode == 1
    assert b"the process that started this one has ended" in done.stderr


def wait_until(done: Callable[[], bool]) -> None:
    """Wait for other processes."""
    until = time.monotonic() + 30
    while not done():
        assert time.monotonic() < until
        time.sleep(0.01)


def is_running(child: str) -> bool:
    """Tell if a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_children(process: subprocess.Popen[bytes]) -> list[str]:
    """Wait for the child that runs the kernels."""
    until = time.monotonic() + 30
    while time.monotonic() < until and process.poll() is None:
        path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        for child in path.read_text().split():
            if b"selftest.child" in Path(f"/proc/{child}/cmdline").read_bytes():
                return [child]
        time.sleep(0.01)
    return []
