"""The names of the sessions of nox."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from flash_dist.toolkit.make.project import ROOT, TOOLKIT
from flash_dist.toolkit.make.release.channels import CHANNELS

if TYPE_CHECKING:
    from pathlib import Path

SHARED = TOOLKIT / "make" / "shared_sessions.py"


def own_sessions() -> set[str]:
    """Return the sessions of this repository."""
    return _read(ROOT / "noxfile.py") | _read(SHARED) | CHANNELS.keys()


def every_project() -> set[str]:
    """Return the sessions that any project can import."""
    return _read(TOOLKIT / "sessions.py") | _read(SHARED) | CHANNELS.keys()


def _read(path: Path) -> set[str]:
    """Return the functions of a module that are sessions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any("session" in ast.unparse(one) for one in node.decorator_list)  # or gpu_session
    }
