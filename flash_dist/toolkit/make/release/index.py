"""Make a static package index of the wheels in dist/: `nox -s index`.

    OUT/index.html              for people: which file for which GPU, and how to install it
    OUT/packages/               the wheels, and the METADATA of each next to it (PEP 658)
    OUT/<channel>/              another channel that the page links to, if it was made
    OUT/simple/                 the default index: the set for clients that ask for none,
                                one set for each kind of CPU
    OUT/<set>/                  the index of one arch set
    OUT/<...>/<project>/        index.html (PEP 503), index.json (PEP 691), with relative links

The same wheels give the same bytes. Any file server can serve the folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, urlsplit

from simple_repository.model import File, Meta, ProjectDetail, ProjectList, ProjectListElement
from simple_repository.serializer import SerializerHtmlV1, SerializerJsonV1

from ...builds.metadata import PYTHON
from ...builds.published import pick_for
from ...errors import UsageError
from ...indexes.index import PROJECT
from ...targets.archs import SESSIONS
from ...targets.index_address import INDEX
from ..command import command
from ..project import ARCHSETS, ROOT
from ..wheels.artefacts import Artefact, ArtefactError, find_artefacts
from ..wheels.channel import no_commands, no_files
from .channels import CHANNELS, Row, find_published
from .landing import Offer, make_page

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


DEFAULT: Final = "simple"
PACKAGES: Final = "packages"
LOCAL_URL: Final = "http://127.0.0.1:8000/"
_META: Final = Meta("1.1")
_HTML: Final = SerializerHtmlV1()
_JSON: Final = SerializerJsonV1()


def write_index(
    out: Path,
    artefacts: Sequence[Artefact],
    url: str,
    *,
    partial: bool,
    offers: Sequence[Offer] = (),
) -> list[str]:
    """Write the folder: the wheels, the indexes and the page.

    Args:
        out: The folder, whose contents are deleted.
        artefacts: The wheels.
        url: The future address of the folder, for the commands on the page.
        partial: Go on without the default index when its set was not built.
        offers: Files of other channels; their folders are copied.

    Returns:
        The names of the indexes, the default index first.
    """
    groups = {name: list(_of_set(artefacts, name)) for name in _set_names(artefacts)}
    default = pick_default(artefacts, partial=partial)
    if default:
        groups = {DEFAULT: default, **groups}
    work = out.with_name(f"{out.name}.part")
    shutil.rmtree(work, ignore_errors=True)
    _write_packages(work / PACKAGES, artefacts)
    for name, members in groups.items():
        write_simple(work / name, [_make_file(one) for one in members])
    sets = {name: _set_names(members) for name, members in groups.items()}
    for folder in sorted({offer.folder for offer in offers}):
        shutil.copytree(folder, work / folder.name)
    page = make_page(artefacts, sets, url, default=DEFAULT, offers=offers)
    (work / "index.html").write_text(page, encoding="utf-8")
    shutil.rmtree(out, ignore_errors=True)
    work.rename(out)
    return list(groups)


def pick_default(artefacts: Sequence[Artefact], *, partial: bool) -> list[Artefact]:
    """Return the wheels of the default index, for each kind of CPU of these wheels.

    Args:
        artefacts: The wheels.
        partial: Return an empty list, instead of raising, if a wheel is missing.

    Raises:
        ArtefactError: A wheel is missing.
    """
    names, found = _set_names(artefacts), list[Artefact]()
    for machine in _machines(artefacts):
        pick = pick_name(machine)
        if pick in names:
            found += _of_set(artefacts, pick)
        elif partial:
            return []
        else:
            message = (
                f"on {machine} the default index is of the set `{pick}`, and dist/ holds no wheel "
                "of it"
            )
            hint = f"`nox -s {SESSIONS[machine]} -- {pick}`, or `-- --partial` for a trial"
            raise ArtefactError(message, hint=hint)
    return found


def pick_name(machine: str) -> str:
    """Return the name of the default index's set for a kind of CPU.

    Raises:
        ArtefactError: `picks` names different sets for pip and uv, which read the same index.
    """
    names = {pick_for(client, ARCHSETS, machine).name for client in ("pip", "uv")}
    if len(names) != 1:
        message = f"pip and uv read one index, and `picks` gives them {sorted(names)}"
        raise ArtefactError(message)
    return names.pop()


def _machines(artefacts: Iterable[Artefact]) -> list[str]:
    """Return the kinds of CPU that these wheels are for, x86_64 before aarch64."""
    return sorted({one.manifest.arch_set.machine for one in artefacts}, reverse=True)


def _set_names(artefacts: Iterable[Artefact]) -> list[str]:
    return sorted({one.set_name for one in artefacts})


def _of_set(artefacts: Iterable[Artefact], name: str) -> Iterable[Artefact]:
    return (one for one in artefacts if one.set_name == name)


def _write_packages(folder: Path, artefacts: Iterable[Artefact]) -> None:
    folder.mkdir(parents=True)
    for one in artefacts:
        shutil.copyfile(one.path, folder / one.file_name)
        (folder / f"{one.file_name}.metadata").write_bytes(one.metadata.text)


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write one index, and put its files next to the project's page, which links to them."""
    write_simple(
        folder,
        [
            File(
                name,
                quote(name),
                {"sha256": hashlib.sha256(data).hexdigest()},
                requires_python=PYTHON,
                size=len(data),
            )
            for name, data in files.items()
        ],
    )
    for name, data in files.items():
        (folder / PROJECT / name).write_bytes(data)


