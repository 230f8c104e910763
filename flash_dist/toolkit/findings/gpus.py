"""Ids of findings about the code of this build on one GPU, or on all GPUs."""

from __future__ import annotations

from typing import Final

from ..product import NAME, PROGRAM
from .entry import Entry

NOT_JUDGED: Final = Entry(
    "The GPU was not judged",
    "There is no build whose code could be compared with it.",
    "Install a wheel; the finding on the build says what is missing.",
)

NO_KERNELS: Final = Entry(
    "The build contains no kernel",
    "The library was read, but it has no kernel of this package.",
    f"Install another wheel. `{PROGRAM} inspect --level kernels FILE` lists what is in a file.",
)

NO_MATCHING_CODE: Final = Entry(
    "The build has no code for this GPU",
    "Machine code (SASS) runs on GPUs of the same major compute capability with an equal or newer "
    "minor: sm_80 on 8.6, not on 9.0, and sm_86 not on 8.0. Code for `sm_90a` runs only on 9.0. "
    "PTX is compiled by the driver for equal or newer GPUs only.",
    "Install the arch set that the message names, or build one for exactly these GPUs: in a clone "
    "by `TORCH_CUDA_ARCH_LIST=8.6 nox -s build_wheels`, elsewhere by `TORCH_CUDA_ARCH_LIST=8.6 "
    "pip install FILE` with the sources of a release.",
)

HARDWARE_TOO_OLD: Final = Entry(
    "The GPU lacks instructions that the kernels need",
    "The kernels use matrix instructions that exist from compute capability 7.5 (Turing) on. CUDA "
    "13 cannot compile for older GPUs either.",
    "Use a GPU of compute capability 7.5 or newer: no build supports this one.",
)

UNVERIFIED: Final = Entry(
    "The code may run, but NVIDIA does not guarantee it",
    "SASS of the same major version is guaranteed to run among discrete GPUs, but not between "
    "discrete GPUs and Jetson or Drive. Or the PTX is of a CUDA version newer than this "
    f"{NAME} knows.",
    f"`{PROGRAM} selftest` on that GPU shows whether it runs and whether its numbers "
    "are right. A build with the GPU's own target, or with PTX, is certain to run.",
)

DTYPE_NOT_BUILT: Final = Entry(
    "A dtype has no kernels in this build",
    "The GPU supports the dtype, but the build has no kernel for it. Calls with it raise an "
    "error; other calls work.",
    "Install a build with a target that supports the dtype: bfloat16 needs 8.0 or newer.",
)

UNKNOWN_GPU: Final = Entry(
    "No GPU of this compute capability is known",
    "No GPU known to this version has the given compute capability. It is judged by the general "
    "rules, with an assumed amount of shared memory.",
    "Check the number: `nvidia-smi --query-gpu=compute_cap --format=csv` shows that of your GPU.",
)

SOME_GPUS_UNSERVED: Final = Entry(
    "Some GPUs of this machine can use the build, some cannot",
    "A program that uses all of them fails on those for which the build has no code.",
    "Hide the unsupported GPUs with the CUDA_VISIBLE_DEVICES that the fix names, or install the "
    "arch set that covers all GPUs. With GPUs of several models set CUDA_DEVICE_ORDER=PCI_BUS_ID, "
    "so that the numbers match nvidia-smi.",
)
