"""Subpackages such as `compat` are attributes of the package, like its functions."""

from __future__ import annotations

import subprocess
import sys

import pytest

import flash_dist

PROGRAM = """
import sys
import flash_dist
print(flash_dist.{name}.__name__)
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize(
    "name",
    [
        "compat",
        "integrations",
        "integrations.diffusers",
        "integrations.torch_sdpa",
        "integrations.transformers",
    ],
)
def test_an_import_of_the_package_alone_finds_what_plugs_it_in(name: str) -> None:
    command = [sys.executable, "-c", PROGRAM.format(name=name)]
    assert subprocess.check_output(command, text=True) == f"flash_dist.{name}\n"


def test_the_stand_in_for_flash_attn_is_found_by_its_name() -> None:
    assert flash_dist.compat.flash_attn.__name__ == "flash_dist.compat.flash_attn"


def test_a_package_that_is_not_there_is_named() -> None:
    for package, name in (
        (flash_dist, "integration"),
        (flash_dist.integrations, "comfyui"),
        (flash_dist.compat, "xformers"),
    ):
        with pytest.raises(AttributeError, match=f"`{package.__name__}` has no .* `{name}`"):
            getattr(package, name)


def test_arguments_are_checked_without_the_compiler_of_torch() -> None:
    program = """
import sys, torch
import flash_dist.attention.scores, flash_dist.attention.arguments
assert "torch._dynamo" not in sys.modules  # a second or more
"""
    subprocess.run([sys.executable, "-c", program], check=True)
