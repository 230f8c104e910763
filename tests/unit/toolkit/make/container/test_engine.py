from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.make.container.engine import VARIABLE, EngineError, answers, find_engine

if TYPE_CHECKING:
    from pathlib import Path

WORKING = "echo 4.3.1"
NO_DAEMON = "echo; echo Cannot connect to the Docker daemon >&2; exit 1"
OLD_CLIENT = "echo; echo Cannot connect to the Docker daemon >&2; exit 0"


def make_engines(folder: Path, **scripts: str) -> dict[str, str]:
    """Put programs on a separate PATH."""
    for name, script in scripts.items():
        program = folder / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    return {"PATH": str(folder)}


@pytest.mark.parametrize(
    ("scripts", "found"),
    [
        ({}, None),
        ({"docker": NO_DAEMON}, None),
        ({"docker": OLD_CLIENT}, None),
        ({"docker": WORKING}, "docker"),
        ({"podman": WORKING, "docker": WORKING}, "podman"),
        ({"podman": "exit 125", "docker": WORKING}, "docker"),
    ],
    ids=["none", "client", "client that exits 0", "docker", "both", "broken podman"],
)
def test_an_engine_is_what_answers(
    tmp_path: Path, scripts: dict[str, str], found: str | None
) -> None:
    assert find_engine(make_engines(tmp_path, **scripts)) == found


def test_the_named_engine_wins_whatever_follows_its_name(tmp_path: Path) -> None:
    environ = make_engines(tmp_path, podman=WORKING, docker=WORKING)
    for text in ("docker", "docker; create_args: --network=host", "name: docker"):
        assert find_engine({**environ, VARIABLE: text}) == "docker"


def test_a_named_engine_that_does_not_answer_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    environ = {**make_engines(tmp_path, docker=NO_DAEMON, podman=WORKING), VARIABLE: "docker"}
    with pytest.raises(EngineError, match=r"`docker info` does not answer[\s\S]*--native"):
        find_engine(environ)


def test_an_unknown_engine_is_an_error_that_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="names `nerdctl`, known are podman and docker"):
        find_engine({**make_engines(tmp_path), VARIABLE: "nerdctl"})


def test_a_file_that_is_no_program_does_not_answer(tmp_path: Path) -> None:
    (tmp_path / "podman").write_bytes(b"\x7fELF")
    (tmp_path / "podman").chmod(0o755)
    assert not answers("podman", {"PATH": str(tmp_path)})
