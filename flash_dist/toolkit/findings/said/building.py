"""Entries that explain messages of compilers and builds: nvcc, g++, the linker and Triton.

Sources: torch.utils.cpp_extension and the setup.py of flash-attention and SageAttention; nvcc and
the headers of CUDA and torch; Triton.
"""

from __future__ import annotations

from typing import Final

from ...product import PROGRAM
from ..entry import Entry

CUDA_TOOLKIT_ABSENT: Final = Entry(
    "No CUDA toolkit was found for the build",
    "The package is compiled here, because it has no wheel for this Python, torch and system. "
    "That needs nvcc, which comes with neither the driver nor torch.",
    "Look for a wheel of the package first. Otherwise install the toolkit in the version of your "
    "torch (`python -c 'import torch; print(torch.version.cuda)'`), and set CUDA_HOME to its "
    "folder; of NVIDIA's images use one with `devel` in its name.",
    messages=(
        "CUDA_HOME environment variable is not set",
        "nvcc was not found",
        "Cannot find CUDA_HOME",
        "nvcc: command not found",
        "cuda_runtime.h: No such file or directory",
        "cuda_runtime_api.h: No such file or directory",
        "cuda.h: No such file or directory",
    ),
)

CUDA_VERSIONS_DIFFER: Final = Entry(
    "The toolkit has another CUDA version than torch",
    "An extension is compiled with the nvcc that is found first, and must have the major version "
    "of CUDA that torch was built with.",
    "Install the toolkit of torch's version and set CUDA_HOME to its folder, or a torch for the "
    "CUDA of the toolkit. `nvcc --version` and "
    "`python -c 'import torch; print(torch.version.cuda)'` show both.",
    messages=(
        (
            "The detected CUDA version ({toolkit}) mismatches the version that was used to compile "
            "PyTorch ({torch})"
        ),
        "The detected CUDA version ({toolkit}) mismatches",
    ),
    said="the toolkit is CUDA {toolkit}, but torch was built with CUDA {torch}",
)

NVCC_LACKS_GPU: Final = Entry(
    "This nvcc does not compile for the GPU",
    "The toolkit is older than the GPU, or so new that it dropped support for it: sm_100 and "
    "sm_120 need CUDA 12.8, and CUDA 13 begins with 7.5.",
    "Use another toolkit, or set TORCH_CUDA_ARCH_LIST to what this one compiles: `nvcc "
    "--list-gpu-arch` shows it.",
    messages=("Unsupported gpu architecture '{target}'", "Unsupported gpu architecture"),
    said="this nvcc does not compile for {target}",
)

HOST_COMPILER_TOO_NEW: Final = Entry(
    "g++ is newer than this CUDA knows",
    "nvcc compiles host code with g++ and refuses g++ versions that are newer than it knows.",
    "Install an older g++ as well and select it: `export CC=gcc-12 CXX=g++-12 "
    "CUDAHOSTCXX=g++-12`, in the version that the message allows. A newer toolkit accepts newer "
    "versions.",
    messages=("unsupported GNU version", "unsupported clang version"),
)

BUILD_KILLED: Final = Entry(
    "The build was killed, most often for lack of memory",
    "A file of flash-attention takes several GB to compile, and the build compiles as many at "
    "once as there are cores. `dmesg` shows what the system killed; in a container its limit "
    "counts.",
    "Compile fewer files at once: `MAX_JOBS=2 pip install --no-build-isolation NAME`.",
    messages=("died due to signal 9", "Killed signal terminated program", "died due to signal 15"),
)

BUILD_FAILED: Final = Entry(
    "A package was built here, and the compiler failed",
    "This is one of its last lines. The cause is the first `error` or `FAILED` above, or the word "
    "`Killed`, which means lack of memory.",
    f"Read upwards, and give that line to `{PROGRAM} explain MESSAGE`, or the whole "
    f"log: `{PROGRAM} explain - < LOG`. A wheel of the package for your torch needs no "
    "build.",
    messages=(
        "ninja: build stopped: subcommand failed",
        "Command '['ninja', '-v'",
        "Failed building wheel for {package}",
        "collect2: error: ld returned 1 exit status",
    ),
)

