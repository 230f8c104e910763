"""Compares the files of two builds byte for byte. `nox -s repro` makes both builds.

python -m PACKAGE.toolkit.make.wheels.repro ONE OTHER        two folders like dist/
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ...binaries.files import hash_file
from ...errors import KernelsError
from ...targets.wording import count
from ..command import command

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class ReproError(KernelsError):
    """Two builds differ, or there is nothing to compare."""


def digest_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return hash_file(file).hex()


def digest_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file below a folder, by relative path.

    Raises:
        ReproError: The folder has no file: two empty folders would count as equal.
    """
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    found = {path.relative_to(folder).as_posix(): digest_file(path) for path in paths}
    if not found:
        message = f"`{folder}` holds no file to compare"
        raise ReproError(message)
    return found


def find_differences(one: dict[str, str], other: dict[str, str]) -> Iterator[str]:
    """Name the files that differ, or exist in one folder only."""
    for name in sorted(one.keys() | other.keys()):
        if name not in other:
            yield f"only the first build made {name}"
        elif name not in one:
            yield f"only the second build made {name}"
        elif one[name] != other[name]:
            yield f"{name} differs: {one[name]} and {other[name]}"


@command
def main(args: Sequence[str]) -> int:
    """Compare two folders: `args` are their paths. Return the exit status."""
    one, other = (digest_files(Path(arg)) for arg in args)
    differences = list(find_differences(one, other))
    for name, digest in one.items():
        print(f"{digest}  {name}")
    if differences:
        message = "\n".join(
            [f"two builds differ in {count(len(differences), 'file')}", *differences]
        )
        raise ReproError(message)
    print(f"byte-identical: {count(len(one), 'file')} of each build")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
