"""Reports compile minutes per target and kernel family, from Ninja's logs.

nox -s build_cost [-- LOG ...]

The logs are `.ninja_log` of the build folders. Minutes are those of one compiler process: with N
jobs, a build takes about an Nth of the sum. Offline assembly of PTX, linking and packing are not
included.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...errors import KernelsError
from ...targets.archs import Arch
from ...targets.verdict import FLOORS
from ..command import command
from ..project import build_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_OBJECT: Final = re.compile(
    r"CMakeFiles/(?P<target>(?:sm|compute)_\w+)\.dir/.*/(?P<stem>\w+)\.cu\.o"
)
# The text after the family's name in a file name: a word such as `_bf16`, or a size: `_d64`.
_VARIANT: Final = re.compile(rf"_(?:{'|'.join(FLOORS)}|d[0-9])")
_HEADER: Final = re.compile(r"# ninja log v[5-7]")


class BuildLogError(KernelsError):
    """There is no build log, or a file is not a readable log of Ninja."""


@dataclass(frozen=True)
class Cost:
    """The compile time of one kernel object."""

    target: Arch
    family: str
    seconds: float


def find_logs(folder: Path) -> list[Path]:
    """Return the logs of native builds and of builds in containers, below a build folder.

    Raises:
        BuildLogError: There is no log.
    """
    places = ("native-*/.ninja_log", "*/native-*/.ninja_log")
    found = sorted(path for place in places for path in folder.glob(place))
    if not found:
        message = f"no log of a build is in `{folder}`"
        raise BuildLogError(message, hint="`nox -s build_wheels` leaves one")
    return found


def read_log(path: Path) -> list[Cost]:
    """Read the time of each kernel object's last compilation.

    Raises:
        BuildLogError: The file cannot be read, or is not a log of Ninja.
    """
    try:
        header, *lines = path.read_text(encoding="utf-8").splitlines() or [""]
    except (OSError, UnicodeDecodeError) as error:
        message = f"`{path}` cannot be read: {error}"
        raise BuildLogError(message) from error
    if _HEADER.fullmatch(header) is None:
        message = f"`{path}` is no log of Ninja 1.5 to 1.13, it begins with `{header[:40]}`"
        raise BuildLogError(message, hint="build folders hold them: build/native-*/.ninja_log")
    latest: dict[str, Cost] = {}
    for line in lines:
        begin, end, _, output, *_ = [*line.split("\t"), "", "", "", ""]
        match = _OBJECT.search(output)
        if match:
            family = _VARIANT.split(match["stem"])[0]
            seconds = (int(end) - int(begin)) / 1000
            latest[output] = Cost(Arch.parse(match["target"]), family, seconds)
    return list(latest.values())


def make_table(costs: Iterable[Cost]) -> list[str]:
    """Return a Markdown table of minutes with a row per family and a column per target."""
    seconds: defaultdict[tuple[str, Arch], float] = defaultdict(float)
    objects: Counter[Arch] = Counter()
    for one in costs:
        seconds[one.family, one.target] += one.seconds
        objects[one.target] += 1
    targets = sorted(objects)
    rows = [[family] for family in sorted({family for family, _ in seconds})]
    for row in rows:
        row += [_minutes(seconds[row[0], target]) for target in targets]
        row.append(_minutes(sum(seconds[row[0], target] for target in targets)))
    sums = [sum(seconds[family[0], target] for family in rows) for target in targets]
    rows.append(["all", *map(_minutes, sums), _minutes(sum(sums))])
    rows.append(["objects", *(str(objects[one]) for one in targets), str(objects.total())])
    head = ["minutes", *map(str, targets), "all"]
    rule = ["---", *("--:" for _ in head[1:])]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *rows)]


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f}" if seconds else ""


@command
def main(args: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="nox -s build_cost --", description="Minutes per target and kernel family."
    )
    parser.add_argument("logs", type=Path, nargs="*", help="default: those of the build folders")
    named = parser.parse_args(args).logs
    tables = [(path, read_log(path)) for path in named or find_logs(build_folder())]
    for path, costs in tables:
        print(f"{path}: minutes of one compiler\n", *make_table(costs), "", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
