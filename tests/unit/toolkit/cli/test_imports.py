"""Reading files and judging absent machines need neither torch nor our extension."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.make.project import ROOT
from tests.unit.made.fatbin_builder import SASS, Kernel, container, cubin, entry, library
from tests.unit.made.wheels import write_dist
from tests.unit.made.whole_wheel import NAME, write_whole_wheel

if TYPE_CHECKING:
    from pathlib import Path

# Modules that take seconds to import, and the one that loads our extension.
HEAVY = ("torch", "numpy", "flash_dist.kernels.operators")
RUN = """
import sys
from flash_dist.toolkit.cli import main
status = main(sys.argv[2:])
print([name for name in sys.argv[1].split(",") if name in sys.modules], file=sys.stderr)
sys.exit(status)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("read")
    (folder / "lib.so").write_bytes(library(container(entry(SASS, 90, cubin(Kernel("alpha"))))))
    write_whole_wheel(folder)
    write_dist(folder / "dist")
    return folder


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("inspect {}/lib.so", 0),
        ("audit {}/lib.so --require 9.0", 0),
        ("audit {}/{}", 0),
        ("verify {}/{}", 0),
        ("select --gpu 9.0 --index {}/dist", 0),
        ("doctor --gpu 9.0", 1),  # a source tree has no build
        ("doctor --gpu 9.0 --wheel {}/lib.so", 0),
        ("doctor --gpu 9.0 --wheel {}/{}", 0),
    ],
)
def test_commands_that_read_files_import_neither_torch_nor_the_extension(
    folder: Path, command: str, status: int
) -> None:
    words = command.format(folder, NAME).split()
    argv = [sys.executable, "-c", RUN, ",".join(HEAVY), *words]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert done.stderr.endswith("[]\n")


def test_the_modules_to_look_for_can_be_imported() -> None:
    assert all(map(find_spec, HEAVY))
