"""Install the wheels of dist/ as users do, from this machine: `nox -s install_test`.

Every test installs into a fresh environment, only from a local file server, and checks the result.
`flash_dist/archsets.json` names the set that each client must pick.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, cast

from ci.install_tests.client import ClientTests
from ci.install_tests.clients import CLIENTS, serve
from ci.install_tests.results import count
from ci.install_tests.torch_matrix import try_torches
from flash_dist.toolkit.audit.options import parse_size
from flash_dist.toolkit.make.command import command
from flash_dist.toolkit.make.project import ROOT
from flash_dist.toolkit.make.release.channels import CHANNELS
from flash_dist.toolkit.make.release.index import pick_name, write_index
from flash_dist.toolkit.make.wheels.artefacts import find_artefacts
from flash_dist.toolkit.targets.archs import DEFAULT_MACHINE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ci.install_tests.results import Result
    from flash_dist.toolkit.make.release.channels import Row
    from flash_dist.toolkit.make.wheels.artefacts import Artefact


@dataclass(frozen=True)
class Stage:
    """Input of every phase of the test."""

    artefacts: tuple[Artefact, ...]
    url: str  # address of the served index
    work: Path  # an empty folder
    download: int | None = None  # most bytes that a test of torch may download


class ChannelTests(Protocol):
    """Interface of a module that tests a channel other than pip and uv."""

    def results(self, artefacts: Sequence[Artefact], work: Path) -> Iterator[Result]:
        """Run all tests in an empty folder; yield a result also for a test that cannot run."""


def try_client(client: str, stage: Stage) -> Iterator[Result]:
    """Test pip or uv."""
    return ClientTests(client, stage.url, stage.artefacts, stage.work).results()


def try_channel(row: Row, stage: Stage) -> Iterator[Result]:
    """Test a channel with the module that its row names."""
    tests = cast("ChannelTests", importlib.import_module(row.install_test))
    return tests.results(stage.artefacts, stage.work)


def try_torch(stage: Stage) -> Iterator[Result]:
    """Test the default set with every torch and Python."""
    return try_torches(stage.artefacts, pick_name(DEFAULT_MACHINE), stage.work, stage.download)


PHASES: Final[dict[str, Callable[[Stage], Iterator[Result]]]] = {
    **{client: partial(try_client, client) for client in CLIENTS},
    **{row.name: partial(try_channel, row) for row in CHANNELS.values() if row.install_test},
    "torch": try_torch,
}


def try_all(
    dist: Path, phases: Sequence[str] = tuple(PHASES), download: int | None = None
) -> Iterator[Result]:
    """Make the index, serve it, and run the phases."""
    artefacts = find_artefacts(dist)
    with tempfile.TemporaryDirectory(prefix="flash_dist-") as folder:
        out = Path(folder) / "index"
        write_index(out, artefacts, "http://127.0.0.1/", partial=True)
        with serve(out) as url:
            for name in phases:
                yield from PHASES[name](Stage(artefacts, url, Path(folder), download))


def conclude(results: Sequence[Result], phases: Sequence[str]) -> str:
    """Return a line with the counts of results, and the phases that ran and did not run."""
    counts = ", ".join(f"{number} {outcome}" for outcome, number in count(results).items())
    others = ", ".join(name for name in PHASES if name not in phases)
    return f"{counts}: {', '.join(phases)}" + (f"; not asked for: {others}" if others else "")


def _parse_phases(text: str) -> tuple[str, ...]:
    names = text.split(",")
    unknown = [name for name in names if name not in PHASES]
    if unknown:
        message = f"a phase is one of {', '.join(PHASES)}, got `{unknown[0]}`"
        raise argparse.ArgumentTypeError(message)
    return tuple(name for name in PHASES if name in names)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="nox -s install_test --", description="Install wheels.")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of the wheels")
    parser.add_argument("--allow-missing", action="store_true", help="pass with tests not run")
    parser.add_argument(
        "--only",
        type=_parse_phases,
        default=tuple(PHASES),
        metavar="PHASES",
        help=f"some of {','.join(PHASES)}; the verdict is about these alone",
    )
    parser.add_argument(
        "--download",
        type=parse_size,
        metavar="SIZE",
        help="do not run what downloads a larger torch: 500MB",
    )
    args = parser.parse_args(argv)
    results = []
    for result in try_all(args.dist, args.only, args.download):
        print(result, flush=True)
        results.append(result)
    print(conclude(results, args.only))
    counts = count(results)
    missing = counts["NOT RUN"] > 0 and not args.allow_missing
    return int(counts["FAIL"] > 0 or missing or counts["ok"] == 0)


if __name__ == "__main__":
    sys.exit(main())
