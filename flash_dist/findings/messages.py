"""Ids of messages about GPU code and of failing calls, which hardly a check reports itself.

Sources: CUDA runtime and driver API, "Data types" (error texts, names and numbers); xformers and
CUTLASS (the texts that their stubs print); torch, flash-attention and SageAttention (their errors).
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
    messages=("kernel `{kernel}` is for sm{first}-sm{last}, but was built for sm{built}",),
    said="the kernel that ran is a stub: {kernel} was compiled for sm_{built}, where its body "
    "is this message; it has one from sm_{first} to below sm_{last}",
)

ARCH_CONDITIONAL_STUB: Final = Entry(
    "arch-conditional-stub",
    "A kernel was compiled without the suffix it needs",
    "Some matrix instructions exist on one architecture only and need a target with a suffix, "
    "sm_90a, sm_100a or sm_120a. Compiled for sm_90, the kernel's body is a message.",
    "Build the library for 9.0a instead of 9.0 (10.0a instead of 10.0, 12.0a instead of 12.0).",
    messages=("Arch conditional MMA instruction used",),
)

NO_KERNEL_IMAGE: Final = Entry(
    "no-kernel-image",
    "CUDA error 209: no kernel image is available",
    "The library holds no code that this GPU can run: neither machine code of its major with "
    "an equal or older minor, nor PTX. The variables CUDA_FORCE_PTX_JIT and "
    "CUDA_DISABLE_PTX_JIT, newer CUDA_FORCE_JIT and CUDA_DISABLE_JIT, can hide what is there.",
    "`python -m flash_dist doctor --package NAME` judges every library of a package. Install "
    "a build for this compute capability, or build it with TORCH_CUDA_ARCH_LIST set to it.",
    messages=(
        "no kernel image is available for execution on the device",
        "no kernel image is available",
        "cudaErrorNoKernelImageForDevice",
        "CUDA_ERROR_NO_BINARY_FOR_GPU",
    ),
)

INVALID_DEVICE_FUNCTION: Final = Entry(
    "invalid-device-function",
    "CUDA error 98: the kernel does not exist for this GPU",
    "The program calls a kernel of which it has no code for this GPU, or whose library was "
    "loaded twice or replaced by one of another build. Old programs have the number 8 for it.",
    "`python -m flash_dist inspect --level coverage FILE` shows for which targets each kernel is "
    "there. Compile the library for this compute capability, in a clean build folder.",
    messages=(
        "invalid device function",
        "cudaErrorInvalidDeviceFunction",
        "requested device function does not exist",
    ),
)

TORCH_LACKS_GPU: Final = Entry(
    "torch-lacks-gpu",
    "torch has no code for this GPU",
    "The GPU is newer, or older, than the ones that this build of torch was compiled for; the "
    "next line of the message lists them. Its first kernel fails with "
    "`no kernel image is available`.",
    "Install a build of torch whose CUDA knows the GPU: from 12.8 on for 10.0 and 12.0, up to 12.6 "
    "for GPUs before 7.5. https://pytorch.org/get-started/locally gives the command; packages "
    "that were compiled for the old torch are to be installed again.",
    messages=("sm_{target} is not compatible with the current PyTorch installation",),
    said="torch has no code for this GPU, which is sm_{target}",
)

KERNEL_NOT_BUILT: Final = Entry(
    "kernel-not-built",
    "SageAttention was built without the kernels for this GPU",
    "Its setup compiles for the GPUs that it sees, or for TORCH_CUDA_ARCH_LIST, and what was left "
    "of an older build stays in the package. The GPU itself may be able to.",
    "Uninstall it until pip finds none, then install a wheel for this GPU and torch, or build it "
    "on this machine without TORCH_CUDA_ARCH_LIST.",
    messages=("SM{target} kernel is not available. Make sure you GPUs with compute capability",),
)

INVALID_IMAGE: Final = Entry(
    "invalid-image",
    "CUDA error 200: the kernel image is invalid",
    "The driver does not understand the image. Most often it is compressed with zstd, which "
    "is what nvcc does by default from CUDA 13.0 on, and which drivers before 550 do not know; "
    "or the file is damaged.",
    "Install driver 550 or newer; `python -m flash_dist doctor --package NAME` judges every "
    "library of a package. Whoever builds it can keep to LZ4: `nvcc --compress-mode=speed`.",
    messages=(
        "device kernel image is invalid",
        "cudaErrorInvalidKernelImage",
        "CUDA_ERROR_INVALID_IMAGE",
    ),
)

PTX_TOO_NEW: Final = Entry(
    "ptx-too-new",
    "CUDA error 222: PTX of an unsupported toolchain",
    "The PTX was written by a newer CUDA than the driver's. Machine code may be newer within "
    "one major version of CUDA, PTX may not.",
    "Install a newer driver, or a build that has machine code for this GPU: "
    "`python -m flash_dist doctor --package NAME` judges every library of a package.",
    messages=(
        "the provided PTX was compiled with an unsupported toolchain",
        "PTX was compiled with an unsupported toolchain",
        "cudaErrorUnsupportedPtxVersion",
        "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
    ),
)

INVALID_PTX: Final = Entry(
    "invalid-ptx",
    "CUDA error 218: the driver cannot compile the PTX",
    "The PTX is damaged, was not found where it is loaded from, or uses instructions of a target "
    "that is newer than this GPU. PTX for sm_90a compiles on 9.0 alone.",
    "`python -m flash_dist inspect FILE` shows the targets of a library. Compile the PTX again, "
    "for this GPU or an older one.",
    messages=(
        "a PTX JIT compilation failed",
        "cudaErrorInvalidPtx",
        "CUDA_ERROR_INVALID_PTX",
    ),
)

JIT_COMPILER_ABSENT: Final = Entry(
    "jit-compiler-absent",
    "The driver's PTX compiler is missing",
    "Some code is there as PTX only, and `libnvidia-ptxjitcompiler.so.1`, which compiles it, "
    "is not. It belongs to the driver; a container gets it with the capability `compute`. "
    "CUDA's message is error 221.",
    "Start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility, or install a build "
    "that has machine code for this GPU.",
    messages=(
        "PTX JIT compiler library not found",
        "cudaErrorJitCompilerNotFound",
        "ERROR_JIT_COMPILER_NOT_FOUND",
    ),
)

JIT_DISABLED: Final = Entry(
    "jit-disabled",
    "CUDA error 223: compiling PTX is disabled",
    "The library has PTX only for this GPU, and CUDA_DISABLE_PTX_JIT or CUDA_DISABLE_JIT forbids "
    "to compile it.",
    "`unset CUDA_DISABLE_PTX_JIT CUDA_DISABLE_JIT`, or install a build that has machine code for "
    "this GPU.",
    messages=(
        "PTX JIT compilation was disabled",
        "cudaErrorJitCompilationDisabled",
        "CUDA_ERROR_JIT_COMPILATION_DISABLED",
    ),
)

FLASH_ATTENTION_GPU: Final = Entry(
    "flash-attention-gpu",
    "flash-attention has no kernels for this GPU",
    "flash-attention 2 begins with Ampere (8.0): Turing and Volta are refused, and its versions "
    "before Blackwell refuse 12.0 in the same words. flash-attention 3 begins with Hopper (9.0).",
    'Take torch\'s own attention (`attn_implementation="sdpa"` in transformers) on that GPU, or '
    "a newer flash-attention. This package begins with Turing (7.5): "
    "`python -m flash_dist select --gpu 7.5` names its build.",
    messages=(
        "FlashAttention only supports Ampere GPUs or newer",
        "FlashAttention only supports Hopper GPUs or newer",
        "FlashAttentionHopper only supports Hopper GPUs or newer",
    ),
)

FLASH_ATTN_ABSENT: Final = Entry(
    "flash-attn-absent",
    "transformers was told to use flash-attention, which is not there",
    '`attn_implementation="flash_attention_2"` needs the package flash_attn, in a version that '
    "transformers knows. Importing it failed, or it is in another environment.",
    "`python -c 'import flash_attn'` shows why it cannot be imported. Without it, ask for "
    '`attn_implementation="sdpa"`.',
    messages=(
        "FlashAttention2 has been toggled on, but it cannot be used",
        "FlashAttention-2 has been toggled on, but it cannot be used",
    ),
)

SDPA_NO_KERNEL: Final = Entry(
    "sdpa-no-kernel",
    "None of torch's attention kernels may serve this call",
    "scaled_dot_product_attention was left with the backends that `sdpa_kernel` allows, and none "
    "of them takes these tensors: their dtype, head_dim, mask or GPU. torch warns of the reasons "
    "right before.",
    "Read those warnings, or allow `SDPBackend.MATH`, which takes everything. Flash attention "
    "wants float16 or bfloat16, four dimensions, and no arbitrary mask.",
    messages=("No available kernel. Aborting execution",),
)

XFORMERS_NO_OPERATOR: Final = Entry(
    "xformers-no-operator",
    "None of xformers' kernels serves this call",
    "The lines below the message say for each kernel why not: the GPU is too old or too new for "
    "it, the dtype or mask is not served, or the kernel was not built (`operator wasn't built`).",
    "For `operator wasn't built` install the xformers that belongs to this torch. For a GPU that "
    "is too new, a newer one, or torch's scaled_dot_product_attention.",
    messages=("No operator found for `{operator}` with inputs",),
)

FLEX_MASK_DEVICE: Final = Entry(
    "flex-mask-device",
    "A mask lies on another GPU than the queries",
    "With layers spread over several GPUs, a BlockMask or a tensor that its mask_mod reads was "
    "made on the first one and is used on the second. An older torch fails while compiling, "
    "a newer one names the two devices.",
    "Make one mask for each GPU, with tensors of that GPU: `block_mask.to(device)`. A BlockMask of "
    "this package is planned on the host and serves all of them.",
    messages=(
        "Expect q/k/v and block_mask to be on the same device",
        "'MultiOutput' object has no attribute 'inner_fn' target: flex_attention",
    ),
)

DEVICE_ASSERT: Final = Entry(
    "device-assert",
    "CUDA error 710: a kernel's own check failed",
    "A kernel found a value that it does not take, nearly always an index outside of its tensor: "
    "a token that is not in the vocabulary, a class that does not exist. The error is told at a "
    "later call than the one at fault, and the process has lost the GPU.",
    "A line above it says which assertion failed. Run again with CUDA_LAUNCH_BLOCKING=1, which "
    "names the call, or on the CPU, which names the value.",
    messages=("device-side assert triggered", "cudaErrorAssert", "CUDA_ERROR_ASSERT"),
)

ILLEGAL_ADDRESS: Final = Entry(
    "illegal-address",
    "CUDA error 700: a kernel read or wrote outside of its memory",
    "A kernel has a bug, or was given something else than it believes: lengths that do not fit "
    "the tensor (cu_seqlens), a tensor of another GPU, memory that is freed already. The error "
    "is told at a later call than the one at fault.",
    "Run again with CUDA_LAUNCH_BLOCKING=1, which names the call, and then under "
    "`compute-sanitizer`, which names the kernel. For calls of this package FLASH_DIST_CHECK=1 "
    "looks at cu_seqlens.",
    messages=(
        "an illegal memory access was encountered",
        "cudaErrorIllegalAddress",
        "CUDA_ERROR_ILLEGAL_ADDRESS",
    ),
)

OUT_OF_MEMORY: Final = Entry(
    "out-of-memory",
    "The GPU's memory is full",
    "The message says how much was asked for, what is free, and what torch itself holds. Where "
    "much is `reserved but unallocated`, it is in pieces; where torch holds little, another "
    "process has it, which `nvidia-smi` lists.",
    "Take a smaller batch or a shorter sequence, or attention that keeps no scores. "
    "`export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` helps against pieces.",
    messages=(
        "CUDA out of memory",
        "CUDA error: out of memory",
        "CUDA failed with error out of memory",
        "cudaMalloc failed: out of memory",
        "cudaErrorMemoryAllocation",
        "CUDA_ERROR_OUT_OF_MEMORY",
    ),
)

FORKED_PROCESS: Final = Entry(
    "forked-process",
    "CUDA was used before the process was forked",
    "A child that is forked cannot use the CUDA of its parent. The parent made a tensor on the "
    "GPU, or asked for one, before it started workers.",
    'Start workers by `torch.multiprocessing.set_start_method("spawn")`, or leave CUDA alone '
    "until they run: `flash_dist.check()` asks the driver in a process of its own.",
    messages=("Cannot re-initialize CUDA in forked subprocess",),
)

NOT_DETERMINISTIC: Final = Entry(
    "not-deterministic",
    "torch has no deterministic kernel for this operation",
    "`torch.use_deterministic_algorithms(True)` forbids kernels whose result may differ from run "
    "to run, and this operation has no other one on the GPU in this version of torch.",
    "Upgrade torch, which gets more of them, or let this one be: `warn_only=True`. Attention of "
    "this package is bit-equal from run to run, forward and backward.",
    messages=("{operation} does not have a deterministic implementation",),
    said="torch has no deterministic kernel for {operation}",
)

CUBLAS_WORKSPACE: Final = Entry(
    "cublas-workspace",
    "cuBLAS is deterministic only with a fixed workspace",
    "`torch.use_deterministic_algorithms(True)` asks for the same bits in every run, and cuBLAS "
    "gives them once CUBLAS_WORKSPACE_CONFIG is set, before the program starts.",
    "`export CUBLAS_WORKSPACE_CONFIG=:4096:8`, or `:16:8`, which takes less memory.",
    messages=("this operation is not deterministic because it uses CuBLAS",),
)

BITSANDBYTES_SETUP: Final = Entry(
    "bitsandbytes-setup",
    "bitsandbytes has no library for this CUDA, or it does not load",
    "It ships a library for each version of CUDA and takes that of torch. There is none for "
    "this version, or the loader refused it; the lines before the message say which.",
    "`pip install --upgrade bitsandbytes`, then `python -m bitsandbytes` shows what it looks for. "
    "BNB_CUDA_VERSION that is still set from another torch is to be unset.",
    messages=(
        "CUDA Setup failed despite GPU being available",
        "CUDA Setup failed despite CUDA being available",
    ),
)
