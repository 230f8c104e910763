"""`python -m flash_dist`, and what the console script `flash-dist` runs."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

from .toolkit.cli import main


def run() -> NoReturn:
    """Run the command line and end the process."""
    status = main()
    if f"{__package__}.bench.measuring.launched" in sys.modules:
        # torch's profiler may free its buffers before CUPTI has returned them, and abort when the
        # CUDA context ends: https://github.com/pytorch/pytorch/pull/195207. So it does not end.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # nobody reads any more
                stream.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    run()
