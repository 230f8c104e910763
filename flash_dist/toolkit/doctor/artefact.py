"""Fetches a file, or the best wheel of an index page, and deletes the download after use."""

from __future__ import annotations

import errno
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ..binaries.files import open_file
from ..builds.published import MACHINES
from ..errors import FetchError
from ..findings.result import CheckResult
from ..indexes.candidates import read_offer
from ..indexes.credentials import without_credentials
from ..indexes.digests import parse_digest, require_digest
from ..indexes.fetch import is_page, is_url, last_part, local_path, open_url, read_page, save
from ..indexes.index import PROJECT, Index, make_index, read_index
from ..indexes.patience import Patience
from ..indexes.requirement import Pinned, read_line
from ..indexes.selection import select
from ..product import NAME, PROGRAM
from ..targets.archs import DEFAULT_MACHINE
from ..targets.wording import count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..checks.environment import Environment
    from ..indexes.fetch import Progress, Response
    from ..indexes.index import IndexedWheel
    from ..indexes.selection import Judged

_SHOWN = 200


@dataclass(frozen=True)
class Artefact:
    """The file to judge; for an index page, also a result that lists the page's wheels."""

    path: Path
    listing: CheckResult | None = None


@contextmanager
def at_hand(place: str, environment: Environment, *, progress: Progress) -> Iterator[Artefact]:
    """Provide the path of an artefact; after the block, delete what was downloaded for it.

    Args:
        place: A path, an address of a file or of an index page, or an install line for pip or uv.
        environment: The machine whose GPUs decide which wheel of an index page is chosen.
        progress: Called with the number of bytes received, and the total or None.

    Raises:
        FatbinError: There is no such file, or it cannot be read.
        FetchError: The file or page cannot be fetched, the file differs from its hash, or no wheel
            on the page fits.
        UsageError: The install line does not name exactly one version, or names no index.
    """
    pinned = read_line(place)
    wanted = pinned if isinstance(pinned, Pinned) else None
    place = wanted.index if wanted else place
    place = without_credentials(place) if is_url(place) else place
    path = local_path(place) if is_url(place) else Path(place)
    digest = parse_digest(urlsplit(place).fragment) if is_url(place) else ""
    if wanted and path is not None:
        path = path if path.suffix == ".html" else path / "index.html"
    if path is not None and path.suffix != ".html":
        if not path.is_dir():
            open_file(path).close()  # report unreadable files before anything is judged
        require_digest(path, digest, path.name)
        yield Artefact(path)
        return
    with tempfile.TemporaryDirectory(prefix=f"{NAME}-") as folder:
        if path is None:
            found = _fetch(place, environment, Path(folder), progress, wanted)
            require_digest(found.path, digest, found.path.name)
            yield found
        else:
            index = _narrow(read_index(str(path), None), wanted)
            yield _fetch_best(index, environment, Path(folder), progress)


def _narrow(index: Index, wanted: Pinned | None) -> Index:
    """Keep only the wheels of the project and version that an install line names."""
    if wanted is None:
        return index
    name, version = wanted.project, wanted.version
    found = tuple(one for one in index.wheels if (one.project, one.version) == (name, version))
    if not found:
        message = f"`{index.place}` has no wheel of {name} {version}"
        raise FetchError(message, hint=f"`{PROGRAM} doctor --wheel {index.place}` lists")
    return Index(index.place, found, index.packages)


def _fetch(
    place: str,
    environment: Environment,
    folder: Path,
    progress: Progress,
    wanted: Pinned | None = None,
) -> Artefact:
    patience = Patience.of_file()
    with open_url(place, patience=patience) as response:
        if not is_page(response):
            return Artefact(_save(response, place, folder, progress, patience))
        index = make_index(place, read_page(response), response.url)
    if not index.wheels:  # an index address: its project pages are one level below
        index = read_index(place, wanted.project if wanted else PROJECT)
    return _fetch_best(_narrow(index, wanted), environment, folder, progress)


def _fetch_best(
    index: Index, environment: Environment, folder: Path, progress: Progress
) -> Artefact:
    wheel, problems = _choose(index, environment)
    details = (*_list(index, wheel), *problems)
    total = count(len(index.wheels), "wheel")
    summary = f"{total} on {index.place}; judged: {wheel.file_name}"
    listing = CheckResult("ok", summary, details, name="index")
    path = Path(wheel.location)
    if not wheel.is_local:
        patience = Patience.of_file()
        with open_url(wheel.location, patience=patience) as response:
            path = _save(response, wheel.location, folder, progress, patience)
    require_digest(path, wheel.digest, wheel.file_name)
    return Artefact(path, listing)


def _choose(index: Index, environment: Environment) -> tuple[IndexedWheel, tuple[str, ...]]:
    """Choose a wheel of this package by the GPUs, else the newest wheel for this Python and system.

    Returns:
        The wheel, and sentences on the wheels that were left out.
    """
    python, here = environment.python.partition(" ")[0], not environment.what_if
    own = [wheel for wheel in index.wheels if wheel.project == PROJECT]
    if own:
        machine = environment.machine if environment.machine in MACHINES else DEFAULT_MACHINE
        offer = read_offer(
            Index(index.place, tuple(own)), machine=machine, python=python, here=here
        )
        cuda = environment.cuda
        selection = select((gpu.device for gpu in cuda.gpus), cuda.driver, offer.candidates)
        best = selection.chosen or max(selection.candidates, key=_fitness, default=None)
        if best is not None and best.candidate.wheel is not None:
            return best.candidate.wheel, offer.problems
    fitting = [
        wheel
        for wheel in index.wheels
        if wheel.fits(python, here=here) and wheel.runs_on(environment.machine)
    ]
    if not fitting:
        whom = "this Python and system" if here else f"Python {python} on {environment.machine}"
        kind = f"none is for {whom}" if index.wheels else "there is none"
        message = f"no wheel on `{index.place}` can be judged: {kind}"
        raise FetchError(message, hint="name the address of a wheel")
    newest = max(fitting, key=lambda wheel: (not wheel.version.is_prerelease, wheel.version))
    return newest, ()


def _fitness(judged: Judged) -> tuple[int, int]:
    """Return a sort key: the largest belongs to the wheel that serves the most GPUs."""
    return sum(map(bool, judged.verdicts)), -judged.weight


def _list(index: Index, chosen: IndexedWheel) -> Iterator[str]:
    for wheel in index.wheels[:_SHOWN]:
        yield f"{'*' if wheel.file_name == chosen.file_name else ' '} {wheel.file_name}"
    if len(index.wheels) > _SHOWN:
        yield f"  and {len(index.wheels) - _SHOWN} more"


def _save(
    response: Response, place: str, folder: Path, progress: Progress, patience: Patience
) -> Path:
    """Save a download under the name in its address, which tells what kind of file it is."""
    path = folder / (last_part(place).replace("\x00", "") or "download")
    try:
        with path.open("wb") as file:
            save(response, file, progress=progress, patience=patience)
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT}:
            raise  # a network error; only errors of the disk are explained here
        message = f"cannot save `{place}`: {error.strerror}"
        raise FetchError(message, hint="set TMPDIR to another folder") from error
    return path
