"""Sessions of nox for a project that builds its kernels with this toolkit.

Write `from fatwheel.sessions import *` in the project's noxfile.py; `nox -l` lists the sessions.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nox

try:
    from .make.project import MAKE, ROOT
    from .make.sessions import (
        built_wheels,
        copy_tree,
        install,
        install_wheel,
        require_wheels,
        run_session,
        session_of,
    )
    from .make.shared_sessions import (
        audit,
        build_arm,
        build_wheels,
        image,
        keys,
        manifest,
        use_toolkit,
    )
except ValueError as error:  # such as a malformed [tool.kernels] table
    sys.exit(f"error: {error}")

__all__ = ["audit", "build_arm", "build_wheels", "image", "keys", "manifest", "repro", "tests"]

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["build_wheels", "tests"]


@session_of
def tests(session: nox.Session) -> None:
    """Install a wheel of dist/ and run the tests in tests/: `-- [WHEEL] [PYTEST ARGUMENTS]`."""
    given = list(session.posargs)
    wheels = [given.pop(0)] if given and given[0].endswith(".whl") else built_wheels()[:1]
    if not wheels:
        require_wheels(session)
    install(session, "runtime", "test")
    install_wheel(session, wheels[0])
    session.chdir(session.create_tmp())  # so that tests use the wheel, not the sources
    folder = str(ROOT / "tests")
    session.run("python", "-m", "pytest", "--import-mode=importlib", folder, *given)


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
    use_toolkit(session)
    session.run("python", "-m", f"{MAKE}.wheels.repro", *dists)