TRITON_TOO_OLD: Final = Entry(
    "Triton's assembler does not know this GPU",
    "Triton includes its own ptxas, which is older than the GPU. torch.compile and all Triton "
    "kernels fail with it; compiled kernels work.",
    "Use the ptxas of a newer toolkit, which changes no package: `export "
    "TRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas`, and TRITON_PTXAS_BLACKWELL_PATH with the same "
    "where the message says `ptxas-blackwell`. A newer torch includes a newer Triton; reinstall "
    "packages that were compiled for the old torch.",
    messages=(
        "Value '{target}' is not defined for option 'gpu-name'",
        "'sm_{target}' is not a recognized processor for this target",
    ),
)

TRITON_ABSENT: Final = Entry(
    "Triton is not installed",
    "torch for Linux with CUDA installs it; torch for Windows and torch without CUDA do not. "
    "SageAttention 1 and torch.compile need it.",
    "On Linux install the version that torch requires, which `python -c 'import "
    'importlib.metadata as m; print(m.requires("torch"))\'` shows: `pip install triton==VERSION`. '
    "For Windows there is an unofficial build, `triton-windows`.",
    messages=("No module named 'triton'", "Cannot find a working triton installation"),
)

TRITON_NO_COMPILER: Final = Entry(
    "Triton finds no C compiler",
    "Triton compiles a small C module when a kernel is first called. Slim images and Windows have "
    "no compiler.",
    "Install gcc, or select one: `export CC=gcc`. In an image add `gcc` and the headers of Python.",
    messages=("Failed to find C compiler. Please specify via CC",),
)

COMPILER_CRASHED: Final = Entry(
    "A compiler of CUDA crashed",
    "ptxas, cicc or cudafe++ crashed because of its own error (signal 11), not because of the "
    "source. Too little memory can look the same.",
    "Build again with `MAX_JOBS=1`. If the same file fails again, use a newer toolkit of the same "
    "major version: it is a bug of the compiler.",
    messages=("died due to signal 11", "died due to signal 6"),
)

LAUNCH_BOUNDS: Final = Entry(
    "A kernel's launch bounds do not fit this GPU",
    "`__launch_bounds__(threads, blocks)` asks for more threads per multiprocessor than the target "
    "has: 2048 on 8.0, 9.0 and 10.0, 1536 on 8.6, 8.9 and 12.0, 1024 on 7.5. A warning is "
    "harmless: the second number is ignored.",
    "Where it is an error, leave that target out of TORCH_CUDA_ARCH_LIST, or use a version of the "
    "package that supports it.",
    messages=("Value of threads per SM for entry",),
)

LIBCUDA_NOT_LINKED: Final = Entry(
    "The linker does not find libcuda",
    "libcuda.so belongs to the driver, which an image or a login node does not have; the toolkit "
    "has a stub to link against. Triton and many builds ask for it.",
    'To build: `export LIBRARY_PATH="$CUDA_HOME/lib64/stubs:$LIBRARY_PATH"`. Where a program runs '
    "(Triton, torch.compile) the driver must be there: `/sbin/ldconfig -p | grep libcuda`. Never "
    "put `stubs` into LD_LIBRARY_PATH.",
    messages=("cannot find -lcuda",),
)

CPP_TOO_OLD: Final = Entry(
    "torch's headers need a newer C++ than the package is compiled for",
    "torch 2.1 to 2.13 need C++17, 2.14 and newer C++20, and the package's build asks for an older "
    "standard, or g++ is older than 11.",
    "Use a version of the package that supports this torch; in a build of your own replace "
    "`-std=c++17` by `-std=c++20`, for nvcc too (CUDA 12 or newer).",
    messages=(
        "#error C++{standard} or later compatible compiler is required",
        "C++{standard} or later compatible compiler is required to use",
        "You need C++{standard} to compile PyTorch",
    ),
    said="torch's headers need C++{standard}, but the package is compiled for an older one",
)

NINJA_ABSENT: Final = Entry(
    "ninja, which torch builds extensions with, is not installed",
    "ninja is a small program that runs compilers in parallel. torch looks for it on PATH, and an "
    "isolated build does not see the one of another environment.",
    "`pip install ninja` into the environment that builds; then `ninja --version` works.",
    messages=("Ninja is required to load C++ extensions",),
)
