"""Ending a process early leaves no files behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.make.project import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(params=[signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """Let children receive a signal even if the tests were started by nohup or with `&`."""
    heard: signal.Signals = request.param
    before = signal.signal(heard, signal.SIG_DFL)
    yield heard
    signal.signal(heard, before)


@pytest.mark.slow
def test_a_signal_leaves_no_temporary_folder(number: signal.Signals, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/a-1-py3-none-any.whl"
        environ = {**os.environ, "TMPDIR": str(tmp_path), "no_proxy": "127.0.0.1"}
        words = ["doctor", "--wheel", url, "--gpu", "9.0"]
        command = [sys.executable, "-m", "flash_dist", *words]
        with subprocess.Popen(command, cwd=ROOT, env=environ, stderr=subprocess.PIPE) as process:
            connection, _ = server.accept()  # never answers
            with connection:
                assert [path.name[:11] for path in tmp_path.iterdir()] == ["flash_dist-"]
                time.sleep(0.1)
                process.send_signal(number)
                assert process.wait(20) == 128 + number
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_rank_that_waits_for_the_others_ends_at_once(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with socket.create_server(("127.0.0.1", 0)) as server:
        numbers = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
        command = [sys.executable, "-m", "flash_dist", "fleet"]
        environ = {**os.environ, **numbers, **master, "PYTHONPATH": str(ROOT)}
        before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with subprocess.Popen(
            command, cwd=tmp_path, env=environ, stderr=subprocess.DEVNULL
        ) as process:
            connection, _ = server.accept()  # never answers
            with connection:
                time.sleep(0.5)
                process.send_signal(signal.SIGTERM)
                try:
                    assert process.wait(10) == -signal.SIGTERM
                finally:
                    process.kill()
                    signal.signal(signal.SIGTERM, before)
