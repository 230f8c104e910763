"""Checks that file name, dist-info, METADATA, WHEEL and `_build.json` describe the same wheel.

An installer reads all but the last: the file name for tags, METADATA for dependencies, WHEEL for
where the files go.
"""

from __future__ import annotations

import re
from email.parser import BytesHeaderParser
from itertools import chain
from typing import TYPE_CHECKING, Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.tags import parse_tag

from ..builds.contents import Naming, read_manifest_in
from ..builds.entry_points import FILE_NAME as SCRIPTS
from ..builds.entry_points import write_entry_points
from ..builds.linkage import EXTRAS, extra_requirements, requirements_of
from ..builds.metadata import ANY_PYTHON, PYTHON, read_tags
from ..product import package_of
from .needs import find_glibc, find_python, read_floor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from email.message import Message

    from ..binaries.wheel import Wheel
    from ..builds.manifest import Manifest

_ANY: Final = "-".join(ANY_PYTHON)
_NAME: Final = re.compile(rf"([^-]+)-([^-]+)-({_ANY}-[^-]+)\.whl")
_SHOWN: Final = 100  # maximum characters of a line in a message
_TAG: Final = re.compile(rf"{_ANY}-[a-z0-9_.]+")
_INFO: Final = re.compile(r"([^/]+)\.dist-info/METADATA")
_ONCE: Final = ("Metadata-Version", "Name", "Version", "Requires-Python")
# The form and the names of the fields that our builds write. Other fields can make installers fetch
# more packages. Some readers accept a malformed or encoded line as a header; others do not.
_HEADER: Final = re.compile(r"([A-Z][A-Za-z-]+): (?!.*=\?)[!-~](?:[ -~]*[!-~])?")
_METADATA_HEADERS: Final = frozenset(
    {
        *_ONCE,
        "Author",
        "Author-email",
        "Classifier",
        "Description-Content-Type",
        "Dynamic",
        "Keywords",
        "License",
        "License-Expression",
        "License-File",
        "Maintainer",
        "Maintainer-email",
        "Project-URL",
        "Provides-Extra",
        "Requires-Dist",
        "Summary",
    }
)
# Fields of free text, which may contain non-ASCII characters; no installer acts on them.
_TEXTS: Final = frozenset(
    {"Author", "Author-email", "Keywords", "Maintainer", "Maintainer-email", "Summary"}
)
# The allowed values of a field. Installers of wheels ignore Dynamic.
_FIXED: Final = {
    "Metadata-Version": frozenset({"2.4"}),
    "Dynamic": frozenset({"license-file", "provides-extra", "requires-dist"}),
    "Provides-Extra": frozenset(EXTRAS),
}
_WHEEL_HEADERS: Final = frozenset({"Generator", "Root-Is-Purelib", "Tag", "Wheel-Version"})
_WHEEL: Final = {"Wheel-Version": "1.0", "Root-Is-Purelib": "false"}


def find_contradictions(wheel: Wheel, file_name: str) -> Iterator[str]:
    """Describe where name, metadata files and libraries of a wheel contradict each other.

    Raises:
        KernelsError: A part of the wheel cannot be read.
    """
    manifest = read_manifest_in(wheel)
    naming, name = Naming(manifest.product), manifest.product
    named = _NAME.fullmatch(file_name)
    if named is None or named[1] != name:
        yield f"{file_name} is not such a name: {name}-VERSION-{_ANY}-PLATFORM.whl"
        return
    _, version, tags = named.groups()
    infos = [match[1] for name in wheel.names if (match := _INFO.fullmatch(name))]
    if len(infos) != 1:
        yield f"there are {len(infos)} files METADATA, not one"
        return
    (info,) = infos
    told = {
        "the file name": version,
        "dist-info": info.removeprefix(f"{name}-"),
        "_build.json": manifest.package_version,
    }
    text = _read(wheel, info, "METADATA")
    metadata = BytesHeaderParser().parsebytes(text)
    told["METADATA"] = str(metadata.get("Version", ""))
    if len(set(told.values())) != 1:
        listed = ", ".join(f"{what} {one or 'nothing'}" for what, one in told.items())
        yield f"the versions differ: {listed}"
    yield from _find_odd_lines("METADATA", text.partition(b"\n\n")[0], _METADATA_HEADERS)
    yield from _judge_metadata(metadata, manifest)
    yield from _judge_tags(_read(wheel, info, "WHEEL"), tags, manifest)
    if f"{info}.dist-info/top_level.txt" in wheel.names:
        top = _read(wheel, info, "top_level.txt").decode("utf-8", "backslashreplace").split()
        if top != [name]:
            yield f"top_level.txt names {', '.join(top) or 'nothing'}, not {name} alone"
    if f"{info}.dist-info/{SCRIPTS}" in wheel.names:
        points = _read(wheel, info, SCRIPTS).decode("utf-8", "backslashreplace")
        if points != write_entry_points(manifest.scripts, manifest.entry_points):
            plugins = chain.from_iterable(manifest.entry_points.values())
            listed = ", ".join((*manifest.scripts, *plugins)) or "none"
            yield f"{SCRIPTS} does not name the scripts and plug-ins of _build.json alone: {listed}"
    members = naming.members(manifest)
    floor, needed = read_floor(file_name), max(find_glibc(wheel, members), default=0)
    if floor is not None and needed > floor:
        yield f"the code needs glibc 2.{needed}, the file name promises 2.{floor}"
    for member, symbol in find_python(wheel, members):
        yield f"{member} has the symbol {symbol} of Python, the tag {_ANY} promises none"


