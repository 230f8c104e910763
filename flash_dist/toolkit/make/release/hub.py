"""Makes dist/hub: a repository for Hugging Face's `kernels` from each wheel.

A repository has the contents of the package's folder in build/VARIANT/, and a metadata.json with
the digest of every file. A process may load several copies, including an installed wheel. But torch
has one table of operators, and the dynamic linker loads only one library of each name (SONAME). So
each copy has unique names with its wheel's digest, for its operators and its library of kernels. A
unique name is as long as the name that it replaces, so nothing else moves in a file and nothing is
compiled. This works for every wheel on any machine, and the kernels are the tested bytes.

`python -m PACKAGE.toolkit.make.release.hub` takes the wheels from dist/.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import shutil
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ...binaries.wheel import open_wheel
from ...product import BINDING, FILE_NAME, HAS_DISPATCHER, KERNELS, NAME, PRODUCT, SCRIPT
from ..command import command
from ..project import ROOT, load_project
from ..wheels.artefacts import ArtefactError, find_artefacts
from ..wheels.channel import Published, no_commands

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from ...targets.archs import Arch
    from ..wheels.artefacts import Artefact

FOLDER: Final = "hub"
METADATA: Final = "metadata.json"
VERSION: Final = 1  # version of the kernel's interface for its users: `get_kernel(.., version=1)`

# Matches the package's name only where sources name its operators.
_OPERATORS: Final = re.compile(rf"(?<=\bops\.){NAME}\b|{NAME}(?=::)|(?<=Library\(\"){NAME}(?=\")")

_SHORTEST: Final = 4  # fewest characters of a package name, to leave room for digits of the digest
_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"

_HEAD: Final = """---
{licence}library_name: kernels
tags:
  - kernels
---

# {name} {version}

{summary}. Code for {archs}; torch {torch} and newer.

"""
_USAGE: Final = """```python
from pathlib import Path

from kernels import get_local_kernel

kernel = get_local_kernel(Path("FOLDER OF THIS FILE"))
```
"""


@dataclass(frozen=True)
class Variant:
    """One wheel as a folder of a repository for `kernels`."""

    artefact: Artefact

    @property
    def name(self) -> str:
        """The name of the wheel's folder, by which `kernels` tells if a machine can use it."""
        manifest = self.artefact.manifest
        cuda, torch = (x.replace(".", "") for x in (manifest.toolkit.cuda, manifest.torch_min))
        return f"torch-stable-abi{torch}-cu{cuda}-{manifest.arch_set.machine}-linux"

    @property
    def id(self) -> str:
        """The name of the module and of its operators: `m_3k0x9z` for `my_norms`.

        The name is the package's first letter, `_` and as many digits of the wheel's digest as fit.

        Raises:
            ArtefactError: The name of the package is too short.
        """
        return _name_copy(NAME, self.artefact.sha256)

    def files(self) -> dict[str, bytes]:
        """Return the files of the repository by path."""
        made = dict(self._package())
        digests = {name: _digest(data) for name, data in sorted(made.items())}
        metadata = {
            "name": SCRIPT,
            "id": self.id,
            "version": VERSION,
            "license": self.artefact.metadata.license,
            "python-depends": [],
            "backend": {"type": "cuda", "archs": self.archs},
            "digest": {"algorithm": "sha256", "files": digests},
        }
        made[METADATA] = (json.dumps(metadata, indent=2) + "\n").encode()
        licence = self.artefact.metadata.license
        path = load_project().hub_card
        card = _HEAD.format(
            name=NAME,
            licence=f"license: {licence.lower()}\n" if licence else "",
            summary=PRODUCT.summary.rstrip("."),
            version=self.artefact.version,
            archs=", ".join(self.archs),
            torch=self.artefact.manifest.torch_min,
        )
        card += path.read_text(encoding="utf-8") if path else _USAGE
        folder = f"build/{self.name}"
        return {"README.md": card.encode()} | {f"{folder}/{name}": x for name, x in made.items()}

    @property
    def archs(self) -> list[str]:
        """The targets in the wheel, in the form that `kernels` compares with a GPU."""
        return [_name_arch(arch) for arch in self.artefact.embedded]

    def _package(self) -> Iterator[tuple[str, bytes]]:
        """Yield the files of the package with the names of this copy."""
        with open_wheel(self.artefact.path) as wheel:
            for name in wheel.names:
                top, _, rest = name.partition("/")
                if top == NAME and rest:
                    yield self._own(rest), self._rename(rest, wheel.read(name))

    def _rename(self, name: str, data: bytes) -> bytes:
        """Return the content of a file; names in it become the unique names of this copy."""
        if name in {KERNELS, BINDING}:
            names = [KERNELS] if HAS_DISPATCHER else []
            names += [NAME] if name == BINDING else []
            return _replace_strings(data, {x: self._own(x) for x in names}, name)
        if name == FILE_NAME:
            return data.replace(KERNELS.encode(), self._own(KERNELS).encode())
        if not name.endswith(".py"):
            return data
        text = _OPERATORS.sub(self.id, data.decode())
        return text.replace(KERNELS, self._own(KERNELS)).encode()

    def _own(self, name: str) -> str:
        return name.replace(NAME, self.id) if name in {KERNELS, NAME} else name


