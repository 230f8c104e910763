"""Finds a working container engine. A client without an answering daemon does not count."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

from ...errors import KernelsError

if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLE = "CIBW_CONTAINER_ENGINE"  # `podman` or `podman; create_args: ...`
# A running engine prints a version. A docker client without its daemon prints an empty line.
QUESTIONS = {"podman": "{{.Version.Version}}", "docker": "{{.ServerVersion}}"}


class EngineError(KernelsError):
    """A requested engine does not work."""


def find_engine(environ: Mapping[str, str]) -> str | None:
    """Return the engine that the user has named, or else the first that answers; None if none does.

    Raises:
        EngineError: The named engine is unknown or does not answer.
    """
    named = environ.get(VARIABLE, "").partition(";")[0].removeprefix("name:").strip()
    if not named:
        return next((engine for engine in QUESTIONS if answers(engine, environ)), None)
    if named not in QUESTIONS:
        message = f"{VARIABLE} names `{named}`, known are {' and '.join(QUESTIONS)}"
        raise EngineError(message)
    if not answers(named, environ):
        message = f"{VARIABLE} names {named}, and `{named} info` does not answer"
        raise EngineError(message, hint="start it, or build natively: `-- --native`")
    return named


def identify_image(engine: str, image: str, environ: Mapping[str, str]) -> str:
    """Return an image's ID, or its name if the engine does not have it."""
    return inspect_image(engine, image, "{{.Id}}", environ) or image


def inspect_image(engine: str, image: str, question: str, environ: Mapping[str, str]) -> str:
    """Return the engine's answer to a Go template about an image; empty if it has none."""
    command = [engine, "image", "inspect", image, "--format", question]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(environ))
    return done.stdout.strip() if done.returncode == 0 else ""


def answers(engine: str, environ: Mapping[str, str]) -> bool:
    """Tell if an engine prints its version."""
    program = shutil.which(engine, path=environ.get("PATH"))
    if program is None:
        return False
    command = [program, "info", "--format", QUESTIONS[engine]]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=dict(environ), timeout=60
        )
    except (subprocess.TimeoutExpired, OSError):
        return False
    return done.returncode == 0 and bool(done.stdout.strip())