def write_simple(folder: Path, files: Sequence[File]) -> None:
    """Write one index: its root page, which lists one project, and the project's page."""
    project = folder / PROJECT
    project.mkdir(parents=True)
    projects = ProjectList(_META, frozenset({ProjectListElement(PROJECT)}))
    detail = ProjectDetail(_META, PROJECT, tuple(files))
    for place, html, text in (
        (folder, _HTML.serialize_project_list(projects), _JSON.serialize_project_list(projects)),
        (project, _HTML.serialize_project_page(detail), _JSON.serialize_project_page(detail)),
    ):
        (place / "index.html").write_text(f"{html}\n", encoding="utf-8")
        (place / "index.json").write_text(_in_order(text), encoding="utf-8")


def _make_file(one: Artefact) -> File:
    """Describe a wheel; in its link, `+` is `%2B`, as some file servers read `+` as a blank."""
    return File(
        one.file_name,
        f"../../{PACKAGES}/{quote(one.file_name)}",
        {"sha256": one.sha256},
        requires_python=one.requires_python or None,
        dist_info_metadata={"sha256": hashlib.sha256(one.metadata.text).hexdigest()},
        size=one.size,
    )


def _in_order(text: str) -> str:
    """Return the JSON text with its list of versions sorted."""
    data = json.loads(text)
    if "versions" in data:
        data["versions"].sort()
    return json.dumps(data, indent=1) + "\n"


def _parse_url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.netloc or parts.query or parts.fragment:
        message = f"--url is the http or https address of the folder, got `{text}`"
        raise UsageError(message, hint=f"such as `--url {INDEX}`")
    return f"{text.rstrip('/')}/"


def find_offers(
    dist: Path, artefacts: Sequence[Artefact], rows: Sequence[Row], url: str
) -> list[Offer]:
    """Return the files that channels made from the wheels, as served by the index.

    Raises:
        KernelsError: A channel differs from the output of its session.
    """
    found = []
    for row, file in find_published(dist, artefacts, rows):
        if file.wheel is not None:
            place = file.path.relative_to(dist).as_posix()
            told = tuple(row.load().commands(f"{url}{quote(place)}"))
            found.append(Offer(row.name, dist / row.name, place, file.wheel.file_name, told))
    return found


check = no_files  # the index consists of the wheels themselves
commands = no_commands  # pip's and uv's commands are the same for all wheels


@command
def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="nox -s index --", description="Make a package index.")
    parser.add_argument("--url", default=LOCAL_URL, help="where it will be served from")
    parser.add_argument(
        "--partial", action="store_true", help="go on without the set of the default index"
    )
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of the wheels")
    parser.add_argument("--out", type=Path, help="folder of the index (DIST/index)")
    args = parser.parse_args()
    out = args.out or args.dist / "index"
    artefacts = find_artefacts(args.dist)
    url, linked = _parse_url(args.url), [row for row in CHANNELS.values() if row.linked]
    offers = find_offers(args.dist, artefacts, linked, url)
    names = write_index(out, artefacts, url, partial=args.partial, offers=offers)
    for name in names:
        print(f"index   {url}{name}/")
    made = {offer.channel for offer in offers}
    for row in linked:
        none = f"none: `nox -s {row.name}` makes a channel"
        print(f"{row.name:<7} {f'{url}{row.name}' if row.name in made else none}")
    print(f"page    {out / 'index.html'}")
    print(f"serve   python -m http.server --bind 127.0.0.1 --directory {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
