"""Compile the two libraries for a dry run, with g++ and the headers of torch, without CUDA.

The build compiles the host code and the binding of csrc/ and of the toolkit. Instead of each
kernel, it compiles an entry with the kernel's tile sizes and the check of its arguments. Launches
do nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from ci.places import SOURCES
from flash_dist.errors import FlashDistError
from flash_dist.toolkit.make.kernels.generate import generate
from flash_dist.toolkit.make.kernels.table import Table
from flash_dist.toolkit.make.project import NATIVE, ROOT, TOOLKIT
from flash_dist.toolkit.product import BINDING, KERNELS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from flash_dist.toolkit.make.kernels.table import Variant
    from flash_dist.toolkit.targets.archs import Arch

FLAGS: Final = ("-std=c++17", "-O0", "-fPIC", "-fvisibility=hidden", "-w", "-fpermissive")
# Macros that let the binding accept CPU tensors as GPU tensors: the device type cuda becomes cpu.
# The last one selects the stable ABI of torch 2.10.
AS_ON_GPU: Final = (
    "-Daoti_torch_device_type_cuda=aoti_torch_device_type_cpu",
    "-Daoti_torch_create_device_guard=dry_run_create_device_guard",
    "-DTORCH_TARGET_VERSION=0x020a000000000000",
)
ENTRY: Final = """
#pragma once
#include "plans.h"
#include "native/entry.h"
#include "core/config.h"
namespace flash_dist {
inline cudaError_t launch_nothing(const KernelEntry&, const void*, cudaStream_t) {
  return cudaSuccess;
}
template <class Config>
KernelEntry make_dry_entry(const KernelEntry* self, const char* (*refuses)(const void*)) {
  KernelEntry entry = make_entry<Config, int>(nullptr, &launch_nothing, refuses);
  entry.kernel = self;  // native/dry_run/runtime.cpp asks it for its registers
  return entry;
}
}  // namespace flash_dist
"""


class DryRunError(FlashDistError):
    """The host code does not compile, or a case fails."""


def build_package(folder: Path, archs: Sequence[Arch], torch: Path, csrc: Path = SOURCES) -> Path:
    """Put the package with both libraries into a folder, and return the folder.

    Objects in the folder that were compiled from the same text are reused.

    Args:
        folder: The output folder.
        archs: The targets of the library's kernels.
        torch: The folder of an installed torch, with its headers and libraries.
        csrc: The sources.
    """
    generated, objects, package = folder / "generated", folder / "objects", folder / "flash_dist"
    for path in (objects / "host", objects / "binding", generated):
        path.mkdir(parents=True, exist_ok=True)
    generate(Table.load(csrc / "kernels.toml"), archs, (), generated)
    (generated / "dry_entry.h").write_text(ENTRY, encoding="utf-8")
    shutil.rmtree(package, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "flash_dist", package, ignore=ignored)
    entries = write_entries(generated, archs, csrc)
    without_cuda = NATIVE / "dry_run"
    host = [*NATIVE.glob("*.cpp"), *(csrc / "host").glob("*.cpp")]
    host = [*sorted(host), without_cuda / "runtime.cpp", *entries]
    binding = [*NATIVE.glob("binding/*.cpp"), *(csrc / "binding").glob("*.cpp")]
    binding = [*sorted(binding), without_cuda / "torch.cpp"]
    include = [f"-I{path}" for path in (without_cuda, csrc, TOOLKIT, generated)]
    with_torch = [*include, "-isystem", str(torch / "include"), *AS_ON_GPU]
    calls = [(source, _object(objects / "host", source), include) for source in host]
    calls += [(source, _object(objects / "binding", source), with_torch) for source in binding]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda call: _compile(*call), calls))
    link = [*_objects(objects / "host", host), "-o", str(package / KERNELS)]
    _run(["-shared", f"-Wl,-soname,{KERNELS}", *link])
    link = [*_objects(objects / "binding", binding), "-o", str(package / BINDING)]
    libraries = [f"-L{package}", f"-l:{KERNELS}", f"-L{torch / 'lib'}", "-ltorch_cpu"]
    _run(["-shared", *link, *libraries, "-Wl,-rpath,$ORIGIN", "-Wl,--allow-shlib-undefined"])
    return folder


def _object(folder: Path, source: Path) -> Path:
    return folder / f"{source.parent.name}-{source.stem}.o"


def _objects(folder: Path, sources: Iterable[Path]) -> list[str]:
    return [str(_object(folder, source)) for source in sources]


def write_entries(folder: Path, archs: Iterable[Arch], csrc: Path = SOURCES) -> list[Path]:
    """Write one file per header with the entries of its kernels, and return the files."""
    table = Table.load(csrc / "kernels.toml")
    by_header: defaultdict[str, list[Variant]] = defaultdict(list)
    for arch in archs:
        for variant in table.variants(arch):
            by_header[variant.family.header].append(variant)
    files = []
    for header, variants in by_header.items():
        path = folder / f"entries_{header.replace('/', '_').partition('.')[0]}.cpp"
        lines = "".join(map(_render_entry, variants))
        text = f'#include "dry_entry.h"\n#include "{header}"\nnamespace flash_dist {{\n{lines}}}\n'
        path.write_text(text, encoding="utf-8")
        files.append(path)
    return files


def _render_entry(variant: Variant) -> str:
    refuses, entry = variant.family.refuses, f"{variant.symbol}_entry"
    given = f"&{refuses}<{variant.config}>" if refuses else "nullptr"
    return (
        f'extern "C" const KernelEntry {entry};\n'
        f"const KernelEntry {entry} = make_dry_entry<{variant.config}>(&{entry}, {given});\n"
    )


def _compile(source: Path, target: Path, include: Sequence[str]) -> None:
    """Compile one file, unless its preprocessed text was compiled before."""
    text = _run([*FLAGS, *include, "-E", "-P", str(source)])
    known = target.with_suffix(".ii")
    if target.is_file() and known.is_file() and known.read_text(encoding="utf-8") == text:
        return
    known.write_text(text, encoding="utf-8")
    _run([*FLAGS, "-c", str(known), "-o", str(target)])


def _run(arguments: Sequence[str]) -> str:
    compiler = os.environ.get("CXX", "g++")
    try:
        done = subprocess.run([compiler, *arguments], check=False, capture_output=True, text=True)
    except FileNotFoundError as error:
        message = f"the C++ compiler `{compiler}` is not installed"
        raise DryRunError(message, hint="`apt-get install g++`, or name another in CXX") from error
    if done.returncode:
        message = f"the host code does not compile for a dry run: {done.stderr[-2000:]}"
        raise DryRunError(message)
    return done.stdout
