"""Compares a conda package with the package that our builds make from its wheel.

A client links files, runs scripts, writes prefixes into files and installs dependencies as `info/`
says. All of that must follow from the wheel inside; anything else is a finding.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from packaging.utils import parse_wheel_filename

from ..binaries.codecs import open_zstd
from ..binaries.files import open_file
from ..binaries.json_text import parse_json
from ..binaries.wheel import open_wheel
from ..builds.archive_layout import find_foreign_headers, read_members
from ..builds.conda_package import INDEX, PATHS, part_name
from ..builds.conda_solver import (
    SUBDIRS,
    constrain_gpus,
    list_dependencies,
    name_build,
    read_platform,
)
from ..builds.contents import read_contents, read_manifest
from ..builds.entry_points import LINK, make_link
from ..builds.metadata import read_metadata
from .files import find_foreign_kinds

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ..builds.conda_package import CondaContents

LICENSES: Final = "info/licenses/"
_ABOUT: Final = "info/about.json"
_FORMAT: Final = {"conda_pkg_format_version": 2}
_TEXTS: Final = frozenset({"license", "summary", "home"})  # the only keys that about.json may have
# Keys of index.json that are not checked.
_TOLD: Final = frozenset({"arch", "license", "platform", "timestamp"})
_PATH: Final = {"_path", "path_type", "sha256", "size_in_bytes"}


def find_foreign_members(path: Path) -> Iterator[str]:
    """Describe members, headers and bytes of a package that our builds never write.

    Raises:
        KernelsError: An archive cannot be read.
    """
    with open_file(path) as file:
        members, problems = read_members(file)
    yield from problems
    yield from find_foreign_kinds(members)
    wanted = ["metadata.json", *(f"{kind}-{path.stem}.tar.zst" for kind in ("info", "pkg"))]
    found = sorted(member.name for member in members)
    if found != sorted(wanted):
        yield f"it holds {', '.join(found)}, a package of this name {', '.join(wanted)}"
    with open_wheel(path, kind="conda package") as opened:
        for kind in ("info", "pkg"):
            with opened.unpacked(part_name(opened, kind)) as packed, open_zstd(packed) as stream:
                yield from find_foreign_headers(stream)
        told = _parse(opened.read("metadata.json")) if "metadata.json" in opened.names else None
        if told != _FORMAT:
            yield f"metadata.json is not {json.dumps(_FORMAT)}"


def find_foreign_claims(package: CondaContents, file_name: str) -> Iterator[str]:
    """Describe the metadata in a package that does not follow from the wheel inside.

    Raises:
        KernelsError: The wheel inside cannot be read, or cannot become a conda package.
    """
    index = package.index
    stem = "-".join(str(index.get(key, "")) for key in ("name", "version", "build"))
    if file_name != f"{stem}.conda":
        yield f"the file is called {file_name}, index.json says {stem}.conda"
    for key, value in _expect(package).items():
        if index.get(key) != value:
            yield f"index.json has {key} {index.get(key)!r}, of this wheel it is {value!r}"
    yield from _judge_info(package)


def _expect(package: CondaContents) -> dict[str, Any]:
    contents = read_contents(package.wheel)
    with open_wheel(package.wheel) as wheel:
        metadata = read_metadata(wheel)
    _, version, _, tags = parse_wheel_filename(package.wheel.name)
    machine, glibc = read_platform(package.wheel.name, map(str, tags))
    manifest, number = contents.manifest, package.index.get("build_number")
    rank = number if isinstance(number, int) and number >= 0 else 0
    archs = {image.entry.arch for image in contents.images if image.entry.arch is not None}
    return {
        "name": manifest.product.replace("_", "-"),
        "version": version.public,
        "build": name_build(manifest.arch_set.label, manifest.toolkit.cuda, rank),
        "build_number": rank,
        "subdir": SUBDIRS[machine],
        "noarch": "python",
        "depends": list_dependencies(metadata, manifest, machine, glibc),
        "constrains": [f"__cuda_arch {constrain_gpus(sorted(archs))}"],
    }


def _judge_info(package: CondaContents) -> Iterator[str]:
    known = {"name", "version", "build", "build_number", "subdir", "noarch", "depends"}
    for key in sorted(set(package.index) - known - {"constrains"} - _TOLD):
        yield f"index.json has {key}, which clients may act upon"
    for name in sorted(package.info):
        if not name.startswith(LICENSES) and name not in {INDEX, PATHS, _ABOUT, LINK}:
            yield f"it holds {name}, which clients would act upon"
    if not any(name.startswith(LICENSES) for name in package.info):
        yield f"it has no licence in {LICENSES}"
    about = _parse(package.info.get(_ABOUT, b"{}"))
    if not isinstance(about, dict) or not set(about) <= _TEXTS:
        yield f"about.json says more than {', '.join(sorted(_TEXTS))}"
    scripts = read_manifest(package.wheel).scripts
    wanted = make_link(scripts) if scripts else None
    if _parse(package.info.get(LINK, b"")) != wanted:
        yield f"link.json is not that of the scripts of its wheel: {json.dumps(wanted)}"
    yield from _judge_paths(_parse(package.info[PATHS]))


def _judge_paths(data: object) -> Iterator[str]:
    if not isinstance(data, dict) or not set(data) <= {"paths", "paths_version"}:
        yield "paths.json says more than a list of paths"
        return
    seen: set[str] = set()
    for one in data["paths"]:
        name = str(one["_path"])
        if one.keys() != _PATH or one["path_type"] != "hardlink":
            told = ", ".join(f"{key} {one[key]!r}" for key in sorted(one.keys() - {"_path"}))
            yield f"paths.json lets clients do more with {name} than link it: {told}"
        if name in seen:
            yield f"paths.json lists {name} twice"
        seen.add(name)


def _parse(text: bytes) -> object:
    try:
        return parse_json(text)
    except (ValueError, RecursionError):
        return None
