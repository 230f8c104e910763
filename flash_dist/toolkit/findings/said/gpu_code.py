"""Entries that explain messages about GPU code that does not run here.

Sources: CUDA runtime and driver API, "Data types" (error texts, names and numbers); xformers and
CUTLASS (the texts that their stubs print).
"""

from __future__ import annotations

from typing import Final

from ...product import PROGRAM
from ..entry import Entry

PRINTF_STUB: Final = Entry(
    "A kernel's stub was called",
    "xformers and CUTLASS compile a kernel for every target of a library. For targets that it "
    "does not support, its body only prints a message. The dispatcher chose it for another GPU "
    "than the one that ran it, or the library has nothing newer for this GPU.",
    "Let the program see GPUs of only one model (CUDA_VISIBLE_DEVICES), or call on each GPU only "
    f"what supports it. `{PROGRAM} inspect --level coverage --kernel NAME FILE` shows "
    "the targets for which a kernel is real.",
    messages=("kernel `{kernel}` is for sm{first}-sm{last}, but was built for sm{built}",),
    said="the kernel that ran is a stub: {kernel} was compiled for sm_{built}, where its body "
    "is this message; it has one from sm_{first} to below sm_{last}",
)

ARCH_CONDITIONAL_STUB: Final = Entry(
    "A kernel was compiled without the suffix it needs",
    "Some matrix instructions exist on only one architecture and need a target with a suffix, "
    "sm_90a, sm_100a or sm_120a. Compiled for sm_90, the kernel's body is a message.",
    "Build the library for 9.0a instead of 9.0 (10.0a instead of 10.0, 12.0a instead of 12.0).",
    messages=("Arch conditional MMA instruction used",),
)

NO_KERNEL_IMAGE: Final = Entry(
    "CUDA error 209: no kernel image is available",
    "The library holds no code that this GPU can run: neither machine code of its major with an "
    "equal or older minor, nor PTX. The variables CUDA_FORCE_PTX_JIT and CUDA_DISABLE_PTX_JIT, "
    "newer CUDA_FORCE_JIT and CUDA_DISABLE_JIT, can disable code that exists.",
    f"`{PROGRAM} doctor --package NAME` judges every library of a package. Install "
    "a build for this compute capability, or build it with TORCH_CUDA_ARCH_LIST set to it.",
    messages=(
        "no kernel image is available for execution on the device",
        "no kernel image is available",
    ),
    codes=(209,),
)

INVALID_DEVICE_FUNCTION: Final = Entry(
    "CUDA error 98: the kernel does not exist for this GPU",
    "The program calls a kernel without code for this GPU, or whose library was loaded twice or "
    "replaced by one of another build. Old programs print the number 8.",
    f"`{PROGRAM} inspect --level coverage FILE` shows the targets of each kernel. "
    "Compile the library for this compute capability, in a clean build folder.",
    messages=("invalid device function", "requested device function does not exist"),
    codes=(98,),
)

TORCH_LACKS_GPU: Final = Entry(
    "torch has no code for this GPU",
    "The GPU is newer, or older, than the ones that this build of torch was compiled for; the "
    "next line of the message lists them. Its first kernel fails with "
    "`no kernel image is available`.",
    "Install a build of torch whose CUDA supports the GPU: 12.8 or newer for 10.0 and 12.0, 12.6 "
    "or older for GPUs before 7.5. https://pytorch.org/get-started/locally gives the command. "
    "Reinstall packages that were compiled for the old torch.",
    messages=("sm_{target} is not compatible with the current PyTorch installation",),
    said="torch has no code for this GPU, which is sm_{target}",
)

INVALID_IMAGE: Final = Entry(
    "CUDA error 200: the kernel image is invalid",
    "The driver does not understand the image. Most often it is compressed with zstd, which nvcc "
    "uses by default from CUDA 13.0 on and drivers before 550 do not support. Or the file is "
    "damaged.",
    f"Install driver 550 or newer; `{PROGRAM} doctor --package NAME` judges every "
    "library of a package. To build with LZ4 instead: `nvcc --compress-mode=speed`.",
    messages=("device kernel image is invalid",),
    codes=(200, 300),
)

PTX_TOO_NEW: Final = Entry(
    "CUDA error 222: PTX of an unsupported toolchain",
    "The PTX was written by a newer CUDA than the driver supports. Within one CUDA major version, "
    "machine code may be newer than the driver; PTX may not.",
    "Install a newer driver, or a build that has machine code for this GPU: "
    f"`{PROGRAM} doctor --package NAME` judges every library of a package.",
    messages=(
        "the provided PTX was compiled with an unsupported toolchain",
        "PTX was compiled with an unsupported toolchain",
    ),
    codes=(222,),
)

INVALID_PTX: Final = Entry(
    "CUDA error 218: the driver cannot compile the PTX",
    "The PTX is damaged, was not found where it is loaded from, or uses instructions of a target "
    "that is newer than this GPU. PTX for sm_90a compiles only on 9.0.",
    f"`{PROGRAM} inspect FILE` shows the targets of a library. Compile the PTX again, "
    "for this GPU or an older one.",
    messages=("a PTX JIT compilation failed",),
    codes=(218,),
)

JIT_COMPILER_ABSENT: Final = Entry(
    "The driver's PTX compiler is missing",
    "Some code exists only as PTX, and `libnvidia-ptxjitcompiler.so.1`, which compiles it, is "
    "missing. It belongs to the driver; a container gets it with the capability `compute`. CUDA's "
    "message is error 221.",
    "Start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility, or install a build "
    "that has machine code for this GPU.",
    messages=("PTX JIT compiler library not found", "ERROR_JIT_COMPILER_NOT_FOUND"),
    codes=(221,),
)

JIT_DISABLED: Final = Entry(
    "CUDA error 223: compiling PTX is disabled",
    "The library has only PTX for this GPU, and CUDA_DISABLE_PTX_JIT or CUDA_DISABLE_JIT forbids "
    "compiling it.",
    "`unset CUDA_DISABLE_PTX_JIT CUDA_DISABLE_JIT`, or install a build that has machine code for "
    "this GPU.",
    messages=("PTX JIT compilation was disabled",),
    codes=(223,),
)
