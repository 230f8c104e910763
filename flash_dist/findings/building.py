"""Ids of messages of pip, uv, nvcc and Triton: packages that are built or installed here.

Sources: torch.utils.cpp_extension and the setup.py of flash-attention and SageAttention; nvcc and
the headers of CUDA; pip and uv; Triton.
"""

from __future__ import annotations

from typing import Final

from .entry import Entry

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
    messages=("Unsupported gpu architecture '{target}'",),
    said="this nvcc does not compile for {target}",
)

HOST_COMPILER_TOO_NEW: Final = Entry(
    "host-compiler-too-new",
    "g++ is newer than this CUDA knows",
    "nvcc hands the host's part of a file to g++ and refuses versions that came after it.",
    "Install an older g++ beside it and name it: `export CC=gcc-12 CXX=g++-12`, in the version "
    "that the message allows. A newer toolkit knows newer ones.",
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
    "This is the last line of it. The cause is the first `error` or `FAILED` above, or the word "
    "`Killed`, which means lack of memory.",
    "Read upwards, and give that line to `python -m flash_dist explain MESSAGE`, or the whole log: "
    "`python -m flash_dist explain - < LOG`. A wheel of the package for your torch spares the "
    "build.",
    messages=("ninja: build stopped: subcommand failed", "Command '['ninja', '-v'"),
)

WHEEL_NOT_SUPPORTED: Final = Entry(
    "wheel-not-supported",
    "The wheel is for another Python, system or processor",
    "The end of its name tells what it is for: `cp310` is Python 3.10, `manylinux_2_34` is glibc "
    "2.34 or newer, `win_amd64` is Windows; `cp313t` is a free-threaded Python, which takes no "
    "others, `abi3` included.",
    "`python -m pip debug --verbose` lists the tags that this Python takes. Choose the file that "
    "ends in one of them.",
    messages=(
        "{wheel} is not a supported wheel on this platform",
        "A URL dependency is incompatible with the current platform",
    ),
    said="this Python or system takes no such wheel: {wheel}",
)

NO_MATCHING_DISTRIBUTION: Final = Entry(
    "no-matching-distribution",
    "The index has nothing of that version for this Python and system",
    "pip looked in the indexes that it was given. Either the version was never there, or its "
    "wheels are for other versions of Python (a free-threaded one counts as another), other "
    "processors or a newer glibc; `from versions: none` often means a wrong index.",
    "`python -m pip download --no-deps -v NAME` says of each file why it was passed over. "
    "A `+cu128` behind a version needs the index that has it, by `--index-url`.",
    messages=("No matching distribution found for {requirement}",),
    said="no index that was asked has {requirement} for this Python and system",
)

TRITON_TOO_OLD: Final = Entry(
    "triton-too-old",
    "Triton's assembler does not know this GPU",
    "Triton brings a ptxas of its own, which is older than the GPU. torch.compile and all kernels "
    "written in Triton fail with it, while compiled kernels work.",
    "Upgrade torch together with its Triton: `pip install --upgrade torch`. A newer ptxas of a "
    "toolkit does as well: `export TRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas`.",
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
    "On Linux `pip install triton`, in the version that torch asks for; on Windows there is a "
    "build of others, `triton-windows`.",
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
