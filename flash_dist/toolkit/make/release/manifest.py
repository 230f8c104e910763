"""Write the files that accompany the wheels of a release into dist/: `nox -s manifest`.

    manifest.json                    every wheel: set, targets, SHA-256, size, tags, toolkit, torch;
                                     and files of other channels, including the sources
    provenance/<file>.intoto.json    sources and build of each file
    *.dsse.json                      next to each of these: its signed envelope, if the environment
                                     names a key, see signing.py
    SHA256SUMS                       of these files and of those that manifest.json lists

Every wheel is verified first. The same wheels, commit and keys give the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...audit.signatures import MANIFEST_TYPE, PROVENANCE, STATEMENT, STATEMENT_TYPE, envelope_of
from ...builds.listing import FILE_NAME, VERSION
from ...product import NAME
from ..command import command
from ..project import ROOT, load_project
from ..wheels.artefacts import Artefact, ArtefactError, find_artefacts, require_sound
from ..wheels.run_time import name_toolkit
from ..wheels.source import Source, find_other_toolkit, read_source
from .channels import Row, find_published, released
from .signing import VARIABLE as SIGNING_KEY
from .signing import find_signers, sign_file
from .statement import Subject, state_file, state_wheel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from securesystemslib.signer import CryptoSigner

    from ..wheels.channel import Published

SUMS: Final = "SHA256SUMS"


def write_release(
    dist: Path,
    artefacts: Sequence[Artefact],
    source: Source | None,
    signers: Sequence[CryptoSigner] = (),
) -> list[Path]:
    """Write manifest, statements, their signatures and checksums; return the paths.

    Args:
        dist: Folder with the folders of the wheels.
        artefacts: The wheels.
        source: The commit; None omits it.
        signers: The keys that sign; none: nothing is signed.

    Raises:
        KernelsError: A wheel fails `verify`, or was not built from the commit; or there are
            signers, but no commit.
    """
    if signers and source is None:
        message = "a signed release names its commit, and --no-commit leaves it out"
        raise ArtefactError(message, hint=f"unset {SIGNING_KEY} for a trial")
    for one in artefacts:
        require_sound(one)
        if source is not None:
            require_source(one, source)
    files = list(find_published(dist, artefacts, released()))
    shutil.rmtree(dist / PROVENANCE, ignore_errors=True)
    (dist / PROVENANCE).mkdir()
    written = [dist / FILE_NAME]
    envelope_of(written[0]).unlink(missing_ok=True)
    _write_json(written[0], make_manifest(dist, artefacts, source, files))
    statements = {one.file_name: state_wheel(one, source) for one in artefacts}
    for row, file in files:
        subject = _subject(file.path)
        statements[subject.name] = state_file(subject, row.name, file.wheel, source)
    for name, statement in statements.items():
        path = dist / PROVENANCE / f"{name}{STATEMENT}"
        _write_json(path, statement)
        written.append(path)
    if signers:
        kinds = [MANIFEST_TYPE, *(STATEMENT_TYPE for _ in statements)]
        written += [
            sign_file(path, kind, signers) for path, kind in zip(written, kinds, strict=True)
        ]
    named = [*(one.path for one in artefacts), *(file.path for _, file in files), *written]
    (dist / SUMS).write_text(_sum(dist, named), encoding="utf-8")
    return [*written, dist / SUMS]


def _subject(path: Path) -> Subject:
    return Subject(path.name, hashlib.sha256(path.read_bytes()).hexdigest())


def require_source(one: Artefact, source: Source) -> None:
    """Raise unless a wheel was built from the commit, by this toolkit."""
    hint = "build it again; `nox -s manifest -- --no-commit` leaves the commit out, for a trial"
    other = find_other_toolkit(one)
    if other:
        message = f"`{one.file_name}` was built with {other}, and this is {name_toolkit()}"
        raise ArtefactError(message, hint=hint)
    different = list(source.differences(one))
    if different:
        message = (
            f"`{one.file_name}` was not built from commit {source.commit[:12]}: "
            f"{', '.join(different[:3])} differ ({len(different)} in all)"
        )
        raise ArtefactError(message, hint=hint)


def make_manifest(
    dist: Path,
    artefacts: Sequence[Artefact],
    source: Source | None,
    files: Sequence[tuple[Row, Published]],
) -> dict[str, Any]:
    """Return the manifest of the wheels, `artefacts`, and of the `files` of the channels."""
    return {
        "version": VERSION,
        "project": NAME,
        "source_commit": source.commit if source else None,
        "artefacts": [
            *(_describe(dist, one) for one in artefacts),
            *(_describe_file(dist, row, file) for row, file in files),
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


def _describe_file(dist: Path, row: Row, file: Published) -> dict[str, Any]:
    """Describe a channel's file; most facts are known only for a file made from a wheel."""
    one, data = file.wheel, file.path.read_bytes()
    return {
        **(_describe(dist, one) if one else {}),
        "file": file.path.name,
        "path": file.path.relative_to(dist).as_posix(),
        "kind": row.name,
        "version": str(one.version) if one else load_project().version,
        "sha256": hashlib.sha256(data).hexdigest(),
        "size": len(data),
        **file.told,
        **({"wheel": one.file_name} if one else {}),
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
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="nox -s manifest --", description=__doc__.split("\n")[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of the wheels")
    parser.add_argument(
        "--no-commit", action="store_true", help="do not say which commit they were built from"
    )
    args = parser.parse_args()
    artefacts = find_artefacts(args.dist)
    source = None if args.no_commit else read_source()
    signers = find_signers()
    written = write_release(args.dist, artefacts, source, signers)
    for one in artefacts:
        print(f"{one.sha256}  {one.file_name}")
    print(f"of commit {source.commit}" if source else "of no named commit")
    keys = ", ".join(one.public_key.keyid for one in signers)
    print(f"signed by {keys}" if keys else f"not signed: {SIGNING_KEY} names no key")
    for path in written:
        print(f"wrote   {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
