"""Ids of messages of nvcc, g++, the linker and Triton: what is compiled here.

Sources: torch.utils.cpp_extension and the setup.py of flash-attention and SageAttention; nvcc and
the headers of CUDA and torch; Triton.
"""

from __future__ import annotations

from typing import Final

from ..entry import Entry

CUDA_TOOLKIT_ABSENT: Final = Entry(
    "cuda-toolkit-absent",
    "There is no CUDA toolkit to build with",
    "The package is compiled here, because it has no wheel for this Python, torch and system. "
    "That needs nvcc, which neither the driver nor torch brings.",
    "Look for a wheel of the package first. Otherwise install the toolkit in the version of "
    "your torch (`python -c 'import torch; print(torch.version.cuda)'`), and set CUDA_HOME to its "
    "folder; of NVIDIA's images take one with `devel` in its name.",
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
    "cuda-versions-differ",
    "The toolkit is of another CUDA than torch",
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
    said="the toolkit is CUDA {toolkit}, and torch was built with CUDA {torch}",
)

NVCC_LACKS_GPU: Final = Entry(
    "nvcc-lacks-gpu",
    "This nvcc does not compile for the GPU",
    "The toolkit is older than the GPU, or so new that it has dropped it: sm_100 and sm_120 need "
    "CUDA 12.8, and CUDA 13 begins with 7.5.",
    "Take another toolkit, or set TORCH_CUDA_ARCH_LIST to what this one compiles: "
    "`nvcc --list-gpu-arch` shows it.",
    messages=("Unsupported gpu architecture '{target}'", "Unsupported gpu architecture"),
    said="this nvcc does not compile for {target}",
)

HOST_COMPILER_TOO_NEW: Final = Entry(
    "host-compiler-too-new",
    "g++ is newer than this CUDA knows",
    "nvcc hands the host's part of a file to g++ and refuses versions that came after it.",
    "Install an older g++ beside it and name it: "
    "`export CC=gcc-12 CXX=g++-12 CUDAHOSTCXX=g++-12`, in the version that the message allows. A "
    "newer toolkit knows newer ones.",
    messages=("unsupported GNU version", "unsupported clang version"),
)

BUILD_KILLED: Final = Entry(
    "build-killed",
    "The build was killed, most often for lack of memory",
    "A file of flash-attention takes several GB to compile, and as many are compiled at once as "
    "there are cores. `dmesg` shows what the system killed; in a container its limit counts.",
    "Fewer at once: `MAX_JOBS=2 pip install --no-build-isolation NAME`.",
    messages=(
        "died due to signal 9",
        "Killed signal terminated program",
        "died due to signal 15",
    ),
)

BUILD_FAILED: Final = Entry(
    "build-failed",
    "A package was compiled here, and a compiler failed",
    "This is one of its last lines. The cause is the first `error` or `FAILED` above, or the word "
    "`Killed`, which means lack of memory.",
    "Read upwards, and give that line to `python -m flash_dist explain MESSAGE`, or the whole log: "
    "`python -m flash_dist explain - < LOG`. A wheel of the package for your torch spares the "
    "build.",
    messages=(
        "ninja: build stopped: subcommand failed",
        "Command '['ninja', '-v'",
        "Failed building wheel for {package}",
        "collect2: error: ld returned 1 exit status",
    ),
)

TRITON_TOO_OLD: Final = Entry(
    "triton-too-old",
    "Triton's assembler does not know this GPU",
    "Triton brings a ptxas of its own, which is older than the GPU. torch.compile and all kernels "
    "written in Triton fail with it, while compiled kernels work.",
    "Name the ptxas of a newer toolkit, which leaves all packages alone: "
    "`export TRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas`, and TRITON_PTXAS_BLACKWELL_PATH with "
    "the same where the message says `ptxas-blackwell`. A newer torch brings a newer Triton; what "
    "was compiled for the old torch is then to be installed again.",
    messages=(
        "Value '{target}' is not defined for option 'gpu-name'",
        "'sm_{target}' is not a recognized processor for this target",
    ),
)

