"""Exit status and error messages of the tools of ci/."""

from __future__ import annotations

import ast
import errno
import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.errors import KernelsError, explain_os_error
from flash_dist.toolkit.make.command import command, told_in_a_sentence
from flash_dist.toolkit.make.project import ROOT
from tests.unit.toolkit.cli.test_talk import interruptible, is_running, wait_until

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["interruptible"]

REFUSAL = KernelsError("there is no wheel", hint="`nox -s build_wheels` makes them")
SAID = "error: there is no wheel\n\nhint: `nox -s build_wheels` makes them"


@command
def main(number: int, *, refuse: bool = False) -> int:
    """Command line."""
    if refuse:
        raise REFUSAL
    return number


def test_a_tool_ends_with_its_own_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert [main(0), main(3)] == [0, 3]
    assert capsys.readouterr().err == ""
    assert main.__doc__ == "Command line."


def test_errors_of_a_tool_give_a_sentence_and_exit_code_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(0, refuse=True) == 1
    assert capsys.readouterr().err == f"{SAID}\n"


def refuse() -> None:
    with told_in_a_sentence():
        raise REFUSAL


def test_a_hook_ends_the_process_with_the_same_words() -> None:
    with pytest.raises(SystemExit, match=r"^error: there is no wheel\n\nhint: ") as caught:
        refuse()
    assert caught.value.code == SAID


BUILD = """
import os, sys
from pathlib import Path
from flash_dist.toolkit.make.command import command
from flash_dist.toolkit.make.wheels.gates import run

@command
def main():
    code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    start = f"subprocess.run([sys.executable, '-c', {code!r}, sys.argv[1]])"
    nested = f"import subprocess, sys; {start}"
    run([sys.executable, "-c", nested, sys.argv[1]], os.environ, Path.cwd(), apart=True)
    return 0

sys.exit(main())
"""


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_is_one_word_and_ends_all_that_was_started(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    with subprocess.Popen(
        [sys.executable, "-c", BUILD, str(note)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        wait_until(lambda: note.exists() and note.read_text() != "")
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait(30) == 130
        assert process.stdout is not None
        assert process.stdout.read() == b"interrupted\n"
    wait_until(lambda: not is_running(note.read_text()))


def test_other_errors_stay_what_they_are() -> None:
    @command
    def broken() -> int:
        return int("x")

    with pytest.raises(ValueError, match="invalid literal"):
        broken()


OTHERS = {"gate.py", "repair.py"}  # they exit like the program that they start
ENDING = 'if __name__ == "__main__":\n    sys.exit(main('


def find_tools() -> list[Path]:
    """List the modules of ci/ that are started with `python -m`."""
    paths = [*(ROOT / "ci").rglob("*.py"), *(ROOT / "flash_dist/toolkit/make").rglob("*.py")]
    return [
        one
        for one in paths
        if ENDING in one.read_text() and one.name not in OTHERS and "template" not in one.parts
    ]


@pytest.mark.parametrize("path", find_tools(), ids=lambda path: path.stem)
def test_every_tool_ends_so(path: Path) -> None:
    functions = {
        node.name: node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    assert [ast.unparse(one) for one in functions["main"].decorator_list] == ["command"]


def test_a_folder_that_a_full_disk_does_not_take_is_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "cuda"
    folder.mkdir()
    for number in range(2000):
        (folder / f"header-{number}.h").write_text("int x;")
    program = (
        "import resource, shutil, sys\n"
        "from flash_dist.toolkit.make.command import command, told_in_a_sentence\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "@command\n"
        "def main():\n"
        "    shutil.copytree(sys.argv[1], sys.argv[1] + '-' + sys.argv[2])\n"
        "if sys.argv[2] == 'hook':\n"
        "    with told_in_a_sentence():\n"
        "        main.__wrapped__()\n"
        "sys.exit(main())\n"
    )
    for how in ("tool", "hook"):
        command = [sys.executable, "-c", program, str(folder), how]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        assert done.returncode == 1
        assert len(done.stderr) < 700, done.stderr[:3000]
        assert re.match(
            r"error: cannot copy 2000 files, the first of them to `.*header-\d+\.h`: File too large"
            r"\n\nhint: free some space, or set folders on another disk: FLASH_DIST_BUILD_DIR",
            done.stderr,
        ), done.stderr


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES])
def test_errors_of_the_system_give_a_sentence_with_the_file(number: int) -> None:
    reason = os.strerror(number)
    told = explain_os_error(OSError(number, reason, "/data/build/a.o"))
    assert told.message == f"cannot use `/data/build/a.o`: {reason}"
    assert (told.hint is None) == (number == errno.EACCES)
    assert explain_os_error(OSError(number, reason)).message.endswith(f": {reason}")
