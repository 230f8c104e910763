"""Ids of error messages that `explain MESSAGE` knows, and that hardly a check reports itself.

Sources: CUDA runtime API, "Data types used by CUDA Runtime" (error texts and numbers); xformers and
CUTLASS (the texts that their stubs print); the dynamic loader of glibc.
"""

from __future__ import annotations

from typing import Final

from .entry import Entry

PRINTF_STUB: Final = Entry(
    "printf-stub",
    "A kernel's stub was called",
    "xformers and CUTLASS compile a kernel for every target of a library, and where it does "
    "not apply, its body is a message and nothing else. The dispatcher chose it by another "
    "GPU than the one that ran it, or the library has nothing newer for this GPU.",
    "Show the program GPUs of one kind only (CUDA_VISIBLE_DEVICES), or call on the others only "
    "what supports them. `python -m flash_dist inspect --level coverage --kernel NAME FILE` shows "
    "where a kernel is real.",
    pattern=r"kernel [`']?(?P<kernel>\w+)[`']? is for sm(?P<first>\d+)-sm(?P<last>\d+), "
    r"but was built for sm(?P<built>\d+)",
    said="the kernel that ran is a stub: {kernel} was compiled for sm_{built}, where its body "
    "is this message; it has one from sm_{first} to below sm_{last}",
)

ARCH_CONDITIONAL_STUB: Final = Entry(
    "arch-conditional-stub",
    "A kernel was compiled without the suffix it needs",
    "Some matrix instructions exist on one architecture only and need a target with a suffix, "
    "sm_90a or sm_100a. Compiled for sm_90, the kernel's body is a message.",
    "Build the library for 9.0a instead of 9.0 (10.0a instead of 10.0).",
    pattern="(?i)Arch conditional MMA",
)

NO_KERNEL_IMAGE: Final = Entry(
    "no-kernel-image",
    "CUDA error 209: no kernel image is available",
    "The library holds no code that this GPU can run: neither machine code of its major with "
    "an equal or older minor, nor PTX. The variables CUDA_FORCE_PTX_JIT and "
    "CUDA_DISABLE_PTX_JIT can hide what is there.",
    "`python -m flash_dist doctor --package NAME` judges every library of a package. Install "
    "a build for this compute capability, or build it with TORCH_CUDA_ARCH_LIST set to it.",
    pattern="(?i)no kernel image is available",
)

INVALID_IMAGE: Final = Entry(
    "invalid-image",
    "CUDA error 200: the kernel image is invalid",
    "The driver does not understand the image. Most often it is compressed with zstd, which "
    "is what nvcc does by default from CUDA 13.0 on, and which drivers before 550 do not know; "
    "or the file is damaged.",
    "Install driver 550 or newer; `python -m flash_dist doctor --package NAME` judges every "
    "library of a package. Whoever builds it can keep to LZ4: `nvcc --compress-mode=speed`.",
    pattern="(?i)device kernel image is invalid",
)

PTX_TOO_NEW: Final = Entry(
    "ptx-too-new",
    "CUDA error 222: PTX of an unsupported toolchain",
    "The PTX was written by a newer CUDA than the driver's. Machine code may be newer within "
    "one major version of CUDA, PTX may not.",
    "Install a newer driver, or a build that has machine code for this GPU: "
    "`python -m flash_dist doctor --package NAME` judges every library of a package.",
    pattern="(?i)PTX was compiled with an unsupported toolchain",
)

JIT_COMPILER_ABSENT: Final = Entry(
    "jit-compiler-absent",
    "The driver's PTX compiler is missing",
    "Some code is there as PTX only, and `libnvidia-ptxjitcompiler.so.1`, which compiles it, "
    "is not. It belongs to the driver; a container gets it with the capability `compute`. "
    "CUDA's message is error 221.",
    "Start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility, or install a build "
    "that has machine code for this GPU.",
    pattern="(?i)PTX JIT compiler library not found",
)

JIT_DISABLED: Final = Entry(
    "jit-disabled",
    "CUDA error 223: compiling PTX is disabled",
    "The library has PTX only for this GPU, and CUDA_DISABLE_PTX_JIT or CUDA_DISABLE_JIT forbids "
    "to compile it.",
    "`unset CUDA_DISABLE_PTX_JIT CUDA_DISABLE_JIT`, or install a build that has machine code for "
    "this GPU.",
    pattern="(?i)PTX JIT compilation was disabled",
)

UNDEFINED_SYMBOL: Final = Entry(
    "undefined-symbol",
    "A library was compiled for another version of what it uses",
    "The loader found no library that defines the symbol. Names with `c10`, `at::` or "
    "`torch::` are torch's, whose C++ interface differs between minor versions.",
    "Install the build of that package for the torch that is here, or compile it against it: "
    "`pip install --no-build-isolation --no-binary NAME NAME`.",
    pattern=r"undefined symbol: (?P<symbol>\w+)",
    said="the library was compiled for another version of what it uses: `{symbol}` is not there",
)
