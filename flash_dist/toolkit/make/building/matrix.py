"""The build matrix of GitHub's workflow: one job per published arch set.

python -m PACKAGE.toolkit.make.building.matrix --json      a matrix for `fromJSON`
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from ...builds.published import load_archsets
from ...product import NAME
from ..command import command
from ..project import ARCHSETS, MAKE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ...targets.archs import ArchSet


def make_matrix(sets: Iterable[ArchSet]) -> dict[str, list[dict[str, str]]]:
    """Return the value of a job's `strategy.matrix`."""
    rows = [
        {"set": one.name, "archs": str(one), "toolkit": one.toolkit, "machine": one.machine}
        for one in sets
    ]
    return {"include": rows}


@command
def main(args: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {MAKE}.building.matrix", description=__doc__.replace("PACKAGE", NAME)
    )
    parser.add_argument("--json", action="store_true", help="on one line, for a workflow")
    as_json = parser.parse_args(args).json
    matrix = make_matrix(load_archsets(ARCHSETS).values())
    if as_json:
        print(json.dumps(matrix))
    else:
        for row in matrix["include"]:
            print(f"{row['set']}: {row['archs']}, CUDA {row['toolkit']}, {row['machine']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
