"""Measure the wheels of dist/ and print the README's table of the sets: `nox -s sizes`.

The columns are download size, installed size and the CPU time of a first import. CPU time does not
depend on other load. The time is measured in a fresh environment without .pyc files, from the end
of `import torch` to the loaded extension. Megabytes are 10^6 bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ci.install_tests.clients import Environment, call_openly, runs_here
from ci.install_tests.results import InstallError
from flash_dist.toolkit.builds.linkage import runtime_requirements
from flash_dist.toolkit.builds.published import published_sets
from flash_dist.toolkit.make.command import command
from flash_dist.toolkit.make.project import README, ROOT, SETS_FILE, replace_between
from flash_dist.toolkit.make.wheels.artefacts import find_artefacts, newest_first

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from flash_dist.toolkit.make.wheels.artefacts import Artefact

MARKS: Final = ("<!-- nox -s sizes -- --write: from here -->\n", "<!-- to here -->\n")
HEAD: Final = (
    "| set | version | code for | download | installed | first import |\n"
    "|---|---|---|---|---|---|\n"
)
RUNS: Final = 5
FIRST_IMPORT: Final = """
import time, torch
start = time.process_time()
from flash_dist import flash_attn_func
from flash_dist.kernels import operators
print(time.process_time() - start)
"""


@dataclass(frozen=True)
class Row:
    """The measured sizes and import time of one arch set."""

    artefact: Artefact
    installed: int  # bytes
    seconds: float | None  # None for a wheel that cannot run here

    def __str__(self) -> str:
        one = self.artefact
        targets = str(one.manifest.arch_set).replace(";", "; ")
        first = "" if self.seconds is None else f"{self.seconds:.2f} s"
        cells = (f"`{one.set_name}`", f"`+{one.version.local}`", targets)
        sizes = (f"{one.size / 1e6:.1f} MB", f"{self.installed / 1e6:.1f} MB")
        return f"| {' | '.join((*cells, *sizes, first))} |"


def measure(artefacts: Sequence[Artefact], work: Path, runs: int) -> list[Row]:
    """Install the wheels, and import them alternately, so that other load affects all equally."""
    environments: dict[Artefact, Environment] = {}
    for one in filter(runs_here, artefacts):
        environments[one] = environment = Environment("uv", work / one.set_name, "")
        environment.install("--no-index", str(one.path))
        environment.require(one.version)
        runtime = runtime_requirements(one.manifest.toolkit.cuda)
        if runtime:  # the measuring environment has all other dependencies
            command = ["uv", "pip", "install", "--quiet", "--python", str(environment.python)]
            call_openly([*command, *runtime], os.environ)
    rounds = [
        {one: float(place.run("-c", FIRST_IMPORT)) for one, place in environments.items()}
        for _ in range(runs)
    ]
    return [_make_row(one, environments.get(one), rounds) for one in artefacts]


def _make_row(
    one: Artefact, environment: Environment | None, rounds: Sequence[dict[Artefact, float]]
) -> Row:
    if environment is None:
        return Row(one, one.installed_size, None)
    installed = sum(path.stat().st_size for path in environment.leftovers())
    return Row(one, installed, statistics.median(times[one] for times in rounds))


def caption(runs: int) -> str:
    """Return the caption with the conditions of the figures."""
    torch = metadata.version("torch")
    return (
        f"First import: CPU time, median of {runs}, without .pyc files, after `import torch`; "
        f"Python {platform.python_version()}, torch {torch}.\n"
    )


def choose(artefacts: Iterable[Artefact]) -> list[Artefact]:
    """Return the newest wheel of each published set, in table order.

    Raises:
        InstallError: A set has no wheel.
    """
    by_set = {one.set_name: one for one in reversed(newest_first(list(artefacts)))}
    names = [one.name for one in published_sets()]
    lacking = [name for name in names if name not in by_set]
    if lacking:
        message = f"dist/ holds no wheel of {', '.join(lacking)}, and the table is of all sets"
        raise InstallError(message, hint=f"`nox -s build_wheels -- {' '.join(lacking)}`")
    return [by_set[name] for name in names]


def write(rows: Sequence[Row], table: str, readme: Path = README, data: Path = SETS_FILE) -> None:
    """Put the table between the markers of the README, and the sizes into archsets.json."""
    text = replace_between(MARKS, readme.read_text(encoding="utf-8"), table)
    readme.write_text(text, encoding="utf-8")
    archsets: dict[str, Any] = json.loads(data.read_text(encoding="utf-8"))
    for row in rows:
        archsets["set"][row.artefact.set_name]["wheel_mb"] = round(row.artefact.size / 1e6, 2)
    data.write_text(f"{json.dumps(archsets, indent=2, ensure_ascii=False)}\n", encoding="utf-8")


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="nox -s sizes --", description="Measure wheels.")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of the wheels")
    parser.add_argument("--runs", type=int, default=RUNS, help="imports (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="into README.md and archsets.json")
    args = parser.parse_args(argv)
    if args.runs < 1:
        parser.error(f"--runs is 1 or more, got {args.runs}")
    chosen = choose(find_artefacts(args.dist))
    with tempfile.TemporaryDirectory(prefix="flash_dist-") as folder:
        rows = measure(chosen, Path(folder), args.runs)
    lines = "".join(f"{row}\n" for row in rows)
    table = f"{HEAD}{lines}\n{caption(args.runs)}"
    print(table, end="")
    if args.write:
        write(rows, table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
