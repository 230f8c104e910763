"""Let ninja and the nvcc that it runs share the cores: GNU make's jobserver.

One file for five targets is one command of ninja, and nvcc compiles its targets side by side where
ninja has no other command for the cores.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

NINJA: Final = (1, 13)  # the first that asks one; with `-j` it does not
NVCC: Final = (13, 0)  # knows --jobserver
_DEPTH: Final = "CMAKE_BUILD_PARALLEL_LEVEL"  # becomes `-j`


@contextmanager
def serve_jobs(jobs: int) -> Iterator[dict[str, str]]:
    """Yield the environment of programs that take their jobs from one server.

    Args:
        jobs: How many of them run at once, of all programs together.
    """
    with tempfile.TemporaryDirectory(dir=_folder()) as folder:
        path = Path(folder) / "jobs"
        os.mkfifo(path)
        pipe = os.open(path, os.O_RDWR)  # whoever has it open keeps the tokens in it
        try:
            os.write(pipe, b"+" * (jobs - 1))  # every program has one without asking
            flags = f" -j{jobs} --jobserver-auth=fifo:{path}"
            kept = {name: value for name, value in os.environ.items() if name != _DEPTH}
            yield {**kept, "MAKEFLAGS": flags}
        finally:
            os.close(pipe)


def _folder() -> str:
    """Return a folder for temporary files whose path has no blank: flags are split at blanks."""
    named = tempfile.gettempdir()
    return "/tmp" if named.split() != [named] else named  # noqa: S108 - a folder of its own in it
