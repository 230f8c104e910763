"""The jobs of a build are tokens in a named pipe, as in GNU make."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import pytest

from flash_dist.toolkit.make.compile.jobserver import serve_jobs


@pytest.mark.parametrize("jobs", [1, 2, 16])
def test_every_job_but_the_first_is_a_token(jobs: int) -> None:
    with serve_jobs(jobs) as environ:
        found = re.fullmatch(rf" -j{jobs} --jobserver-auth=fifo:(\S+)", environ["MAKEFLAGS"])
        assert found
        pipe = os.open(found[1], os.O_RDONLY | os.O_NONBLOCK)
        try:
            tokens = os.read(pipe, 100) if jobs > 1 else b""
        finally:
            os.close(pipe)
    assert tokens == b"+" * (jobs - 1)
    assert not Path(found[1]).exists()


def test_no_other_variable_says_how_many_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CMAKE_BUILD_PARALLEL_LEVEL", "7")
    with serve_jobs(2) as environ:
        assert "CMAKE_BUILD_PARALLEL_LEVEL" not in environ


def test_a_folder_with_a_blank_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my files"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with serve_jobs(2) as environ:
        assert len(environ["MAKEFLAGS"].split()) == 2