def _read(wheel: Wheel, info: str, name: str) -> bytes:
    return wheel.read(f"{info}.dist-info/{name}")


def _find_odd_lines(name: str, text: bytes, allowed: frozenset[str]) -> Iterator[str]:
    """Describe the header lines that our builds never write."""
    for line in text.rstrip(b"\n").split(b"\n"):
        match = _HEADER.fullmatch(line.decode("latin-1"))
        known = match[1] in allowed if match else _is_text(line)
        if not known:
            shown = line.decode("utf-8", "backslashreplace")[:_SHOWN]
            yield f"{name} has a line that no build of this package writes: {shown}"


def _is_text(line: bytes) -> bool:
    """Tell if a line is a field of free text, all printable and without encoded words."""
    name, _, value = line.decode("utf-8", "surrogateescape").partition(": ")
    return name in _TEXTS and "=?" not in value and value.isprintable() and value == value.strip()


def _judge_metadata(metadata: Message, manifest: Manifest) -> Iterator[str]:
    for header in _ONCE:
        count = len(metadata.get_all(header, []))
        if count != 1:
            yield f"METADATA has {count} lines {header}, not one"
    fixed = {**_FIXED, "License-File": frozenset(manifest.licenses)}
    for header, allowed in fixed.items():
        for value in sorted({str(one) for one in metadata.get_all(header, [])} - allowed):
            ours = " or ".join(sorted(allowed))
            yield f"METADATA says {header}: {value[:_SHOWN]}, builds of this package write {ours}"
    if package_of(str(metadata.get("Name"))) != manifest.product:
        yield f"METADATA is of {metadata.get('Name')}, not of {manifest.product}"
    python = str(metadata.get("Requires-Python", ""))
    if python != PYTHON:
        yield f"METADATA is for Python {python or 'of any version'}, not {PYTHON}"
    provided = metadata.get_all("Provides-Extra", [])
    extras = extra_requirements() if provided else ()
    wanted = {_normalise(one) for one in (*requirements_of(manifest), *extras)}
    found = [_normalise(str(one)) for one in metadata.get_all("Requires-Dist", [])]
    for one in sorted(set(found) - wanted):
        yield f"METADATA requires {one}, which a wheel with this _build.json does not"
    for one in sorted(wanted - set(found)):
        yield f"METADATA does not require {one}"
    if len(found) != len(set(found)) or len(provided) != len(set(provided)):
        yield "METADATA requires something twice"


def _normalise(text: str) -> str:
    try:
        return str(Requirement(text))
    except InvalidRequirement:
        return text


def _judge_tags(text: bytes, tags: str, manifest: Manifest) -> Iterator[str]:
    yield from _find_odd_lines("WHEEL", text, _WHEEL_HEADERS)
    headers = BytesHeaderParser().parsebytes(text)
    for header, wanted in _WHEEL.items():
        found = headers.get_all(header, [])
        if found != [wanted]:
            yield f"WHEEL says {header}: {', '.join(found) or 'nothing'}, not {wanted}"
    # Invalid lines are not expanded: a short line can expand to millions of tags.
    told = {
        str(tag)
        for line in read_tags(text)
        for tag in (parse_tag(line) if _TAG.fullmatch(line) else (line,))
    }
    named = set(map(str, parse_tag(tags)))
    if told != named:
        listed = ", ".join(sorted(told)) or "no tag"
        yield f"the file name has the tags {', '.join(sorted(named))}, WHEEL has {listed}"
    machine = manifest.arch_set.machine
    for tag in sorted(named):
        if not tag.endswith(f"_{machine}"):
            yield f"the tag {tag} is not for {machine}, which _build.json is for"
