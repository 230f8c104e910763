"""Make dist/variants: variant wheels and their index, for installers that read PEP 825 (a draft).

    OUT/<project>/<wheel>-<label>.whl     each set under the plain version, with `variant.json`
    OUT/<project>/<wheel>.whl             the default set, for all other installers and GPUs
    OUT/<project>/*-variants.json         properties of the wheels: for which GPU and driver
    OUT/<project>/index.html, index.json  OUT/ is a package index with relative links

`uv --preview-features wheel-variants` installs the set for the GPU. A release leaves the
folder out until the draft is accepted; PyPI refuses these files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...indexes.index import PROJECT
from ...product import NAME
from ..command import command
from ..project import ROOT
from ..wheels.artefacts import Artefact, ArtefactError, find_artefacts
from ..wheels.channel import no_commands, no_files
from .index import pick_default, write_files
from .pypi import make_plain, name_plain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ...targets.archs import Arch

FOLDER: Final = "variants"
_LONGEST: Final = 16  # maximum length of a label
_FILE: Final = "variant.json"
# uv's built-in provider, and the schema that uv reads.
_HEAD: Final[Mapping[str, Any]] = {
    "$schema": "https://variants-schema.wheelnext.dev/peps/850/v0.2.0.json",
    "default-priorities": {"namespace": ["nvidia"]},
    "providers": {
        "nvidia": {
            "plugin-api": "nvidia_variant_provider.plugin:NvidiaVariantPlugin",
            "requires": ["nvidia-variant-provider>=0.0.1"],
        }
    },
}


def describe_variant(one: Artefact) -> dict[str, Any]:
    """Return the properties of a wheel. A machine must match one value of each property."""
    return {
        "nvidia": {
            "cuda_version_lower_bound": [one.manifest.toolkit.cuda],
            "sm_arch": sorted(map(_name_arch, one.manifest.arch_set.archs)),
        }
    }


def _name_arch(arch: Arch) -> str:
    """Return `90_real` for sm_90a: a target with a suffix matches no GPU in uv."""
    return f"{arch.number}_{'virtual' if arch.ptx else 'real'}"


def write(out: Path, artefacts: Sequence[Artefact]) -> list[Path]:
    """Write the wheels and their index to `out`, and return the paths of the wheels.

    Raises:
        ArtefactError: A default set is missing, or a label is too long.
    """
    default = pick_default(artefacts, partial=False)
    wheels = {name_plain(one): make_plain(one) for one in default}
    variants = {}
    for one in artefacts:
        label = one.manifest.arch_set.label
        if one in default:
            continue
        if len(label) > _LONGEST:
            message = f"a variant has a label of at most {_LONGEST} characters, got `{label}`"
            raise ArtefactError(message, hint=f"build a published set instead of {one.file_name}")
        variants[label] = describe_variant(one)
        told = _to_json({label: variants[label]})
        name = f"{name_plain(one).removesuffix('.whl')}-{label}.whl"
        wheels[name] = make_plain(one, {_FILE: told})
    version = default[0].version.public
    shutil.rmtree(out, ignore_errors=True)
    write_files(out, {**wheels, f"{NAME}-{version}-variants.json": _to_json(variants)})
    return [out / PROJECT / name for name in wheels]


def _to_json(variants: Mapping[str, Any]) -> bytes:
    return f"{json.dumps({**_HEAD, 'variants': variants}, indent=1, sort_keys=True)}\n".encode()


check = no_files  # not part of a release
commands = no_commands


@command
def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="nox -s variants --", description="Make variant wheels.")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of the wheels")
    args = parser.parse_args()
    out = args.dist / FOLDER
    for path in write(out, find_artefacts(args.dist)):
        print(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}")
    print(f"serve   python -m http.server --bind 127.0.0.1 --directory {out}")
    uv = "uv pip install --preview-features wheel-variants --index http://127.0.0.1:8000/"
    print(f"install {uv} {PROJECT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
