"""Importing a module from its old place raises an error that names the new place."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import flash_dist
from flash_dist.moved import PLACES


@pytest.mark.parametrize(("old", "new"), PLACES.items(), ids=PLACES)
def test_an_import_from_the_old_place_names_the_new_one(old: str, new: str) -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(f"flash_dist.{old}")
    assert f"`flash_dist.{old}`" in str(caught.value)
    assert f"`flash_dist.{new}`" in str(caught.value)
    assert importlib.util.find_spec(f"flash_dist.{new}") is not None


@pytest.mark.parametrize(
    "line", ["from flash_dist import audit", "import flash_dist.targets.devices"]
)
def test_every_way_of_importing_it_says_so(line: str) -> None:
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "has moved to `flash_dist.toolkit." in done.stderr


def test_other_names_are_unknown_as_they_were() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'flash_dist\.nothing'"):
        importlib.import_module("flash_dist.nothing")
    assert not hasattr(flash_dist, "nothing")
