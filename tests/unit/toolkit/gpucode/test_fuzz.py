"""A thousand mutated binaries; `nox -s fuzz` runs a hundred thousand."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.errors import FatbinError
from tests.fuzz import readers

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_mutated_binaries_raise_our_own_error_only(seed: int) -> None:
    assert readers.run(500, seed) == ""


@pytest.mark.slow
def test_every_bomb_is_stopped_by_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "SLOWEST", 6.0)  # shared cores; the session is strict
    assert readers.run(0, 0, bombs=True) == ""


def test_a_bomb_that_takes_too_long_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "SLOWEST", 0.0)
    monkeypatch.setattr(readers, "make_bombs", lambda: {"a.fatbin": b"x" * 64})
    assert readers.run(0, 0, bombs=True).startswith("bomb a.fatbin of 64 bytes: ")


def test_the_same_seed_gives_the_same_cases() -> None:
    seeds = readers.make_seeds()
    chances = [random.Random("0 7") for _ in range(2)]  # noqa: S311 - no secret
    first, second = (readers.mutate(seeds["library.so"], chance) for chance in chances)
    assert first == second != seeds["library.so"]


def test_another_error_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise KeyError(path.name)

    monkeypatch.setattr(readers, "read_everything", fail)
    assert readers.run(5, 3).startswith("case 0 of seed 3 (")
    assert "KeyError" in readers.run(5, 3)


def test_our_own_error_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Path) -> None:
        message = "broken"
        raise FatbinError(message)

    monkeypatch.setattr(readers, "open_libraries", fail)
    assert readers.run(3, 0) == ""
