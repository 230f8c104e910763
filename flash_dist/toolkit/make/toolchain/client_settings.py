"""Reads the settings of pip and uv for indexes and folders of wheels, from inside a build.

An isolated build of pip hides pip's own environment. So a separate process reads the settings and
packages of that environment.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

PYPI = "https://pypi.org/simple"
OFFLINE = ("PIP_NO_INDEX", "UV_OFFLINE")  # variables that forbid the use of an index

_FIND_TORCH = """
import importlib.metadata, importlib.util
found = importlib.util.find_spec("torch")
if found is not None and found.submodule_search_locations:
    print(importlib.metadata.version("torch"), found.submodule_search_locations[0])
"""


def find_links(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the folders and pages that pip and uv search for wheels in addition to the index."""
    named = f"{environ.get('PIP_FIND_LINKS', '')} {environ.get('UV_FIND_LINKS', '')}"
    return f"{named} {read_setting('find-links')}".replace(",", " ").split()


def index_url(environ: Mapping[str, str] = os.environ) -> str:
    """Return the URL of the package index: from variables of pip or uv, pip's settings, or PyPI."""
    names = ("PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL")
    named = next((environ[name] for name in names if environ.get(name)), "")
    return (named or read_setting("index-url") or PYPI).rstrip("/")


def find_offline(environ: Mapping[str, str] = os.environ) -> str:
    """Return the variable that forbids pip or uv to use an index; empty if none does."""
    no = {"", "0", "false", "no", "off"}
    return next((name for name in OFFLINE if environ.get(name, "").lower() not in no), "")


def read_setting(name: str) -> str:
    """Read one of pip's settings from its files; empty without pip, or without the setting."""
    return _ask_python(["-m", "pip", "config", "get", f"global.{name}"]).strip()


def find_torch() -> tuple[str, Path] | None:
    """Return version and folder of the torch in pip's own environment; None if there is none."""
    version, _, folder = _ask_python(["-c", _FIND_TORCH]).strip().partition(" ")
    return (version, Path(folder)) if folder else None


def find_own_torch() -> tuple[str, Path] | None:
    """Return version and folder of the torch that this Python finds, even in an isolated build."""
    found = find_spec("torch")
    if found is None or not found.submodule_search_locations:
        return None
    return importlib.metadata.version("torch"), Path(found.submodule_search_locations[0])


def _ask_python(words: list[str]) -> str:
    hiding = {"PYTHONPATH", "PYTHONNOUSERSITE"}  # with these, pip hides its environment from builds
    environ = {name: value for name, value in os.environ.items() if name not in hiding}
    command = [sys.executable, *words]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environ, timeout=60
    )
    return done.stdout if done.returncode == 0 else ""
