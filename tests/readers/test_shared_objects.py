"""A set with one more target compiles that target alone: all other commands stay the same."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.make.compile.native import NativeOptions, _configure
from flash_dist.toolkit.make.toolchain.nvcc import find_toolchain
from flash_dist.toolkit.make.toolchain.torch_headers import TorchHeaders
from flash_dist.toolkit.targets.archs import ArchSet
from tests.readers.tools import needs

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    needs("nvcc"),
    pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed"),
]


def configure(folder: Path, archs: str) -> dict[str, tuple[str, int, int]]:
    """Return Ninja's inputs of each object: the command, and the times of generated files."""
    toolchain = find_toolchain()
    headers = TorchHeaders(folder / "no-torch", "0", "test")
    _configure(NativeOptions(ArchSet.parse(archs), (), toolchain, headers, 1), folder)
    entries = json.loads((folder / "compile_commands.json").read_text(encoding="utf-8"))
    kernels = [one for one in entries if one["file"].endswith(".cu")]
    plans = (folder / "generated" / "plans.h").stat().st_mtime_ns
    return {
        one["output"]: (one["command"], (folder / one["file"]).stat().st_mtime_ns, plans)
        for one in kernels
    }


def test_one_more_target_leaves_the_objects_of_the_others_alone(tmp_path: Path) -> None:
    before = configure(tmp_path, "7.5;8.0+PTX")
    after = configure(tmp_path, "7.5;8.0+PTX;8.9")
    new = after.keys() - before.keys()
    assert new
    assert all("/sm_89.dir/" in name for name in new)
    assert {name: after[name] for name in before} == before


def test_another_set_finds_the_objects_of_the_first(tmp_path: Path) -> None:
    before = configure(tmp_path, "7.5;8.0;8.9")
    after = configure(tmp_path, "7.5;9.0a")
    shared = {name for name in before if "/sm_75.dir/" in name}
    assert shared
    assert {name: after[name] for name in shared} == {name: before[name] for name in shared}
