"""Pythons of this machine, found by uv: on PATH, uv's own, and pyenv's that no shim points at."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from ci.trials.cells import NotRunError


def find_python(version: str) -> Path:
    """Return the interpreter of one version, `3.13`; nothing is downloaded.

    Raises:
        NotRunError: This machine has none.
    """
    command = ["uv", "python", "find", "--no-project", "--no-python-downloads", f"=={version}.*"]
    done = subprocess.run(
        command,
        env={**os.environ, "PATH": _search_path(), "UV_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        message = f"there is no Python {version} on this machine"
        raise NotRunError(message)
    return Path(done.stdout.strip())


def _search_path() -> str:
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    folders = [str(path) for path in sorted(root.glob("versions/*/bin"))]
    return os.pathsep.join([os.environ.get("PATH", os.defpath), *folders])