TRITON_ABSENT: Final = Entry(
    "triton-absent",
    "Triton is not installed",
    "torch for Linux brings it, torch for Windows does not, and a torch without CUDA neither. "
    "SageAttention 1 and torch.compile need it.",
    "On Linux install the version that torch asks for, which "
    "`python -c 'import importlib.metadata as m; print(m.requires(\"torch\"))'` shows: "
    "`pip install triton==VERSION`. On Windows there is a build of others, `triton-windows`.",
    messages=("No module named 'triton'", "Cannot find a working triton installation"),
)

TRITON_NO_COMPILER: Final = Entry(
    "triton-no-compiler",
    "Triton finds no C compiler",
    "It compiles a small module of C when a kernel is first called. Slim images and Windows have "
    "no compiler.",
    "Install gcc, or name one: `export CC=gcc`. In an image add `gcc` and the headers of Python.",
    messages=("Failed to find C compiler. Please specify via CC",),
)

COMPILER_CRASHED: Final = Entry(
    "compiler-crashed",
    "A compiler of CUDA crashed",
    "ptxas, cicc or cudafe++ died of an error of its own (signal 11), not for what the source "
    "says. Where memory is short it may show so, too.",
    "Build again with `MAX_JOBS=1`. If the same file fails again, take a newer toolkit of the same "
    "major version: it is a bug of the compiler.",
    messages=("died due to signal 11", "died due to signal 6"),
)

LAUNCH_BOUNDS: Final = Entry(
    "launch-bounds",
    "A kernel's launch bounds do not fit this GPU",
    "`__launch_bounds__(threads, blocks)` asks for more threads per multiprocessor than the target "
    "has: 2048 on 8.0, 9.0 and 10.0, 1536 on 8.6, 8.9 and 12.0, 1024 on 7.5. A warning is "
    "harmless: the second number is ignored.",
    "Where it is an error, leave that target out of TORCH_CUDA_ARCH_LIST, or take a version of the "
    "package that knows it.",
    messages=("Value of threads per SM for entry",),
)

LIBCUDA_NOT_LINKED: Final = Entry(
    "libcuda-not-linked",
    "The linker does not find libcuda",
    "libcuda.so belongs to the driver, which an image or a login node does not have; the toolkit "
    "brings a stub to link against. Triton and many builds ask for it.",
    'To build: `export LIBRARY_PATH="$CUDA_HOME/lib64/stubs:$LIBRARY_PATH"`. Where a program runs '
    "(Triton, torch.compile) the driver must be there: `/sbin/ldconfig -p | grep libcuda`. Never "
    "put `stubs` into LD_LIBRARY_PATH.",
    messages=("cannot find -lcuda",),
)

CPP_TOO_OLD: Final = Entry(
    "cpp-too-old",
    "torch's headers want a newer C++ than the package is compiled for",
    "torch 2.1 to 2.13 need C++17, 2.14 and newer C++20, and the package's build asks for an older "
    "standard, or g++ is older than 11.",
    "Take a version of the package that knows this torch; in a build of your own replace "
    "`-std=c++17` by `-std=c++20`, for nvcc too (CUDA 12 or newer).",
    messages=(
        "#error C++{standard} or later compatible compiler is required",
        "C++{standard} or later compatible compiler is required to use",
        "You need C++{standard} to compile PyTorch",
    ),
    said="torch's headers want C++{standard}, and the package is compiled for an older one",
)

NINJA_ABSENT: Final = Entry(
    "ninja-absent",
    "ninja is not there, which torch builds extensions with",
    "It is a small program that runs compilers side by side. torch looks for it on PATH, and a "
    "build in isolation does not see one of another environment.",
    "`pip install ninja` into the environment that builds; then `ninja --version` answers.",
    messages=("Ninja is required to load C++ extensions",),
)
