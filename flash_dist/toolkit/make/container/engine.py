"""Is there a container engine that works? A client whose daemon does not answer is none."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

from ...errors import KernelsError

if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLE = "CIBW_CONTAINER_ENGINE"  # `podman` or `podman; create_args: ...`
# What only an engine that answers can say: a docker client without a daemon prints an empty line.
QUESTIONS = {"podman": "{{.Version.Version}}", "docker": "{{.ServerVersion}}"}


class EngineError(KernelsError):
    """An engine that was asked for and does not work."""


def find_engine(environ: Mapping[str, str]) -> str | None:
    """Return `podman` or `docker`, whichever answers first; the one that the user named, if any."""
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
    """Return an image's ID; its name where the engine has not got it."""
    return inspect_image(engine, image, "{{.Id}}", environ) or image


def inspect_image(engine: str, image: str, question: str, environ: Mapping[str, str]) -> str:
    """Return what the engine answers to a Go template about an image; empty where it has none."""
    command = [engine, "image", "inspect", image, "--format", question]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(environ))
    return done.stdout.strip() if done.returncode == 0 else ""


def answers(engine: str, environ: Mapping[str, str]) -> bool:
    """Whether an engine says its version."""
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
