"""Compiles parts of csrc/ with this machine's C++ compiler: small programs, and the planner."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import pytest

from ci.places import INCLUDES, SOURCES, read_table
from flash_dist.toolkit.make.kernels.generate import render_product, render_roles

if TYPE_CHECKING:
    from collections.abc import Mapping

MIB: Final = 1 << 20
BAND: Final = 0  # kind of mask
NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})

_FOLDER: Final = tempfile.TemporaryDirectory(prefix="flash_dist-")  # removed with the process


@dataclass(frozen=True)
class Gpu:
    """The planner's data on a GPU and its kernels."""

    sm_count: int
    key_tile: int
    blocks_per_sm: int
    dq_rows: int = 128  # 0: there is no dQ = dS @ K kernel
    dq_blocks_per_sm: int = 2
    cluster: int = 1  # blocks that share a key tile
    fused: bool = False  # the dK/dV numbers are those of the fused kernel


@dataclass(frozen=True)
class Call:
    """The arguments of one backward call."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_kv: int
    group: int
    head_dim: int = 128
    head_dim_v: int = 128
    total_q: int = -1  # packed: tokens
    mask: tuple[int, int, int, int] = (BAND, -1, -1, 1)  # kind, left, right, bottom_right
    key_slots: tuple[int, ...] | None = None
    gpu: Gpu = Gpu(132, 64, 2)
    budget: int = 1536 * MIB
    batch_invariant: bool = False
    normalizes: bool = False
    aligned: bool = False  # scores depend on absolute positions (ALiBi, bias)
    per_head: bool = False  # query heads have masks of their own


_GPU_FIELDS: Final = {one.name for one in fields(Gpu)}


def require_compiler() -> None:
    """Skip a test if there is no C++ compiler."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip(f"no C++ compiler `{compiler}`")


def compile_program(
    folder: Path, source: str, *options: str, headers: Mapping[str, str] = NO_HEADERS
) -> Path:
    """Compile a program of one file, with the headers of csrc/ that need no CUDA.

    Args:
        folder: Folder of the program.
        source: Text of the program.
        options: Options of the compiler.
        headers: Text by path of headers that replace those of csrc/.
    """
    require_compiler()
    for name, text in headers.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    file, program = folder / "program.cpp", folder / "program"
    file.write_text(source, encoding="utf-8")
    call = [os.environ.get("CXX", "g++"), "-std=c++17", *options, *_include(folder), str(file)]
    subprocess.run([*call, "-o", str(program)], check=True)
    return program


@cache
def planner() -> Path:
    """Return the compiled planner, csrc/debug/plans.cpp."""
    require_compiler()
    folder = Path(_FOLDER.name)
    for name, text in (("roles.h", render_roles(read_table())), ("product.h", render_product())):
        (folder / name).write_text(text, encoding="utf-8")
    program = folder / "plans"
    sources = [str(SOURCES / name) for name in ("debug/plans.cpp", "host/plan.cpp")]
    call = [os.environ.get("CXX", "g++"), "-std=c++17", "-Wall", "-Wextra", "-Werror"]
    call += [*_include(folder), *sources, "-o", str(program)]
    subprocess.run(call, check=True)
    return program


def _include(generated: Path) -> list[str]:
    return [f"-I{path}" for path in (generated, *INCLUDES)]


def plan_backward(**request: Any) -> dict[str, Any]:  # noqa: ANN401 - fields of Call and of Gpu
    """Return the launches of a backward; head_dim_v is by default head_dim."""
    gpu = Gpu(**{name: request.pop(name) for name in _GPU_FIELDS & request.keys()})
    request.setdefault("head_dim_v", request["head_dim"])
    line = _line_of(Call(**request, gpu=gpu))
    done = subprocess.run(
        [str(planner())], check=True, input=f"{line}\n", capture_output=True, text=True
    )
    plan: dict[str, Any] = json.loads(done.stdout)
    return plan


def _line_of(call: Call) -> str:
    """Write a call in the form for csrc/debug/plans.cpp."""
    gpu, slots = call.gpu, call.key_slots
    shape = (call.batch, call.seqlen_q, call.seqlen_k, call.num_heads_kv, call.group)
    dkdv = (gpu.sm_count, gpu.key_tile, gpu.blocks_per_sm)
    kernels = (*dkdv, gpu.dq_rows, gpu.dq_blocks_per_sm, gpu.cluster, int(gpu.fused))
    known = (-1,) if slots is None else (len(slots), *slots)
    role = "bwd_fused" if gpu.fused else "bwd_dkdv"
    sizes = [column for size in _compiled_sizes(role) for column in size]
    columns = (call.head_dim, call.head_dim_v)
    flags = (call.batch_invariant, call.normalizes, call.aligned, call.per_head)
    how = (call.budget, *map(int, flags))
    numbers = (*shape, call.total_q, *columns, *call.mask, *kernels, *how, *known)
    return " ".join(map(str, (*numbers, len(sizes) // 2, *sizes)))


@cache
def _compiled_sizes(role: str) -> tuple[tuple[int, ...], ...]:
    rows = (row for family in read_table().families if family.role == role for row in family.rows)
    return tuple(sorted({row.sizes for row in rows}))
