"""Compares a conda package with its wheel, after packing and in a release."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from ...audit.files import INSTALLER
from ...audit.verify import verify_wheel
from ...binaries.wheel import open_wheel
from ...builds.conda_package import (
    SITE,
    CondaContents,
    PackedFile,
    open_conda,
)
from ...builds.published import load_archsets, pick_for
from ...gpucode.inspection import Choice, inspect_libraries
from ...gpucode.libraries import open_libraries
from ..project import ARCHSETS
from ..wheels.artefacts import ArtefactError
from .recipe import PICK, Recipe, make_recipe
from .repodata import REPODATA, make_repodata

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ..wheels.artefacts import Artefact

CHANNEL: Final = "conda"  # folder in dist/ and in the package index
_CHANGED: Final = (f".dist-info/{INSTALLER}", ".dist-info/RECORD")  # files that packing changes


def recipe_of(one: Artefact) -> Recipe:
    """Derive the conda metadata of a wheel from the table of arch sets."""
    machine = one.manifest.arch_set.machine
    sets = {k: own for k, own in load_archsets(ARCHSETS).items() if own.machine == machine}
    return make_recipe(one, sets, pick_for(PICK, ARCHSETS, machine))


def find_packages(dist: Path, artefacts: Sequence[Artefact]) -> dict[Path, Artefact]:
    """Find and check the packages of dist/conda; return each path with its wheel.

    Return an empty dict if dist/conda does not exist.

    Raises:
        KernelsError: A package has no wheel here, a wheel has no package, or a package or
            repodata.json is wrong.
    """
    folder = dist / CHANNEL
    if not folder.is_dir():
        return {}
    expected = {folder / recipe_of(one).path: one for one in artefacts}
    present = set(folder.rglob("*.conda"))
    for path in sorted(expected.keys() ^ present):
        what = "belongs to no wheel beside it" if path in present else "is missing"
        message = f"`{path}` {what}"
        raise ArtefactError(message, hint="`nox -s conda` makes dist/conda again")
    for path, one in expected.items():
        check_package(path, one)
    for place in sorted({path.parent for path in expected}):
        _check_repodata(place)
    return dict(sorted(expected.items()))


def _check_repodata(folder: Path) -> None:
    path = folder / REPODATA
    if not path.is_file() or path.read_text(encoding="utf-8") != make_repodata(folder):
        message = f"`{path}` does not list the packages beside it"
        raise ArtefactError(message, hint="`nox -s conda` makes dist/conda again")


def check_package(path: Path, one: Artefact) -> None:
    """Raise unless a package is complete, has the expected metadata and holds the wheel's files."""
    problems = list(_find_problems(path, one))
    if problems:
        details = "".join(f"\n  {problem}" for problem in problems[:10])
        message = f"`{path.name}` is not the conda package of `{one.file_name}`{details}"
        raise ArtefactError(message, hint="`nox -s conda` makes it again")


def _find_problems(path: Path, one: Artefact) -> Iterator[str]:
    for result in verify_wheel(path).results:
        if not result:
            yield from (result.summary, *result.details)
    with open_conda(path) as package:
        yield from _compare_index(package, recipe_of(one))
        yield from _compare_files(package, one)
    inspections, unread = inspect_libraries(open_libraries(path), Choice())
    yield from (f"{file.name} cannot be read: {file.reason}" for file in unread)
    targets = sorted({arch for found in inspections for arch in found.report.archs})
    if targets != list(one.embedded):
        yield f"it holds code for {', '.join(map(str, targets)) or 'nothing'}"


def _compare_index(package: CondaContents, recipe: Recipe) -> Iterator[str]:
    for name, value in recipe.to_json().items():
        if package.index.get(name) != value:
            yield f"index.json has {name} {package.index.get(name)!r}, it must be {value!r}"


def _compare_files(package: CondaContents, one: Artefact) -> Iterator[str]:
    wanted = hash_wheel(one.path)
    found = {name.removeprefix(SITE): file for name, file in package.files.items()}
    for name in sorted(wanted.keys() | found.keys()):
        if not name.endswith(_CHANGED) and wanted.get(name) != found.get(name):
            yield f"{name} differs from the wheel"


def hash_wheel(path: Path) -> dict[str, PackedFile]:
    """Return hash and size of each file of a wheel, by name."""
    with open_wheel(path) as wheel:
        files = {name: wheel.read(name) for name in wheel.names}
    return {
        name: PackedFile(hashlib.sha256(data).hexdigest(), len(data))
        for name, data in files.items()
    }
