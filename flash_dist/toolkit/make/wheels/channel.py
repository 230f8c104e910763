"""What a way to publish has to have, and what it says of the files that it made.

The ways themselves are rows of `make/release/channels.py`.
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
    """A file that a channel made, and that was held against what it was made of."""

    path: Path
    wheel: Artefact | None = None  # whose files it holds
    told: Mapping[str, Any] = field(default_factory=dict)  # what manifest.json says of its kind


def no_files(dist: Path, artefacts: Sequence[Artefact]) -> tuple[Published, ...]:
    """Stand for `check` where nothing is published beside the wheels."""
    del dist, artefacts
    return ()


def no_commands(address: str) -> tuple[Command, ...]:
    """Stand for `commands` where the index has nothing to tell of a file."""
    del address
    return ()


class Channel(Protocol):
    """What the module of a channel has."""

    def main(self) -> int:
        """Write it anew into dist/, and tell what was written."""

    def check(self, dist: Path, artefacts: Sequence[Artefact]) -> Sequence[Published]:
        """Return its files beside the wheels, empty where it was not written.

        Raises:
            KernelsError: They are not what `main` writes.
        """

    def commands(self, address: str) -> Iterable[Command]:
        """Yield what installs a file, which the index serves at this address."""
