"""A wheel is built again unless none of its inputs has changed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.make.container.engine import identify_image
from flash_dist.toolkit.make.container.portable import digest_inputs, find_unchanged, note_wheel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ENVIRON = {"FLASH_DIST_ARCH_SET": "hopper", "CIBW_TEST_SKIP": "", "PATH": "/bin", "LANG": "C"}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    (folder / "csrc").mkdir(parents=True)
    (folder / "csrc" / "fwd.cu").write_text("kernel")
    (folder / "setup.py").write_text("setup()")
    return folder


def test_the_same_sources_image_and_settings_are_the_same_inputs(tree: Path) -> None:
    before = digest_inputs(tree, "sha256:1", ENVIRON)
    (tree / "setup.py").touch()
    elsewhere = {**ENVIRON, "PATH": "/usr/bin", "LANG": "de_DE"}  # not for the container
    assert digest_inputs(tree, "sha256:1", elsewhere) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: (tree / "csrc" / "fwd.cu").write_text("other"),
        lambda tree: (tree / "csrc" / "new.cu").write_text(""),
        lambda tree: (tree / "setup.py").unlink(),
        lambda tree: (tree / "setup.py").rename(tree / "csrc" / "setup.py"),
    ],
    ids=["other text", "a new file", "one file less", "moved"],
)
def test_another_source_is_another_input(tree: Path, change: Callable[[Path], object]) -> None:
    before = digest_inputs(tree, "sha256:1", ENVIRON)
    change(tree)
    assert digest_inputs(tree, "sha256:1", ENVIRON) != before


def test_another_image_or_setting_is_another_input(tree: Path) -> None:
    before = digest_inputs(tree, "sha256:1", ENVIRON)
    assert digest_inputs(tree, "sha256:2", ENVIRON) != before
    for name in ("FLASH_DIST_ARCH_SET", "CIBW_TEST_SKIP", "TORCH_CUDA_ARCH_LIST"):
        assert digest_inputs(tree, "sha256:1", {**ENVIRON, name: "other"}) != before, name


def test_a_wheel_is_found_that_was_noted_with_these_inputs(tmp_path: Path) -> None:
    note, wheel = tmp_path / "notes" / "hopper.json", tmp_path / "a.whl"
    wheel.write_bytes(b"wheel")
    assert find_unchanged(note, "inputs", tmp_path) is None
    note_wheel(note, "inputs", wheel)
    assert find_unchanged(note, "inputs", tmp_path) == wheel
    assert find_unchanged(note, "other inputs", tmp_path) is None


def test_a_wheel_that_was_changed_renamed_or_removed_since_is_not(tmp_path: Path) -> None:
    note, wheel = tmp_path / "hopper.json", tmp_path / "a.whl"
    wheel.write_bytes(b"wheel")
    note_wheel(note, "inputs", wheel)
    wheel.write_bytes(b"whee1")
    assert find_unchanged(note, "inputs", tmp_path) is None
    wheel.write_bytes(b"wheel")
    wheel.rename(tmp_path / "b.whl")
    assert find_unchanged(note, "inputs", tmp_path) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"inputs": "inputs", "other": 1})])
def test_a_note_that_says_something_else_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "hopper.json").write_text(text)
    assert find_unchanged(tmp_path / "hopper.json", "inputs", tmp_path) is None


def test_an_image_is_known_by_its_id_and_until_it_is_here_by_its_name(tmp_path: Path) -> None:
    podman = tmp_path / "podman"
    podman.write_text('#!/bin/sh\n[ "$3" = here ] && echo 0123abcd\n')
    podman.chmod(0o755)
    assert identify_image(str(podman), "here", {}) == "0123abcd"
    assert identify_image(str(podman), "elsewhere", {}) == "elsewhere"
