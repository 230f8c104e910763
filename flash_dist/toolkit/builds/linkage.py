"""Expected dynamic dependencies of a wheel's libraries, and compression of their images.

The runtime of CUDA 13 is linked statically. The toolkit for CUDA 12.4 on PyPI has no static
runtime: libcudart is loaded from the package nvidia-cuda-runtime-cu12, which the wheel depends on,
or from the lib folder of a conda environment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ..product import BINDING
from ..targets.devices import parse_version, toolkit_compression

if TYPE_CHECKING:
    from .manifest import Manifest

# Libraries that every glibc system has.
SYSTEM_LIBRARIES: Final = frozenset({
    "libc.so.6", "libdl.so.2", "libgcc_s.so.1", "libm.so.6", "libpthread.so.0", "librt.so.1",
    "libstdc++.so.6",
})  # fmt: skip
LOADERS: Final = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}
TORCH_LIBRARIES: Final = frozenset({"libtorch.so", "libtorch_cpu.so"})
BINDING_PATH: Final = ("$ORIGIN",)
# Relative to our package: the folder of libcudart's PyPI package, and `lib` of a conda environment.
RUNTIME_PATH: Final = ("$ORIGIN/../nvidia/cuda_runtime/lib", "$ORIGIN/../../..")


@dataclass(frozen=True)
class Linkage:
    """Expected linkage of the wheels of one toolkit on one CPU."""

    system: frozenset[str]  # libraries that any library may need
    runtime: frozenset[str] = frozenset()  # CUDA libraries that libraries with kernels need
    runtime_path: tuple[str, ...] = ()  # folders to search for them
    codec: str = "zstd"  # compression of every image

    def needs(self, library: str, manifest: Manifest, *, kernels: bool) -> frozenset[str]:
        """Return exactly the libraries that `library` must need in addition to system libraries."""
        own = self.runtime if kernels else frozenset()
        if library != BINDING:
            return own
        return own | TORCH_LIBRARIES | (frozenset(manifest.libraries) - {BINDING})

    def path(self, library: str, *, kernels: bool) -> tuple[str, ...]:
        """Return the folders that `library` must have as its search path."""
        runtime = self.runtime_path if kernels else ()
        return (*(BINDING_PATH if library == BINDING else ()), *runtime)


def expected_linkage(manifest: Manifest) -> Linkage:
    """Return the expected linkage of a wheel with this manifest."""
    system = SYSTEM_LIBRARIES | {LOADERS[manifest.arch_set.machine]}
    codec = toolkit_compression(manifest.toolkit.cuda)
    if not has_shared_runtime(manifest.toolkit.cuda):
        return Linkage(system, codec=codec)
    major = parse_version(manifest.toolkit.cuda)[0]
    return Linkage(system, frozenset({f"libcudart.so.{major}"}), RUNTIME_PATH, codec)


def has_shared_runtime(cuda: str) -> bool:
    """Tell if wheels for a CUDA version load libcudart from outside the wheel."""
    return parse_version(cuda)[0] < 13  # noqa: PLR2004 - the first major whose whole runtime is on PyPI


# Requirements of every wheel in addition to torch, as in pyproject.toml.
REQUIREMENTS: Final = ("packaging", "rich", "backports.zstd; python_version < '3.14'")

# Optional requirements of a wheel whose project lists `optional-dependencies` as dynamic.
# `verify --key` needs them.
EXTRAS: Final = {"sign": ("cryptography", "securesystemslib<2,>=1.3")}


def extra_requirements() -> tuple[str, ...]:
    """Return the optional requirements, as METADATA has them."""
    return tuple(f'{one}; extra == "{name}"' for name, ones in EXTRAS.items() for one in ones)


def requirements_of(manifest: Manifest) -> tuple[str, ...]:
    """Return the requirements in METADATA of a wheel with this manifest, except optional ones."""
    runtime = runtime_requirements(manifest.toolkit.cuda)
    return (f"torch>={manifest.torch_min}", *REQUIREMENTS, *manifest.dependencies, *runtime)


def runtime_requirements(cuda: str) -> tuple[str, ...]:
    """Return the CUDA packages that wheels for a CUDA version require; empty from CUDA 13 on."""
    if not has_shared_runtime(cuda):
        return ()
    major, minor = parse_version(cuda)
    return (f"nvidia-cuda-runtime-cu{major}>={major}.{minor},<{major + 1}",)
