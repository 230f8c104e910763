"""`nox -l` lists the sessions: build_wheels, tests, audit and the channels."""

from fatwheel.sessions import *  # noqa: F403
