"""Sessions of nox that every project has: they build, audit and publish wheels."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ..product import PROGRAM
from .project import EMBEDDED, MAKE, build_folder, stage_toolkit
from .sessions import (
    add_channels,
    build,
    build_for,
    built_wheels,
    install,
    require_wheels,
    session_of,
    share_links,
)
from .toolchain.cross import TARGETS

if TYPE_CHECKING:
    import nox

share_links()


def use_toolkit(session: nox.Session) -> None:
    """Let a session run only the toolkit that the noxfile has imported."""
    if not EMBEDDED:
        session.env["PYTHONPATH"] = str(stage_toolkit(build_folder()).parent)


@session_of
def build_wheels(session: nox.Session) -> None:
    """Build and audit wheels in dist/<set>/: `-- [--native] SET ...`; by default every x86_64 set.

    Builds in a manylinux_2_28 container if podman or docker answers, else with this machine's g++.
    """
    use_toolkit(session)
    build(session)


@session_of
def build_arm(session: nox.Session) -> None:
    """Cross-compile and audit the aarch64 wheels in dist/<set>/: `-- [--native] SET ...`.

    Builds in the container of `nox -s image`, else with this machine's cross compiler.
    """
    use_toolkit(session)
    build_for(session, TARGETS["aarch64"])


@session_of(venv_backend="none", default=False)
def image(session: nox.Session) -> None:
    """Build a manylinux_2_28 image without a registry; needs Debian or Ubuntu, root, 6 minutes."""
    session.run(sys.executable, "-m", f"{MAKE}.container.image", external=True)


@session_of
def audit(session: nox.Session) -> None:
    """Audit the wheels in dist/, or other wheels: `-- WHEEL ...`."""
    use_toolkit(session)
    if not session.posargs:
        require_wheels(session)
    install(session, "runtime")
    session.run(*PROGRAM.split(), "audit", *(session.posargs or built_wheels()))


@session_of
def manifest(session: nox.Session) -> None:
    """Verify the wheels in dist/, and write manifest.json, SHA256SUMS and provenance/ there.

    Signs manifest.json and provenance/ if the variable NAME_SIGNING_KEY names a private key.
    """
    use_toolkit(session)
    install(session, "runtime", "index", "sign")
    session.run("python", "-m", f"{MAKE}.release.manifest", *session.posargs)


@session_of(default=False)
def keys(session: nox.Session) -> None:
    """Make a pair of keys for signing releases: `-- FOLDER [--expires DATE]`."""
    use_toolkit(session)
    install(session, "runtime", "sign")
    session.run("python", "-m", f"{MAKE}.release.signing", *session.posargs)


add_channels(use_toolkit)
