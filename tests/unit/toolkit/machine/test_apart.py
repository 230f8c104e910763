"""A separate process asks the driver, so that processes forked later can use CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.machine import apart
from flash_dist.toolkit.machine.libcuda import Cuda
from tests.unit.made.driver import build_driver, needs_gcc

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[..., list[str]]

ROOT = Path(__file__).parents[4]
pytestmark = needs_gcc


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a script on a machine with that driver; return its output, split into words."""
    driver = build_driver(tmp_path)

    def call(script: str, **environ: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            cwd=ROOT,
            env={**os.environ, **driver, **environ},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    return call


FORK = """
    import ctypes, os
    from pathlib import Path
    import flash_dist

    {before}
    report = flash_dist.check()
    maps = Path("/proc/self/maps").read_text()
    diary = Path(os.environ["FAKE_DIARY"]).read_text().split()
    child = os.fork()
    if child == 0:
        os._exit(ctypes.CDLL("libcuda.so.1").cuInit(0))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(len(report.gpus), code, "libcuda" in maps, len(diary), str(os.getpid()) in diary)
"""


def test_a_process_that_is_forked_after_check_has_cuda(run: Run) -> None:
    assert run(FORK.format(before="")) == ["2", "0", "False", "1", "False"]


def test_a_process_that_uses_cuda_is_asked_itself(run: Run) -> None:
    before = 'ctypes.CDLL("libcuda.so.1").cuInit(0)'
    assert run(FORK.format(before=before)) == ["2", "3", "True", "1", "True"]


def test_a_process_that_has_loaded_the_driver_only_is_left_as_it_is(run: Run) -> None:
    before = 'ctypes.CDLL("libcuda.so.1")'
    assert run(FORK.format(before=before)) == ["2", "0", "True", "1", "False"]


def test_a_process_that_was_forked_from_one_with_cuda_is_told_of_the_gpus(run: Run) -> None:
    script = """
        import ctypes, os
        import flash_dist

        ctypes.CDLL("libcuda.so.1").cuInit(0)
        child = os.fork()
        if child == 0:
            os._exit(len(flash_dist.check().gpus))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert run(script) == ["2"]


def test_an_answer_is_remembered_for_the_variables_that_it_is_for(run: Run) -> None:
    script = """
        import os
        from pathlib import Path
        import flash_dist

        counts = []
        for visible in ("1", "1", "3", "1", "0", "0"):
            os.environ["CUDA_VISIBLE_DEVICES"] = visible
            os.environ["UNRELATED"] = str(len(counts))
            counts.append(len(flash_dist.check().gpus))
        print(*counts, len(Path(os.environ["FAKE_DIARY"]).read_text().split()))
    """
    assert run(script) == ["1", "1", "3", "1", "0", "0", "3"]


def test_all_that_the_driver_says_comes_back(run: Run) -> None:
    script = """
        from flash_dist.toolkit.machine.apart import read_cuda_apart
        from flash_dist.toolkit.machine.libcuda import read_cuda

        told = read_cuda_apart()
        print(told == read_cuda(), told.gpus[1].uuid, told.gpus[1].sm_count)
    """
    assert run(script) == ["True", "GPU-01010101-0101-0101-0101-010101010101", "132"]


def test_a_driver_that_crashes_is_a_reason_and_is_asked_again(run: Run) -> None:
    script = """
        import os
        from flash_dist.toolkit.machine.apart import read_cuda_apart

        first = read_cuda_apart()
        del os.environ["FAKE_CRASH"]
        print(first.status, read_cuda_apart().status, first.reason)
    """
    status, again, *reason = run(script, FAKE_CRASH="1")
    assert (status, again) == ("broken", "ok")
    assert " ".join(reason) == "the process that asked libcuda.so.1 failed: status -6"


def test_a_python_inside_of_another_program_asks_the_driver_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = Cuda("absent", reason="asked here")
    monkeypatch.setattr(apart, "_answers", {})
    monkeypatch.setattr(apart, "read_cuda", lambda: here)
    monkeypatch.setattr(sys, "executable", "")
    assert apart.read_cuda_apart() is here
