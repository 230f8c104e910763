"""Make dist/pypi, the wheels for PyPI: `nox -s pypi`. PyPI refuses versions with a label.

These are the wheels of the default index, one for each kind of CPU, under the plain version: 0.1.0
instead of 0.1.0+cu130.all. METADATA, `_build.json`, bill of materials and RECORD differ in the
version. All other files are those of the labelled wheel, so nothing is compiled again. No index of
`nox -s index` lists them: pip and uv would choose the labelled version, which counts as newer.
"""

from __future__ import annotations

import argparse
import base64
import copy
import hashlib
import io
import os
import sys
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from ...binaries.wheel import open_wheel
from ...builds.contents import LIBRARIES, MANIFEST
from ...builds.metadata import NAME as METADATA
from ...builds.record import hash_member
from ...builds.sbom import bill_name
from ...product import NAME
from ..command import command
from ..project import ROOT
from ..wheels.artefacts import PYPI, Artefact, ArtefactError, find_artefacts
from ..wheels.channel import Published, no_commands
from ..wheels.gates import run, verify
from .index import pick_default

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ...builds.manifest import Manifest


def name_plain(one: Artefact) -> str:
    """Return the file name of a wheel with the plain version, which has no label."""
    return one.file_name.replace(f"-{one.version}-", f"-{one.version.public}-")


def make_plain(one: Artefact, more: Mapping[str, bytes] = MappingProxyType({})) -> bytes:
    """Return a copy of a wheel with the plain version, and with more files in its dist-info."""
    return make_version(one, _declare_plain(one), more)


def make_version(
    one: Artefact, manifest: Manifest, more: Mapping[str, bytes] = MappingProxyType({})
) -> bytes:
    """Return a copy of a wheel with another manifest and its version; the bytes are reproducible.

    Args:
        one: The wheel.
        manifest: The new manifest; files that it does not list are left out.
        more: Files to add to the dist-info, by name.
    """
    from ..compile.sbom import make_sbom  # noqa: PLC0415 - `check` runs without these packages

    old, new = _folders(one, manifest)
    with open_wheel(one.path) as wheel:
        hashes = {name: hash_member(wheel, name) for name in LIBRARIES}
    sbom = make_sbom(manifest, hashes).encode()
    changed = {**_change(one, manifest), f"{new}/sboms/{bill_name(NAME)}": sbom}
    changed |= {f"{new}/{name}": data for name, data in more.items()}
    made, lines = io.BytesIO(), ""
    with zipfile.ZipFile(one.path) as packed, zipfile.ZipFile(made, "w") as new_wheel:
        members = {x.filename.replace(f"{old}/", f"{new}/"): x for x in packed.infolist()}
        record = members.pop(f"{new}/RECORD")
        for name in {*one.manifest.files} - {*manifest.files}:
            del members[f"{NAME}/{name}"]
        members |= {f"{new}/{name}": record for name in more}
        for name, member in members.items():
            data = changed.get(name) or packed.read(member)
            _store(new_wheel, name, data, member)
            if not member.is_dir():
                digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
                lines += f"{name},sha256={digest.decode()},{len(data)}\n"
        _store(new_wheel, f"{new}/RECORD", f"{lines}{new}/RECORD,,\n".encode(), record)
    return made.getvalue()


def _store(archive: zipfile.ZipFile, name: str, data: bytes, like: zipfile.ZipInfo) -> None:
    place = copy.copy(like)
    place.filename = name
    archive.writestr(place, data)


def _folders(one: Artefact, manifest: Manifest) -> tuple[str, str]:
    """Return the old and the new name of the folder `.dist-info`."""
    versions = (one.manifest.package_version, manifest.package_version)
    old, new = (f"{NAME}-{version}.dist-info" for version in versions)
    return old, new


def _declare_plain(one: Artefact) -> Manifest:
    return replace(one.manifest, package_version=one.version.public)


def _change(one: Artefact, manifest: Manifest) -> dict[str, bytes]:
    """Return the new text of files with the version, except the bill of materials and RECORD."""
    versions = (one.manifest.package_version, manifest.package_version)
    old, new = (f"\nVersion: {version}\n".encode() for version in versions)
    return {
        MANIFEST: manifest.to_text().encode(),
        f"{_folders(one, manifest)[1]}/{METADATA}": one.metadata.text.replace(old, new, 1),
    }


def check(dist: Path, artefacts: Sequence[Artefact]) -> list[Published]:
    """Verify and return the plain wheels; empty if they were not written.

    Raises:
        KernelsError: The files are not those of `write` for these wheels, or `verify` fails.
    """
    folder = dist / PYPI
    if not folder.is_dir():
        return []
    made = {name_plain(one): one for one in pick_default(artefacts, partial=True)}
    for name in sorted({path.name for path in folder.iterdir()} | made.keys()):
        if not (
            name in made and (folder / name).is_file() and _is_plain(folder / name, made[name])
        ):
            message = f"`{folder / name}` is not what the wheels in `{dist}` give"
            raise ArtefactError(message, hint="`nox -s pypi` makes it again")
        verify(folder / name)
    return [
        Published(folder / name, one, {"version": one.version.public}) for name, one in made.items()
    ]


def _is_plain(path: Path, one: Artefact) -> bool:
    """Tell if a plain wheel matches its labelled wheel; `verify` checks SBOM and RECORD."""
    manifest = _declare_plain(one)
    old, new = _folders(one, manifest)
    changed = _change(one, manifest)
    judged = {f"{new}/RECORD", f"{new}/sboms/{bill_name(NAME)}"}
    with open_wheel(path) as plain, open_wheel(one.path) as wheel:
        names = {name.replace(f"{old}/", f"{new}/"): name for name in wheel.names}
        return sorted(names) == sorted(plain.names) and all(
            plain.read(name) == (changed.get(name) or wheel.read(labelled))
            for name, labelled in names.items()
            if name not in judged
        )


commands = no_commands  # no command: our index lacks these wheels


def write(dist: Path, artefacts: Sequence[Artefact], *, partial: bool) -> list[Path]:
    """Write the plain wheels of the default sets, and verify each.

    Raises:
        KernelsError: The wheel of a default set is missing and `partial` is false, or a plain wheel
            fails `verify`.
    """
    folder = dist / PYPI
    chosen = pick_default(artefacts, partial=partial)
    for path in folder.glob("*.whl"):
        path.unlink()
    for one in chosen:
        with tempfile.TemporaryDirectory(prefix=".part-", dir=dist) as part:
            path = Path(part) / name_plain(one)
            path.write_bytes(make_plain(one))
            verify(path)
            folder.mkdir(exist_ok=True)
            path.rename(folder / path.name)
    return sorted(folder.glob("*.whl"))


@command
def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="nox -s pypi --", description="Make wheels for PyPI.")
    parser.add_argument(
        "--partial", action="store_true", help="go on without the sets of the default index"
    )
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of the wheels")
    args = parser.parse_args()
    written = write(args.dist, find_artefacts(args.dist), partial=args.partial)
    if written:
        run([sys.executable, "-m", "twine", "check", "--strict", *map(str, written)], os.environ)
    for path in written:
        print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
