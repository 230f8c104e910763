"""Commands that install a chosen set, with pip, uv, and installers such as conda."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import errors
from ..builds.linkage import has_shared_runtime
from ..builds.published import published_sets
from ..product import VARIABLES
from ..targets.advice import pip_install, sources
from ..targets.archs import DEFAULT_MACHINE
from ..targets.index_address import index_of_set

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ..targets.archs import ArchSet
    from .channels import Package
    from .index import Index, IndexedWheel
    from .selection import Candidate


@dataclass(frozen=True)
class Command:
    """A command that builds or installs a wheel or package."""

    tool: str  # "build", "pip", "uv", or an installer such as "conda"
    line: str

    def to_json(self) -> dict[str, str]:
        """Return the command as plain data."""
        return {"tool": self.tool, "line": self.line}


def find_commands(
    candidate: Candidate, index: Index | None, *, release: str = "", installed: str = ""
) -> tuple[Command, ...]:
    """Return the commands for a set.

    If no index has the set's wheel, the commands build the wheel in a clone. Outside a clone, they
    use the project's index, or build the sources. PyPI cannot have the wheel: PyPI rejects versions
    such as `0.1.0+cu130.hopper`.

    Args:
        candidate: The set.
        index: The index that has the wheel of the set; None if none has.
        release: The version to install if there is no index.
        installed: The installed version; empty if there is none.
    """
    wheel = candidate.wheel
    if wheel is None:
        return _build(candidate) if errors.IN_CHECKOUT else _fetch(candidate, release)
    if wheel.index:
        named = tuple(_from_index(wheel, stays=_stays(installed, wheel)))
    else:
        # The hash that the page states is part of the address, so that pip and uv check it.
        hashed = wheel.digest and not wheel.is_local
        place = shlex.quote(f"{wheel.location}#{wheel.digest}" if hashed else wheel.location)
        named = (Command("pip", f"pip install {place}"), Command("uv", f"uv pip install {place}"))
    return (*named, *_other_commands(wheel, index.packages if index else ()))


def _build(candidate: Candidate) -> tuple[Command, ...]:
    files = f"dist/{candidate.name}/*.whl"
    return (
        Command("build", f"nox -s {_published(candidate).session} -- {candidate.name}"),
        Command("pip", f"pip install {files}"),
        Command("uv", f"uv pip install {files}"),
    )


def _fetch(candidate: Candidate, release: str) -> tuple[Command, ...]:
    archset = _published(candidate)
    index = index_of_set(archset.name)
    fetched = (
        Command("pip", pip_install(archset, release)),
        Command("uv", f'uv pip install "{archset.pin(release)}" --index {index}'),
    )
    if archset.machine != DEFAULT_MACHINE or has_shared_runtime(archset.toolkit):
        return fetched  # pip builds only for x86_64, with a CUDA toolkit from PyPI
    line = f"{VARIABLES}ARCH_SET={archset.name} pip install {sources(release)}"
    return (*fetched, Command("build", line))


def _published(candidate: Candidate) -> ArchSet:
    return next(one for one in published_sets() if one.name == candidate.name)


def _stays(installed: str, wheel: IndexedWheel) -> bool:
    """Tell if pip and uv would keep the installed version: `0.1.0+cu130` satisfies `==0.1.0`."""
    version, _, label = installed.partition("+")
    return bool(label) and version == str(wheel.version)


def _from_index(wheel: IndexedWheel, *, stays: bool) -> Iterator[Command]:
    """Yield commands that pin the version, and take torch from the default index.

    `==` with a local version names exactly this wheel: PyPI rejects such versions, so no package
    there can replace it.
    """
    index = shlex.quote(wheel.index)
    force = " --force-reinstall --no-deps" if stays else ""
    yield Command("pip", f'pip install "{_pin(wheel)}" --extra-index-url {index}{force}')
    force = f" --reinstall-package {wheel.project}" if stays else ""
    yield Command("uv", f'uv pip install "{_pin(wheel)}" --index {index}{force}')


def _pin(wheel: IndexedWheel) -> str:
    return f"{wheel.project.replace('-', '_')}=={wheel.version}"


def _other_commands(wheel: IndexedWheel, packages: Iterable[Package]) -> Iterator[Command]:
    """Yield the commands of channels such as conda that have a package of this wheel."""
    told: set[str] = set()
    for one in packages:
        if one.tool not in told and one.holds(wheel.version, wheel.toolkit, wheel.label):
            told.add(one.tool)
            yield Command(one.tool, one.line)
