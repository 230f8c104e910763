"""The example of docs/from-pybind.md: the old code is rejected, the new code builds and computes.

g++ compiles it, with CUDA's keywords from a dry run; a loop replaces the launch.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from typing import TYPE_CHECKING, Final

import pytest

from ci.dry_run.build import AS_ON_GPU
from ci.dry_run.plans import find_torch
from flash_dist.toolkit.make.building.binding import BindingError, require_stable
from flash_dist.toolkit.make.kernels.generate import render_names, render_product
from flash_dist.toolkit.make.project import NATIVE, ROOT, TOOLKIT
from flash_dist.toolkit.product import NAME
from tests.unit.made.planner import require_compiler

if TYPE_CHECKING:
    from pathlib import Path

TEXT: Final = (ROOT / "docs" / "from-pybind.md").read_text(encoding="utf-8")
BLOCKS: Final = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
PACKAGE: Final = "bias_gelu"
STABLE: Final = "-DTORCH_TARGET_VERSION=0x020a000000000000"

HALF: Final = """#pragma once
#include <cuda_runtime_api.h>
#include <torch/headeronly/util/Half.h>
using __half = c10::Half;
"""
ONE_THREAD: Final = """#include <cuda_fp16.h>
uint3 blockIdx, threadIdx;
dim3 blockDim;
static float normcdff(float x) { return 0.5f * std::erfc(-0.70710678f * x); }
"""
LOOP: Final = r"""blockDim.x = \3;
  for (blockIdx.x = 0; blockIdx.x < \2; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < \3; ++threadIdx.x) \1("""

COMPARE: Final = """
import torch
load(LIBRARY)
operator = torch.ops.bias_gelu.forward
for dtype, tolerance in (torch.float32, 1e-5), (torch.float16, 2e-3):
    for rows, columns in (5, 300), (1, 1), (0, 8):
        x, bias, dout = (torch.randn(n, columns).to(dtype) for n in (rows, 1, rows))
        mine = [x.clone().requires_grad_(), bias[0].clone().requires_grad_()]
        exact = [one.detach().float().requires_grad_() for one in mine]
        out, wanted = operator(*mine), torch.nn.functional.gelu(exact[0] + exact[1])
        out.backward(dout)
        wanted.backward(dout.float())
        torch.testing.assert_close(out.float(), wanted, rtol=tolerance, atol=tolerance)
        for one, other in zip(mine, exact):
            assert one.grad.dtype == dtype
            close = tolerance * (1 + rows)
            torch.testing.assert_close(one.grad.float(), other.grad, rtol=close, atol=close)
x, bias = torch.randn(4, 6, requires_grad=True), torch.randn(6, requires_grad=True)
torch.library.opcheck(operator, (x, bias))
"""
REFUSED: Final = """
for call, said in (
    (lambda: operator(x.double(), bias.double()), "x must be float32 or float16, got Double"),
    (lambda: operator(x.t(), bias), "tensors must be contiguous"),
    (lambda: operator(x, bias.half()), "with the device and dtype of x"),
    (lambda: operator(x, bias[:3]), "bias [columns]"),
):
    try:
        call()
    except RuntimeError as error:
        assert said in str(error), error
    else:
        raise AssertionError(said)
"""
ON_A_CPU: Final = """
load(LIBRARY)
try:
    torch.ops.bias_gelu.forward(torch.ones(2, 3), torch.ones(3))
except NotImplementedError as error:
    print(f"{type(error).__name__}: {error}")
torch.library.register_kernel("bias_gelu::forward", "cpu", lambda x, bias: x + bias)
assert torch.ops.bias_gelu.forward(torch.ones(2, 3), torch.ones(3)).sum() == 12
"""


@cache
def read_files() -> dict[str, str]:
    """Return the files of the example, by the name in their first line."""
    code = [text for _, text in BLOCKS]
    return {found[1]: text for text in code if (found := re.match(r"(?://|#) (\S+\.\w+)\n", text))}


def write_example(folder: Path) -> list[Path]:
    """Write the C++ files, and return those to compile."""
    (folder / "csrc").mkdir()
    for name, text in read_files().items():
        if name.startswith("csrc/"):
            (folder / name).write_text(text, encoding="utf-8")
    return [folder / "csrc" / "binding.cpp", folder / "csrc" / "bias_gelu.cu"]


def test_the_page_has_the_files_of_the_example() -> None:
    assert list(read_files()) == [
        "csrc/bias_gelu.h",
        "csrc/bias_gelu.cu",
        "csrc/binding.cpp",
        "ops.py",
    ]
    assert len(TEXT.split()) <= 1300


def test_the_code_before_is_refused_and_that_after_is_not(tmp_path: Path) -> None:
    before = tmp_path / "before.cu"
    before.write_text(BLOCKS[0][1], encoding="utf-8")
    with pytest.raises(BindingError, match=r"before.cu:1 includes `ATen/cuda/CUDAContext.h`"):
        require_stable([before])
    sources = write_example(tmp_path)
    assert require_stable(sources, [tmp_path / "csrc", TOOLKIT]) == ""


def test_the_page_names_files_of_the_toolkit_that_are_there() -> None:
    named = set(re.findall(r"native/[\w/]+\.\w+", TEXT))
    assert len(named) > 2
    assert [name for name in named if not (TOOLKIT / name).is_file()] == []


def build(folder: Path, options: tuple[str, ...], key: str) -> Path:
    """Compile the example with its operators registered for a dispatch key."""
    require_compiler()
    torch = find_torch()
    binding, kernels = write_example(folder)
    text = binding.read_text(encoding="utf-8")
    assert f"({PACKAGE}, CUDA, m)" in text
    binding.write_text(text.replace(f"({PACKAGE}, CUDA, m)", f"({PACKAGE}, {key}, m)"))
    loops = re.sub(r"(\w+)<<<(.+), (\d+), 0, stream>>>\(", LOOP, kernels.read_text())
    assert "<<<" not in loops
    kernels.with_suffix(".cpp").write_text(f"{ONE_THREAD}{loops}", encoding="utf-8")
    for name, made in ("product.h", render_product()), ("names.h", render_names()):
        (folder / name).write_text(made.replace(NAME, PACKAGE), encoding="utf-8")
    (folder / "cuda_fp16.h").write_text(HALF, encoding="utf-8")
    include = [f"-I{path}" for path in (folder, folder / "csrc", NATIVE / "dry_run", TOOLKIT)]
    sources = [binding, kernels.with_suffix(".cpp"), *NATIVE.glob("binding/*.cpp")]
    sources += [NATIVE / "dry_run" / "torch.cpp"] if options == AS_ON_GPU else []
    library = folder / "_C.so"
    compiler = [os.environ.get("CXX", "g++"), "-std=c++17", "-O0", "-fPIC", "-shared", "-Wall"]
    command = [*compiler, *options, *include, "-isystem", str(torch / "include")]
    command += [*map(str, sources), f"-L{torch / 'lib'}", "-ltorch_cpu", "-o", str(library)]
    subprocess.run([*command, "-Wl,--allow-shlib-undefined"], check=True)
    return library


def run(library: Path, code: str) -> str:
    """Run the page's Python code, then this code."""
    program = f"{read_files()['ops.py']}\nLIBRARY = {str(library)!r}\n{code}"
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_example_has_the_values_and_gradients_of_torch(tmp_path: Path) -> None:
    run(build(tmp_path, AS_ON_GPU, "CPU"), COMPARE + REFUSED)


@pytest.mark.slow
def test_the_example_says_on_a_cpu_what_the_page_says(tmp_path: Path) -> None:
    said = run(build(tmp_path, (STABLE,), "CUDA"), ON_A_CPU)
    quoted = re.findall(r"`(NotImplementedError: [^`]+?'CPU' backend)`", " ".join(TEXT.split()))
    assert len(quoted) == 1
    assert said.startswith(quoted[0])
