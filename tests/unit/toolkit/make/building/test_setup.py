"""setup.py plans once, and prints warnings only, not a line for each file."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from flash_dist.toolkit.make.project import ROOT

if TYPE_CHECKING:
    from pathlib import Path

# Runs setup.py up to the compiler. Prints how many plans were made, and their set.
COUNT_PLANS = """
import runpy, sys
from flash_dist.toolkit.make.building import plan
from flash_dist.toolkit.make.compile import native
from flash_dist.toolkit.make.toolchain import nvcc, torch_headers

def make_plan(*given, make=plan.make_plan):
    plans.append(make(*given))
    return plans[-1]

def build_native(options):
    print(len(plans), options.archset.name)
    sys.exit()

plans = []
plan.make_plan = make_plan
native.build_native = build_native
nvcc.find_toolchain = torch_headers.find_headers = lambda *_: None
sys.argv = ["setup.py", "build_ext", "--build-lib", sys.argv[1]]
runpy.run_path("setup.py", run_name="__main__")
"""


def test_one_plan_is_made_for_metadata_and_libraries(tmp_path: Path) -> None:
    environ = {**os.environ, "FLASH_DIST_ARCH_SET": "hopper"}
    command = [sys.executable, "-c", COUNT_PLANS, str(tmp_path)]
    done = subprocess.run(
        command, check=True, cwd=ROOT, env=environ, text=True, capture_output=True
    )
    assert done.stdout.splitlines()[-1] == "1 hopper"


def pack_modules(folder: Path, *options: str) -> list[str]:
    """Copy the package as a build does, without compiling; return the output."""
    command = [sys.executable, "setup.py", *options, "build_py", "--build-lib", str(folder)]
    environ = {**os.environ, "FLASH_DIST_ARCH_SET": "hopper", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command,
        check=True,
        cwd=ROOT,
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert (folder / "flash_dist" / "__init__.py").is_file()
    return [line for line in done.stdout.splitlines() if line]


def test_packing_says_nothing_but_warnings(tmp_path: Path) -> None:
    assert pack_modules(tmp_path) == [
        "warning: BuildModules: byte-compiling is disabled, skipping."
    ]


def test_every_file_is_printed_on_request(tmp_path: Path) -> None:
    told = pack_modules(tmp_path, "-v")
    copied = sum(line.startswith("copying ") for line in told)
    assert copied == sum(path.is_file() for path in tmp_path.rglob("*"))
