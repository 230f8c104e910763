"""Interface of a publication channel, and the description of its files.

The channels are rows of `make/release/channels.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from ...indexes.install_commands import Command
    from .artefacts import Artefact


@dataclass(frozen=True)
class Published:
    """A file that a channel made, checked against its source."""

    path: Path
    wheel: Artefact | None = None  # the wheel that it is made from, if any
    told: Mapping[str, Any] = field(default_factory=dict)  # more keys of its entry in manifest.json


def no_files(dist: Path, artefacts: Sequence[Artefact]) -> tuple[Published, ...]:
    """Report no files: the `check` function of channels that add no file to a release."""
    del dist, artefacts
    return ()


def no_commands(address: str) -> tuple[Command, ...]:
    """Return no commands: the `commands` function of channels that need none in the index."""
    del address
    return ()


class Channel(Protocol):
    """Interface of a channel's module."""

    def main(self) -> int:
        """Write the channel into dist/, and print the written files."""

    def check(self, dist: Path, artefacts: Sequence[Artefact]) -> Sequence[Published]:
        """Check and return the channel's files; empty if the channel was not written.

        Raises:
            KernelsError: The files differ from the output of `main`.
        """

    def commands(self, address: str) -> Iterable[Command]:
        """Yield the commands that install the file at this address of the index."""
