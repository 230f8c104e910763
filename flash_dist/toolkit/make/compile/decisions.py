"""What the host decides about bits: a committed file, and its hash, which fingerprints are kept by.

How a call is cut into launches, and what a mask's plan looks like, decides in which order kernels
sum. `decisions.json` says what the planner and the masks decide for a fixed table of calls, and
what the table of kernels says. Its hash is in every wheel and in every recorded fingerprint: it
changes when a decision does, and not when code is reworded, moved or formatted.

`nox -s decisions` writes the file (`ci/decisions/decide.py`); builds only read it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...errors import FlashDistError

if TYPE_CHECKING:
    from collections.abc import Mapping

DECISIONS: Final = Path(__file__).resolve().with_name("decisions.json")
REMEDY: Final = "`nox -s decisions` writes it again, without a GPU"

Decisions = dict[str, dict[str, str]]  # part: what is decided, by name


def read_decisions(path: Path = DECISIONS) -> Decisions:
    """Read the committed file.

    Raises:
        FlashDistError: It cannot be read.
    """
    try:
        data: Decisions = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        message = f"`{path}` cannot be read: {error}"
        raise FlashDistError(message, hint=REMEDY) from error
    return data


def write_decisions(path: Path, decisions: Mapping[str, Mapping[str, str]]) -> None:
    """Write one line for each decision, so that a change of one is one line of a diff."""
    path.write_text(json.dumps(decisions, indent=1) + "\n", encoding="utf-8")


def hash_decisions(decisions: Mapping[str, Mapping[str, str]] | None = None) -> str:
    """Return one hash of decisions, by default of the committed ones; their order is no matter."""
    known = read_decisions() if decisions is None else decisions
    return digest(known)


def digest(data: object) -> str:
    """Return the hash of plain data."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def list_changes(
    old: Mapping[str, Mapping[str, str]], new: Mapping[str, Mapping[str, str]]
) -> list[str]:
    """Name the decisions that differ, are missing or are new."""
    return [
        f"{part}: {name}"
        for part in sorted(old.keys() | new.keys())
        for name in sorted(old.get(part, {}).keys() | new.get(part, {}).keys())
        if old.get(part, {}).get(name) != new.get(part, {}).get(name)
    ]
