"""Shares the cores between ninja and its nvcc processes: GNU make's jobserver.

One file for five targets is one command of ninja. nvcc compiles its targets in parallel while ninja
has no other command for the cores.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

NINJA: Final = (1, 13)  # the first to use a server; not with `-j`
NVCC: Final = (13, 0)  # supports --jobserver
_DEPTH: Final = "CMAKE_BUILD_PARALLEL_LEVEL"  # becomes `-j`


@contextmanager
def serve_jobs(jobs: int) -> Iterator[dict[str, str]]:
    """Yield the environment of programs that share one job server.

    Args:
        jobs: Number of parallel jobs of all programs together.
    """
    with tempfile.TemporaryDirectory(dir=_folder()) as folder:
        path = Path(folder) / "jobs"
        os.mkfifo(path)
        pipe = os.open(path, os.O_RDWR)  # an open descriptor keeps the tokens in it
        try:
            os.write(pipe, b"+" * (jobs - 1))  # every program has one job without asking
            flags = f" -j{jobs} --jobserver-auth=fifo:{path}"
            kept = {name: value for name, value in os.environ.items() if name != _DEPTH}
            yield {**kept, "MAKEFLAGS": flags}
        finally:
            os.close(pipe)


def _folder() -> str:
    """Return a temporary folder whose path has no blank: flags are split at blanks."""
    named = tempfile.gettempdir()
    return "/tmp" if named.split() != [named] else named  # noqa: S108 - a folder of its own in it
