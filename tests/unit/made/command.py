"""Runs a subcommand within a test, and returns its output."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from flash_dist.toolkit.cli import main

if TYPE_CHECKING:
    import pytest


class Printed(NamedTuple):
    """The output of one command."""

    out: str
    err: str


class Cli:
    """The command line: `cli("inspect", path, status=2).err`."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def run(self, *words: object) -> tuple[int, str, str]:
        """Run a command; return its status and its output on stdout and stderr."""
        status = main([str(word) for word in words])
        return (status, *self._capsys.readouterr())

    def __call__(self, *words: object, status: int = 0) -> Printed:
        """Run a command, check its status, and return its output."""
        ended, out, err = self.run(*words)
        assert ended == status, f"status {ended} instead of {status}\n{out}{err}"
        return Printed(out, err)
