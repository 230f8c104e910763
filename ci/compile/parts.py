"""What of others is in the two libraries: linked statically, or compiled in from headers.

The rest, libstdc++.so and torch among it, is loaded from the user's machine and not shipped.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from ci.toolchain.nvcc import ToolchainError, gxx_version
from flash_dist.builds.linkage import has_shared_runtime
from flash_dist.builds.manifest import Part

if TYPE_CHECKING:
    from ci.toolchain.nvcc import Toolchain
    from ci.toolchain.torch_headers import TorchHeaders

NVIDIA: Final = "NVIDIA CUDA Toolkit End User License Agreement"
GCC: Final = "GPL-3.0-or-later WITH GCC-exception-3.1"


class Packages(NamedTuple):
    """Where PyPI has the parts of a CUDA major."""

    runtime: str
    crt: str
    nvvm: str


CUDA_13: Final = Packages("nvidia-cuda-runtime", "nvidia-cuda-crt", "nvidia-nvvm")
CUDA_12: Final = Packages("nvidia-cuda-runtime-cu12", *["nvidia-cuda-nvcc-cu12"] * 2)


def find_parts(folder: Path, toolchain: Toolchain, headers: TorchHeaders) -> tuple[Part, ...]:
    """Return the parts of a build.

    Args:
        folder: Where CMake built.
        toolchain: The CUDA toolkit.
        headers: Those of torch.
    """
    packages = CUDA_12 if has_shared_runtime(toolchain.cuda) else CUDA_13
    version, crt, nvvm = (package_version(toolchain, package) for package in packages)
    gcc = gxx_version()
    linked = () if has_shared_runtime(toolchain.cuda) else (_static_runtime(folder, version),)
    return (
        *linked,
        Part("cuda-runtime-headers", version, "header-only", NVIDIA, packages.runtime),
        Part("cuda-crt-headers", crt, "header-only", NVIDIA, packages.crt),
        Part("libdevice", nvvm, "compiled-in", NVIDIA, packages.nvvm),
        Part("torch-headers", headers.version, "header-only", "BSD-3-Clause", "torch"),
        Part("libstdc++-headers", gcc, "header-only", GCC),
        Part("gcc-start-files", gcc, "static", GCC),
    )


def _static_runtime(folder: Path, version: str) -> Part:
    archive = hashlib.sha256(find_cudart(folder).read_bytes()).hexdigest()
    return Part("cudart_static", version, "static", NVIDIA, CUDA_13.runtime, archive)


def find_cudart(folder: Path) -> Path:
    """Return the archive that CMake linked."""
    cache = (folder / "CMakeCache.txt").read_text(encoding="utf-8")
    for line in cache.splitlines():
        name, _, value = line.partition("=")
        if name.partition(":")[0] == "CUDART":
            return Path(value)
    message = f"`{folder / 'CMakeCache.txt'}` does not say which libcudart_static.a was linked"
    raise ToolchainError(message)


def package_version(toolchain: Toolchain, package: str) -> str:
    """Return the version of a package of the toolkit; of a toolkit from elsewhere its own."""
    name = package.replace("-", "_")
    for place in (toolchain.home.parents[1], toolchain.home / "dist-info"):
        for found in sorted(place.glob(f"{name}-*.dist-info")):
            return found.name.removeprefix(f"{name}-").removesuffix(".dist-info")
    return toolchain.nvcc
