"""Sessions of nox for a project that builds its kernels with this toolkit.

`from fatwheel.sessions import *` in its noxfile.py, and `nox -l` lists them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nox

try:
    from .make.project import ROOT, build_folder, stage_toolkit
    from .make.sessions import (
        add_channels,
        built_wheels,
        copy_tree,
        install,
        install_toolchain,
        install_wheel,
        require_wheels,
        run_session,
        session_of,
        set_names,
        share_links,
    )
except ValueError as error:  # a table with an error
    sys.exit(f"error: {error}")

__all__ = ["audit", "build_wheels", "manifest", "repro", "tests"]

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["build_wheels", "tests"]
share_links()

_MODULE = __package__ or ""


def _use_toolkit(session: nox.Session) -> None:
    """Let a session run the toolkit that the noxfile has imported, and nothing beside it."""
    session.env["PYTHONPATH"] = str(stage_toolkit(build_folder()).parent)


@session_of
def build_wheels(session: nox.Session) -> None:
    """Build and audit wheels in dist/<set>/: `-- SET ...`; by default every set.

    This machine's g++ compiles: the wheels are for its glibc and newer ones.
    """
    _use_toolkit(session)
    names = set_names(session)
    install_toolchain(session, *names)
    session.run("python", "-m", f"{_MODULE}.make.building.build_wheels", *names)


@session_of
def tests(session: nox.Session) -> None:
    """Install a wheel of dist/ and run the tests in tests/: `-- [WHEEL] [PYTEST ARGUMENTS]`."""
    given = list(session.posargs)
    wheels = [given.pop(0)] if given and given[0].endswith(".whl") else built_wheels()[:1]
    if not wheels:
        require_wheels(session)
    install(session, "runtime", "test")
    install_wheel(session, wheels[0])
    session.chdir(session.create_tmp())  # the wheel, not the sources
    folder = str(ROOT / "tests")
    session.run("python", "-m", "pytest", "--import-mode=importlib", folder, *given)


@session_of
def audit(session: nox.Session) -> None:
    """Audit the wheels in dist/, or others: `-- WHEEL ...`."""
    _use_toolkit(session)
    if not session.posargs:
        require_wheels(session)
    install(session, "runtime")
    session.run("python", "-m", _MODULE, "audit", *(session.posargs or built_wheels()))


@session_of
def repro(session: nox.Session) -> None:
    """Build in two folders and compare the bytes: `-- [--native] SET ...`."""
    install(session, "runtime", "audit")
    dists = []
    for place in ("one", "another-place"):
        tree = Path(session.create_tmp()) / place / ROOT.name
        copy_tree(session, tree)
        run_session(session, "build_wheels", *session.posargs, tree=tree)
        dists.append(str(tree / "dist"))
    _use_toolkit(session)
    session.run("python", "-m", f"{_MODULE}.make.wheels.repro", *dists)


@session_of
def manifest(session: nox.Session) -> None:
    """Verify the wheels in dist/, and write manifest.json, SHA256SUMS and provenance/ there."""
    _use_toolkit(session)
    install(session, "runtime", "index")
    session.run("python", "-m", f"{_MODULE}.make.release.manifest", *session.posargs)


add_channels(_use_toolkit)
