"""What of csrc/ this machine's C++ compiler compiles: small programs, and the planner."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest

from ci.decisions.cases import Call, Gpu
from ci.decisions.decide import ask_planner, compile_planner
from csrc.generate import CSRC

_FOLDER: Final = tempfile.TemporaryDirectory(prefix="flash_dist-")  # removed with the process
_GPU_FIELDS: Final = {one.name for one in fields(Gpu)}


def require_compiler() -> None:
    """Skip a test where nothing compiles C++."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip(f"no C++ compiler `{compiler}`")


def compile_program(folder: Path, source: str) -> Path:
    """Compile a program of one file, with the headers of csrc/ that need no CUDA."""
    require_compiler()
    file, program = folder / "program.cpp", folder / "program"
    file.write_text(source, encoding="utf-8")
    call = [os.environ.get("CXX", "g++"), "-std=c++17", "-I", str(CSRC), str(file)]
    subprocess.run([*call, "-o", str(program)], check=True)
    return program


@cache
def planner() -> Path:
    """Return the compiled planner."""
    require_compiler()
    return compile_planner(Path(_FOLDER.name))


def plan_backward(**request: Any) -> dict[str, Any]:  # noqa: ANN401 - fields of Call and of Gpu
    """Return how a backward is cut into launches; head_dim_v is by default head_dim."""
    gpu = Gpu(**{name: request.pop(name) for name in _GPU_FIELDS & request.keys()})
    request.setdefault("head_dim_v", request["head_dim"])
    (plan,) = ask_planner(planner(), [Call(**request, gpu=gpu)])
    return plan