def _name_copy(name: str, sha256: str) -> str:
    if len(name) < _SHORTEST:
        message = (
            f"a package for the hub must have a name of at least {_SHORTEST} letters, got `{name}`"
        )
        raise ArtefactError(message, hint="each copy there gets another name of the same length")
    number, digits = int(sha256, 16), ""
    while len(digits) < len(name) - 2:
        number, digit = divmod(number, len(_DIGITS))
        digits += _DIGITS[digit]
    return f"{name[0]}_{digits}"


def _name_arch(arch: Arch) -> str:
    """Return `9.0a` for sm_90a, `8.0+PTX` for compute_80."""
    return f"{arch.major}.{arch.minor}{arch.suffix}{'+PTX' if arch.ptx else ''}"


def _digest(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def _replace_strings(data: bytes, names: dict[str, str], file: str) -> bytes:
    """Replace whole strings of a library with strings of the same length.

    Raises:
        ArtefactError: A string is absent: the library is not ours, or was built differently.
    """
    for name, own in names.items():
        old, new = (b"\0" + x.encode() + b"\0" for x in (name, own))
        if old not in data:
            message = f"`{file}` has no string `{name}`, which a copy must have of its own"
            raise ArtefactError(message, hint="build the wheel again")
        data = data.replace(old, new)
    return data


def check(dist: Path, artefacts: Sequence[Artefact]) -> list[Published]:
    """Return the metadata of the repositories; empty if none was written.

    Raises:
        ArtefactError: A repository differs from the one that its wheel determines.
    """
    found = []
    for artefact in artefacts:
        folder, variant = dist / FOLDER / artefact.set_name, Variant(artefact)
        if not folder.is_dir():
            continue
        paths = (path for path in folder.rglob("*") if path.is_file())
        if {x.relative_to(folder).as_posix(): x.read_bytes() for x in paths} != variant.files():
            message = f"`{folder}` is not the repository of `{artefact.file_name}`"
            raise ArtefactError(message, hint="`nox -s hub` makes it again")
        found.append(Published(folder / "build" / variant.name / METADATA, artefact))
    return found


commands = no_commands  # no command: `kernels` loads a folder by its path


def write(artefact: Artefact, folder: Path) -> None:
    """Write the repository of a wheel."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, data in Variant(artefact).files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


@command
def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="nox -s hub", description=__doc__.split("\n")[0])
    parser.parse_args()
    for artefact in find_artefacts(ROOT / "dist"):
        folder = ROOT / "dist" / FOLDER / artefact.set_name
        write(artefact, folder)
        print(f"{folder.relative_to(ROOT)}: {Variant(artefact).name} of {artefact.file_name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
