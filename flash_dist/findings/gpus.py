"""Ids of one GPU, or all of them, against the code of this build."""

from __future__ import annotations

from typing import Final

from .entry import Entry

NOT_JUDGED: Final = Entry(
    "not-judged",
    "The GPU was not judged",
    "There is no build whose code could be compared with it.",
    "Install a wheel; the finding on the build says what is missing.",
)

NO_KERNELS: Final = Entry(
    "no-kernels",
    "The build contains no kernel",
    "The library was read, and no kernel of this package is in it.",
    "Install another wheel. `python -m flash_dist inspect --level kernels FILE` lists what is "
    "in a file.",
)

NO_MATCHING_CODE: Final = Entry(
    "no-matching-code",
    "The build has no code for this GPU",
    "Machine code (SASS) runs on GPUs of the same major compute capability with an equal or "
    "newer minor: sm_80 on 8.6, not on 9.0, and sm_86 not on 8.0. Code for `sm_90a` runs on "
    "9.0 alone. PTX is compiled by the driver for equal or newer GPUs only.",
    "Install the arch set that the sentence names, or build one for exactly these GPUs: in a "
    "clone by `TORCH_CUDA_ARCH_LIST=8.6 nox -s build_wheels`, elsewhere by "
    "`TORCH_CUDA_ARCH_LIST=8.6 pip install FILE` with the sources of a release.",
)

HARDWARE_TOO_OLD: Final = Entry(
    "hardware-too-old",
    "The GPU lacks the instructions",
    "The kernels use matrix instructions that begin with compute capability 7.5 (Turing). "
    "CUDA 13 has no compiler for older GPUs either.",
    "Use a GPU of compute capability 7.5 or newer: no build can serve this one.",
)

UNVERIFIED: Final = Entry(
    "unverified",
    "The code may run, but nobody promises it",
    "SASS of the same major is promised to run among discrete GPUs, but neither from those to "
    "Jetson and Drive nor the other way. Or PTX was written by a CUDA that is newer than this "
    "flash_dist knows.",
    "`python -m flash_dist selftest` on that GPU shows whether it runs and whether its numbers "
    "are right. A build with the GPU's own target, or with PTX, is sure.",
)

DTYPE_NOT_BUILT: Final = Entry(
    "dtype-not-built",
    "A dtype has no kernels in this build",
    "The GPU could compute with the dtype, and the build has no kernel for it. Calls with it "
    "raise an error; the others work.",
    "Install a build whose targets include one from that dtype on: bfloat16 begins at 8.0.",
)

UNKNOWN_GPU: Final = Entry(
    "unknown-gpu",
    "No GPU of this compute capability is known",
    "The what-if was asked about a number that no GPU has, as far as this version knows. It is "
    "judged by the general rules, with assumed shared memory.",
    "Look for a typing error: `nvidia-smi --query-gpu=compute_cap --format=csv` shows a real one.",
)

SOME_GPUS_UNSERVED: Final = Entry(
    "some-gpus-unserved",
    "Some GPUs of this machine can use the build, some cannot",
    "A program that spreads over all of them fails on those that the build has no code for.",
    "Show the program the others only, with the CUDA_VISIBLE_DEVICES that the fix names, or "
    "install the one arch set that covers all. With GPUs of several kinds set "
    "CUDA_DEVICE_ORDER=PCI_BUS_ID, so that the numbers are those of nvidia-smi.",
)
