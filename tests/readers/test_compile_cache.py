"""Objects that another machine compiled: ccache's HTTP storage, with a server on this machine."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, ClassVar

import pytest

from flash_dist.toolkit.make.building.backend import UNFINISHED
from flash_dist.toolkit.make.project import ROOT, TOOLKIT, load_project
from tests.readers.tools import needs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CUDA_HOME = os.environ.get("CUDA_HOME", "")
pytestmark = [needs("ccache"), pytest.mark.skipif(not CUDA_HOME, reason="needs CUDA_HOME")]

BUILD = f"import fatwheel.backend as b; print(b.build_wheel('..', {{'{UNFINISHED}': 'true'}}))"
COUNTS = ("cache_miss", "remote_storage_hit")


class Storage(BaseHTTPRequestHandler):
    """A server that stores and returns what clients put there; ccache needs no more."""

    kept: ClassVar[dict[str, bytes]] = {}

    def do_GET(self) -> None:
        data = self.kept.get(self.path)
        self._answer(HTTPStatus.NOT_FOUND if data is None else HTTPStatus.OK, data or b"")

    def do_PUT(self) -> None:
        self.kept[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(HTTPStatus.CREATED, b"")

    def _answer(self, status: HTTPStatus, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def serve() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Storage) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def build(machine: Path, storage: str) -> tuple[dict[str, int], str]:
    """Build examples/own_kernels with its own toolkit; return ccache's counts and the wheel."""
    shutil.copytree(ROOT / "examples" / "own_kernels", machine / "tree")
    shutil.copytree(TOOLKIT, machine / "site" / "fatwheel")
    cuda = machine / "tree" / ".nox" / "cuda"  # where nox installs it
    shutil.copytree(CUDA_HOME, cuda, symlinks=True)
    environ = {
        **os.environ,
        "CCACHE_DIR": str(machine / "ccache"),
        "CCACHE_REMOTE_STORAGE": storage,
        "CUDA_HOME": str(cuda),
        "PYTHONPATH": str(machine / "site"),
        "SOURCE_DATE_EPOCH": str(load_project().epoch),
        "TORCH_CUDA_ARCH_LIST": "9.0a",
    }
    subprocess.run([sys.executable, "-c", BUILD], env=environ, cwd=machine / "tree", check=True)
    command = ["ccache", "--print-stats"]
    told = subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout
    counts = dict(line.split() for line in told.splitlines())
    (wheel,) = machine.glob("*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return {name: int(counts[name]) for name in COUNTS}, digest


def test_another_machine_takes_kernels_from_the_storage_and_gets_the_same_wheel(
    tmp_path: Path,
) -> None:
    with serve() as storage:
        compiled, clean = build(tmp_path / "one", storage)
        assert compiled["remote_storage_hit"] == 0
        taken, cached = build(tmp_path / "other", storage)
    assert taken["remote_storage_hit"] > 0
    assert taken["cache_miss"] < compiled["cache_miss"]
    assert cached == clean
