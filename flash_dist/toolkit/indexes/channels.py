"""Packages made from a wheel for channels such as conda: their names and install commands.

A channel that a page may link to has a class here and a row in READERS.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import urljoin

from .fetch import last_part, local_path

if TYPE_CHECKING:
    from collections.abc import Callable

    from packaging.version import Version

    from .pages import Link

_CONDA: Final = re.compile(r"(?P<name>.+)-(?P<version>[^-]+)-(?P<build>[^-]+)\.conda")
_SUBDIR: Final = re.compile(r"noarch|(linux|osx|win)-[a-z0-9_]+")


class Package(Protocol):
    """A package that holds the files of a wheel."""

    @property
    def name(self) -> str:
        """Name of the project."""

    @property
    def tool(self) -> str:
        """The name of the installer."""

    @property
    def line(self) -> str:
        """The command that installs the package."""

    def holds(self, version: Version, toolkit: str, label: str) -> bool:
        """Tell if the package holds the wheel of this version, CUDA toolkit and arch set."""


@dataclass(frozen=True)
class CondaPackage:
    """A conda package, as described by its name and folder."""

    name: str
    version: str
    build: str
    channel: str  # path or address
    tool: str = "conda"

    @property
    def spec(self) -> str:
        """The spec of exactly this package."""
        return f"{self.name}={self.version}={self.build}"

    @property
    def line(self) -> str:
        """Return the install command. It also names conda-forge, which has pytorch."""
        return f'conda install -c {shlex.quote(self.channel)} -c conda-forge "{self.spec}"'

    def holds(self, version: Version, toolkit: str, label: str) -> bool:
        """Tell if the version matches, and the build string names this toolkit and arch set."""
        build = f"cuda{toolkit.replace('.', '')}_{label.replace('.', '_')}_[0-9]+"
        return self.version == version.public and re.fullmatch(build, self.build) is not None


def parse_conda(link: Link) -> CondaPackage | None:
    """Parse a link to a conda package; None for another name or a folder that no channel has."""
    match = _CONDA.fullmatch(link.file_name)
    folder = urljoin(link.url, ".")
    if match is None or not _SUBDIR.fullmatch(last_part(folder)):
        return None
    channel = urljoin(folder, "..").rstrip("/")
    path = local_path(channel)
    return CondaPackage(
        match["name"], match["version"], match["build"], channel if path is None else str(path)
    )


READERS: Final[dict[str, Callable[[Link], Package | None]]] = {".conda": parse_conda}


def parse_package(link: Link) -> Package | None:
    """Parse the name of a package of any known channel; None for other names."""
    read = READERS.get(PurePosixPath(link.file_name).suffix)
    return None if read is None else read(link)
