"""A fleet whose rank 1 computes one wrong bit: `torchrun ... tests/wrong_fleet.py RUNS ROUNDS`."""

from __future__ import annotations

import sys
from pathlib import Path

from flash_dist.toolkit.cli import make_parser
from flash_dist.toolkit.cli.fleet import run

CHILD = str(Path(__file__).with_name("flipping_child.py"))

if __name__ == "__main__":
    runs, rounds = sys.argv[1:]
    args = make_parser(["fleet"]).parse_args(["fleet", "--runs", runs, "--rounds", rounds])
    sys.exit(run(args, (CHILD,)))
