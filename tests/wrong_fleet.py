"""A fleet whose rank 1 computes one wrong bit: `torchrun ... tests/wrong_fleet.py RUNS ROUNDS`."""

from __future__ import annotations

import sys
from pathlib import Path

from flash_dist.toolkit.cli.fleet import FleetOptions, run_fleet

CHILD = str(Path(__file__).with_name("flipping_child.py"))

if __name__ == "__main__":
    sys.exit(run_fleet(FleetOptions(int(sys.argv[1]), int(sys.argv[2]), child=(CHILD,))))
