"""Testing for an environment variable without the exceptions that os.environ raises inside."""

from __future__ import annotations

import os

import pytest

from flash_dist.kernels.budget import is_unset

NAME = "FLASH_DIST_TEST_VARIABLE"
KEY = os.fsencode(NAME)


def test_a_variable_that_is_not_set_is_known_not_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NAME, raising=False)
    assert is_unset(KEY)


@pytest.mark.parametrize("text", ["", "1"])
def test_a_variable_is_seen_as_soon_as_it_is_set(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(NAME, text)
    assert not is_unset(KEY)


def test_nothing_is_known_of_an_environment_of_another_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "environ", {})
    assert not is_unset(KEY)
