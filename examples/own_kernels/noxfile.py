"""`nox -l` lists the sessions: build the wheels, and test one of them."""

from fatwheel.sessions import build_wheels, tests  # noqa: F401
