"""Projects that the toolkit could build without flash_dist: their files, and their table."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest

from flash_dist.toolkit.make.declaration import DeclarationError, read_declaration

if TYPE_CHECKING:
    from pathlib import Path

AXES: list[dict[str, Any]] = [
    {
        "name": "dtype",
        "rule": "equal",
        "words": {"fp16": {"floor": "7.5"}, "bf16": {"floor": "8.0"}},
    },
    {"name": "hidden", "rule": "holds", "symbol": "d{}"},
    {"name": "plan", "rule": "fits", "symbol": "_smem{}"},
]

TABLE = """
[defaults]
dtype = ["fp16", "bf16"]
[smem_plans]
0 = 49152
99 = 101376
[[family]]
name = "rms"
header = "rms.cuh"
config = "RmsConfig"
kernel = "rms_block"
params = "RmsParams"
launch = "launch_rms"
rows = [{ hidden = 256, plan = 0, warps = 4 }, { hidden = 1024, plan = 99, warps = 8 }]
"""

FILES = {
    "my_norms/__init__.py": "",
    "my_norms/__main__.py": "from ._toolkit.cli import main\n",
    "my_norms/ops.py": "",
    "my_norms/selftest.py": "def load_cases():\n    return None\n",
    "csrc/binding.cpp": "",
    "csrc/host/rms.cpp": "",
    "csrc/scale.cu": "__global__ void scale_kernel() {}\n",
    "csrc/rms.cuh": "",
    "csrc/kernels.toml": TABLE,
    "LICENSE": "",
}

PYPROJECT: dict[str, Any] = {
    "project": {
        "name": "my-norms",
        "requires-python": ">=3.10",
        "dynamic": ["version", "dependencies"],
    },
    "tool": {
        "kernels": {
            "version": "0.1.0",
            "package": "my_norms",
            "namespace": "my_norms",
            "torch_min": "2.10",
            "torch_tested_max": "2.15",
            "toolkit": "13.0",
            "oldest_gpu": "8.0",
            "binding": ["csrc/binding.cpp"],
            "include": ["csrc"],
            "operators": "ops",
            "index": "https://example.org/my_norms/",
            "source_date_epoch": 1767225600,
            "dependencies": ["numpy>=1.26"],
            "sources": [
                {"files": ["csrc/*.cu"], "targets": ["9.0a"], "flags": ["--use_fast_math"]}
            ],
            "dispatch": {
                "table": "csrc/kernels.toml",
                "host": ["csrc/host/*.cpp"],
                "main_role": "rms",
                "axes": AXES,
            },
            "sets": {
                "all": "8.0+PTX;9.0a",
                "hopper": {"archs": "9.0a", "who": "H100", "budget_mb": 4},
            },
            "gates": {
                "wheel_mb": 10,
                "spills": [{"symbol": "*_bwd_*", "spill_bytes": 64, "reason": "measured"}],
            },
            "selftest": {"cases": "selftest:load_cases"},
        }
    },
}


def make_project(root: Path, **files: str) -> dict[str, Any]:
    """Write a project's files, some replaced by others, and return its pyproject.toml."""
    for name, text in {**FILES, **files}.items():
        write(root / name, text)
    return copy.deepcopy(PYPROJECT)


def write(path: Path, text: str = "") -> Path:
    """Write a file and its parent folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def put(data: dict[str, Any], place: str, value: object) -> None:
    """Set a value by its keys, such as `sources.0.files` in [tool.kernels], or `/project.name`.

    `...` removes it.
    """
    inside: Any = data if place.startswith("/") else data["tool"]["kernels"]
    *before, last = (int(key) if key.isdigit() else key for key in place.strip("/").split("."))
    for key in before:
        inside = inside[key]
    if value is ...:
        del inside[last]
    elif isinstance(inside, list) and last == len(inside):
        inside.append(value)
    else:
        inside[last] = value


def refuse(data: dict[str, Any], root: Path) -> str:
    """Return the error for a table: one sentence and one hint, shortened if long."""
    with pytest.raises(DeclarationError) as caught:
        read_declaration(data, root)
    require_sentence(caught.value)
    return str(caught.value)


def require_sentence(error: DeclarationError) -> None:
    """Check for one sentence and one hint."""
    assert error.hint, error.message
    for text in (error.message, error.hint):
        assert text == " ".join(text.split()), text
        assert not text.endswith("."), text
        assert len(text) < 500, text
    assert "None" not in error.message
