"""The newest nvcc of PyPI writes nothing that our tables lack: `nox -s newest_nvcc`.

It fails when NVIDIA releases a CUDA, not when this package changes, so it runs once a week
(.github/workflows/newest.yml) and not for every change. Its message names the addition: a row of a
table, or an entry kind of `flash_dist/toolkit/gpucode/containers/`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from flash_dist.toolkit.gpucode.fatbin import read_fatbin
from flash_dist.toolkit.gpucode.inspection import Choice, inspect_libraries
from flash_dist.toolkit.gpucode.libraries import open_libraries
from flash_dist.toolkit.make.toolchain.nvcc import (
    complete_links,
    installed_home,
    release_of,
    tool_version,
)
from flash_dist.toolkit.make.toolchain.preflight import TOOLKITS
from flash_dist.toolkit.targets.archs import TOOLKIT_ARCHS, Arch
from flash_dist.toolkit.targets.devices import DRIVER_CUDA, PTX_ISA_CUDA, parse_version
from tests.readers.tools import compile_code, run

if TYPE_CHECKING:
    from pathlib import Path

    from flash_dist.toolkit.gpucode.images import FatbinReport

SOURCE: Final = "__global__ void alpha(float* x) { x[threadIdx.x] *= 2; }\n"
TILE: Final = """
#include <cuda_tile.h>
namespace ct = cuda::tiles;
__tile_global__ void tile(float* x) {
  auto p = x + ct::iota<ct::tile<int, ct::shape<16>>>();
  ct::store(p, ct::load(p));
}
"""
TILE_OPTIONS: Final = ("-std=c++20", "--enable-tile", "-tilefatbin")
NOT_READ: Final = "image of kind 128 (CUDA Tile IR)"  # the report of every reader


@pytest.fixture(scope="module")
def toolkit() -> str:
    """Complete the links of the installed nvcc, and return its release."""
    home = installed_home()
    assert home is not None, "no nvcc is installed: `nox -s newest_nvcc` installs the newest"
    complete_links(home)
    return release_of(tool_version(home, "nvcc"))


@pytest.fixture(scope="module")
def codes(toolkit: str) -> tuple[str, ...]:
    """Return nvcc's targets without a suffix, and the targets with a suffix in our table."""
    plain = run("nvcc", "--list-gpu-code").split()
    listed = {str(arch) for arch in TOOLKIT_ARCHS.get(toolkit, ()) if arch.suffix}
    return (*(one for one in plain if one.startswith("sm_")), *sorted(listed))


def gencode(code: str) -> str:
    virtual = code.replace("sm_", "compute_")
    return f"-gencode=arch={virtual},code=[{code},{virtual}]"


def complain(report: FatbinReport) -> list[str]:
    """Return the parts that were not interpreted, except those known to be unreadable."""
    isas = {entry.ptx_isa for entry in report.entries if entry.ptx_isa} - PTX_ISA_CUDA.keys()
    unknown = [f"PTX_ISA_CUDA has no PTX ISA {isa[0]}.{isa[1]}" for isa in isas]
    return unknown + [text for text in report.warnings if NOT_READ not in text]


def test_the_tables_know_the_toolkit(toolkit: str) -> None:
    version = parse_version(toolkit)
    assert toolkit in TOOLKIT_ARCHS, "add it to flash_dist/toolkit/targets/archs.py"
    assert version in PTX_ISA_CUDA.values(), "add it to flash_dist/toolkit/targets/devices.py"
    assert version in DRIVER_CUDA.values(), (
        "add its driver to flash_dist/toolkit/targets/devices.py"
    )
    assert toolkit in {one.cuda for one in TOOLKITS}, (
        "add it to flash_dist/toolkit/make/toolchain/preflight.py"
    )


def test_the_tables_know_every_target(toolkit: str, codes: tuple[str, ...]) -> None:
    known = set(TOOLKIT_ARCHS[toolkit])
    assert [code for code in codes if Arch.parse(code) not in known] == []
    plain = {arch.device for arch in known}
    assert plain == {Arch.parse(code).device for code in codes}


OPTIONS: Final = {
    "as it is": (),
    "packed": ("-Xfatbin", "-compress-all"),
    "lz4": ("--compress-mode=speed",),
    "in one stream": ("-Xfatbin", "-concat"),
    "with lines": ("-lineinfo",),
    "relocatable": ("-dc",),
}


@pytest.mark.parametrize("suffix", ["", "a", "f"], ids=["plain", "a", "f"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_image_is_understood_and_is_what_its_header_says(
    tmp_path: Path, codes: tuple[str, ...], options: tuple[str, ...], suffix: str
) -> None:
    path = tmp_path / "code.fatbin"
    codes = tuple(code for code in codes if Arch.parse(code).suffix == suffix)
    compile_code(path, SOURCE, *map(gencode, codes), "-fatbin", *options)
    report = read_fatbin(path)
    assert complain(report) == []
    wanted = {Arch.parse(code) for code in codes}
    assert {arch for arch in report.archs if not arch.ptx} == wanted
    (inspection,), unread = inspect_libraries(open_libraries(path), Choice(checked=True))
    assert (inspection.warnings, inspection.renamed, unread) == ((), {}, [])


def test_code_for_the_linker_is_told_from_code_for_the_driver(
    tmp_path: Path, codes: tuple[str, ...]
) -> None:
    path = tmp_path / "code.fatbin"
    number = codes[-1].rstrip("af").removeprefix("sm_")
    option = f"-gencode=arch=compute_{number},code=lto_{number}"
    compile_code(path, SOURCE, option, "-dc", "-fatbin")
    report = read_fatbin(path)
    assert (complain(report), report.archs, report.opaque) == ([], (), 1)


def test_kernels_of_cuda_tile_are_for_their_chip_alone(tmp_path: Path) -> None:
    path = tmp_path / "tile.fatbin"
    compile_code(path, TILE, *TILE_OPTIONS, gencode("sm_120"), gencode("sm_90"))
    assert complain(read_fatbin(path)) == []
    (inspection,), _ = inspect_libraries(open_libraries(path), Choice(checked=True))
    assert {str(arch) for arch in inspection.report.archs} == {"sm_90a", "sm_120a"}
