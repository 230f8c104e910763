"""Skips building, auditing and testing a wheel that would come out the same.

Builds are reproducible (`nox -s repro`): equal sources, image and settings give equal bytes. A note
beside the objects records the inputs of a wheel.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ..wheels.repro import digest_file, digest_files
from .settings import PASSED

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True)
class Note:
    """Inputs of a wheel, and its file."""

    inputs: str  # SHA-256 of sources, image and settings
    name: str
    sha256: str


def digest_inputs(tree: Path, image: str, environ: Mapping[str, str]) -> str:
    """Return the SHA-256 of all inputs of a build.

    Args:
        tree: The sources for the container.
        image: Identifier of the image.
        environ: The environment of cibuildwheel, of which the build's variables count.
    """
    settings = {
        name: value for name, value in environ.items() if name in PASSED or name.startswith("CIBW_")
    }
    text = json.dumps([image, settings, digest_files(tree)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def find_unchanged(note: Path, inputs: str, folder: Path) -> Path | None:
    """Return the wheel in a folder if it was made from these inputs and is unchanged."""
    try:
        made = Note(**json.loads(note.read_text(encoding="utf-8")))
        wheel = folder / made.name
        same = made == Note(inputs, wheel.name, digest_file(wheel))
    except (OSError, TypeError, ValueError):  # no note, no wheel, or a note with other fields
        return None
    return wheel if same else None


def note_wheel(note: Path, inputs: str, wheel: Path) -> None:
    """Record the inputs of a finished wheel."""
    note.parent.mkdir(parents=True, exist_ok=True)
    made = Note(inputs, wheel.name, digest_file(wheel))
    note.write_text(json.dumps(asdict(made), indent=1) + "\n", encoding="utf-8")
