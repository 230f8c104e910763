"""Entry point of `python -m flash_dist` and of the console script `flash-dist`."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

from .toolkit.cli import main


def run() -> NoReturn:
    """Run the command line and end the process."""
    status = main()
    if f"{__package__}.bench.measuring.checks" in sys.modules:
        # End without destructors: torch's profiler may free its buffers before CUPTI has returned
        # them, and abort when the CUDA context ends: https://github.com/pytorch/pytorch/pull/195207.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # the reader closed the pipe
                stream.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    run()
