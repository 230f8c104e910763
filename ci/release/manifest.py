"""Write what goes beside the wheels of a release into dist/: `nox -s manifest`.

    manifest.json                    every wheel: set, targets, SHA-256, size, tags, toolkit, torch;
                                     the conda packages and the sources, where they were made
    provenance/<file>.intoto.json    what each was built from and how, unsigned
    SHA256SUMS                       of all of these, for `sha256sum --check`

Every wheel is verified first. The same wheels and commit give the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ci.command import command
from ci.conda.check import find_packages, recipe_of
from ci.project import ROOT, load_project
from ci.release.statement import Subject, state_conda, state_sdist, state_wheel
from ci.wheels.artefacts import Artefact, ArtefactError, find_artefacts, require_sound
from ci.wheels.source import Source, read_source
from flash_dist.builds.listing import FILE_NAME, VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROVENANCE: Final = "provenance"
SUMS: Final = "SHA256SUMS"


def write_release(dist: Path, artefacts: Sequence[Artefact], source: Source | None) -> list[Path]:
    """Write manifest, statements and checksums.

    Args:
        dist: Where the folders of the wheels are.
        artefacts: The wheels.
        source: The commit; None leaves it out.

    Raises:
        FlashDistError: A wheel does not verify, or is not of the commit.
    """
    for one in artefacts:
        require_sound(one)
        if source is not None:
            require_source(one, source)
    condas, sdists = find_packages(dist, artefacts), find_sdists(dist)
    shutil.rmtree(dist / PROVENANCE, ignore_errors=True)
    (dist / PROVENANCE).mkdir()
    written = [dist / FILE_NAME]
    _write_json(written[0], make_manifest(dist, artefacts, source, condas, sdists))
    statements = {
        **{one.file_name: state_wheel(one, source) for one in artefacts},
        **{path.name: state_conda(_subject(path), one, source) for path, one in condas.items()},
        **{path.name: state_sdist(_subject(path), source) for path in sdists},
    }
    for name, statement in statements.items():
        path = dist / PROVENANCE / f"{name}.intoto.json"
        _write_json(path, statement)
        written.append(path)
    named = [*(one.path for one in artefacts), *condas, *sdists, *written]
    (dist / SUMS).write_text(_sum(dist, named), encoding="utf-8")
    return [*written, dist / SUMS]


def find_sdists(dist: Path) -> list[Path]:
    """Return the packed sources of this version, if they were made."""
    return sorted(dist.glob(f"flash_dist-{load_project().version}.tar.gz"))


def _subject(path: Path) -> Subject:
    return Subject(path.name, hashlib.sha256(path.read_bytes()).hexdigest())


def require_source(one: Artefact, source: Source) -> None:
    """Raise unless a wheel was built from the commit."""
    different = list(source.differences(one))
    if different:
        message = (
            f"`{one.file_name}` was not built from commit {source.commit[:12]}: "
            f"{', '.join(different[:3])} differ ({len(different)} in all)"
        )
        hint = "build it again; `nox -s manifest -- --no-commit` leaves the commit out, for a trial"
        raise ArtefactError(message, hint=hint)


def make_manifest(
    dist: Path,
    artefacts: Sequence[Artefact],
    source: Source | None,
    condas: Mapping[Path, Artefact],
    sdists: Sequence[Path] = (),
) -> dict[str, Any]:
    """Return the manifest; `condas` are the conda packages, each with its wheel."""
    return {
        "version": VERSION,
        "project": "flash_dist",
        "source_commit": source.commit if source else None,
        "artefacts": [
            *(_describe(dist, one) for one in artefacts),
            *(_describe_conda(dist, path, one) for path, one in condas.items()),
            *(_describe_sdist(dist, path) for path in sdists),
        ],
    }


def _describe(dist: Path, one: Artefact) -> dict[str, Any]:
    manifest = one.manifest
    return {
        "file": one.file_name,
        "path": one.path.relative_to(dist).as_posix(),
        "kind": "wheel",
        "version": str(one.version),
        "set": one.set_name,
        "archs": [str(arch) for arch in one.embedded],
        "sha256": one.sha256,
        "size": one.size,
        "installed_size": one.installed_size,
        "tags": list(one.tags),
        "requires_python": one.requires_python,
        "toolkit": {"cuda": manifest.toolkit.cuda, "nvcc": manifest.toolkit.nvcc},
        "driver_min": manifest.toolkit.driver_min,
        "torch": {"min": manifest.torch_min, "tested_max": manifest.torch_tested_max},
    }


def _describe_conda(dist: Path, path: Path, one: Artefact) -> dict[str, Any]:
    """Describe a conda package: it holds the files of its wheel."""
    data = path.read_bytes()
    recipe = recipe_of(one)
    return {
        **_describe(dist, one),
        "file": path.name,
        "path": path.relative_to(dist).as_posix(),
        "kind": "conda",
        "sha256": hashlib.sha256(data).hexdigest(),
        "size": len(data),
        "tags": [f"{recipe.subdir}/{recipe.build}"],
        "depends": list(recipe.depends),
        "constrains": list(recipe.constrains),
        "wheel": one.file_name,
    }


def _describe_sdist(dist: Path, path: Path) -> dict[str, Any]:
    return {
        "file": path.name,
        "path": path.relative_to(dist).as_posix(),
        "kind": "sdist",
        "version": load_project().version,
        "sha256": _subject(path).sha256,
        "size": path.stat().st_size,
    }


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def _sum(dist: Path, paths: Sequence[Path]) -> str:
    digests = {
        path.relative_to(dist).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
    }
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))


@command
def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="nox -s manifest --", description=__doc__.split("\n")[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of the wheels")
    parser.add_argument(
        "--no-commit", action="store_true", help="do not say which commit they were built from"
    )
    args = parser.parse_args()
    artefacts = find_artefacts(args.dist)
    source = None if args.no_commit else read_source()
    written = write_release(args.dist, artefacts, source)
    for one in artefacts:
        print(f"{one.sha256}  {one.file_name}")
    print(f"of commit {source.commit}" if source else "of no named commit")
    for path in written:
        print(f"wrote   {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
