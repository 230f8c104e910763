from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.make.compile.native import forget_moved

if TYPE_CHECKING:
    from pathlib import Path

CACHE = """\
CMAKE_CUDA_COMPILER:STRING=/cuda/bin/nvcc
CMAKE_HOME_DIRECTORY:INTERNAL={sources}
"""


@pytest.mark.parametrize(
    ("nvcc", "tree", "kept"),
    [
        ("/cuda/bin/nvcc", "csrc", True),
        ("/cuda/bin/nvcc-2", "csrc", False),
        ("/cuda/bin/nvcc", "other", False),
    ],
    ids=["the same", "another nvcc", "another tree"],
)
def test_objects_are_kept_for_the_same_nvcc_and_the_same_tree(
    nvcc: str, tree: str, *, kept: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "native"
    folder.mkdir()
    (folder / "CMakeCache.txt").write_text(CACHE.format(sources=tmp_path / "csrc"))
    forget_moved(folder, nvcc, tmp_path / tree)
    assert folder.is_dir() is kept
    forget_moved(folder, nvcc, tmp_path / tree)  # a folder that is not there is no reason to fail
