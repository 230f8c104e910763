"""Lists the third-party components in the libraries: linked statically, or from headers.

Other libraries, such as libstdc++.so and torch, are loaded from the user's machine and not shipped.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from ...builds.linkage import has_shared_runtime
from ...builds.manifest import Part
from ..toolchain.nvcc import INFOS, ToolchainError, gxx_version

if TYPE_CHECKING:
    from ..toolchain.nvcc import Toolchain
    from ..toolchain.torch_headers import TorchHeaders

NVIDIA: Final = "NVIDIA CUDA Toolkit End User License Agreement"
GCC: Final = "GPL-3.0-or-later WITH GCC-exception-3.1"


class Packages(NamedTuple):
    """PyPI names of the packages with NVIDIA's components, for one major CUDA version."""

    runtime: str
    crt: str
    nvvm: str


CUDA_13: Final = Packages("nvidia-cuda-runtime", "nvidia-cuda-crt", "nvidia-nvvm")
CUDA_12: Final = Packages("nvidia-cuda-runtime-cu12", *["nvidia-cuda-nvcc-cu12"] * 2)

# Keys of the components in the installer's version.json; the first key that exists is used.
_INSTALLED: Final = {
    CUDA_13.runtime: ("cuda_cudart",),
    CUDA_13.crt: ("cuda_crt", "cuda_nvcc"),
    CUDA_13.nvvm: ("libnvvm", "cuda_nvcc"),
    CUDA_12.runtime: ("cuda_cudart",),
    CUDA_12.nvvm: ("cuda_nvcc",),
}


def find_parts(folder: Path, toolchain: Toolchain, headers: TorchHeaders) -> tuple[Part, ...]:
    """Return the third-party components in the libraries of a build.

    Args:
        folder: The build folder of CMake.
        toolchain: The CUDA toolkit.
        headers: The headers of torch.
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
    """Return the path of the `libcudart_static.a` that CMake linked."""
    cache = (folder / "CMakeCache.txt").read_text(encoding="utf-8")
    for line in cache.splitlines():
        name, _, value = line.partition("=")
        if name.partition(":")[0] == "CUDART":
            return Path(value)
    message = f"`{folder / 'CMakeCache.txt'}` does not say which libcudart_static.a was linked"
    raise ToolchainError(message)


def package_version(toolchain: Toolchain, package: str) -> str:
    """Return a toolkit package's version, as recorded by pip or NVIDIA's installer.

    Without a record, return nvcc's version for a compiler package. For the runtime, return only the
    CUDA release, because its full version is unknown.
    """
    name = package.replace("-", "_")
    for place in (toolchain.home / INFOS, toolchain.home.parents[1]):
        for found in sorted(place.glob(f"{name}-*.dist-info")):
            return found.name.removeprefix(f"{name}-").removesuffix(".dist-info")
    told = _read_versions(toolchain.home / "version.json")
    versions = [told[key] for key in _INSTALLED[package] if key in told]
    is_runtime = package in {CUDA_13.runtime, CUDA_12.runtime}
    return versions[0] if versions else (toolchain.cuda if is_runtime else toolchain.nvcc)


def _read_versions(path: Path) -> dict[str, str]:
    """Map components to the versions that NVIDIA's installer recorded; empty without a record."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return {name: str(one["version"]) for name, one in data.items()}
    except (OSError, AttributeError, KeyError, TypeError, ValueError):
        return {}
