"""Ids of calls that fail on the GPU: faults of kernels, of memory and of the hardware.

Sources: CUDA runtime API, "Data types" (cudaError), XID errors of NVIDIA's driver.
"""

from __future__ import annotations

from typing import Final

from ..entry import Entry

DEVICE_ASSERT: Final = Entry(
    "device-assert",
    "CUDA error 710: a kernel's own check failed",
    "A kernel found a value that it does not take, nearly always an index outside of its tensor: "
    "a token that is not in the vocabulary, a class that does not exist. The error is told at a "
    "later call than the one at fault, and the process has lost the GPU.",
    "A line above it says which assertion failed. Run again with CUDA_LAUNCH_BLOCKING=1, which "
    "names the call, or on the CPU, which names the value.",
    messages=("device-side assert triggered",),
    codes=(710,),
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
    messages=("an illegal memory access was encountered",),
    codes=(700,),
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
    ),
    codes=(2,),
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

KERNEL_FAULT: Final = Entry(
    "kernel-fault",
    "CUDA errors 714 to 719: a kernel was stopped by a fault",
    "The kernel read at an address that is not a multiple of its word (716), met an instruction "
    "that this GPU refuses (715), or failed in another way (719). Most often it has a bug or was "
    "given wrong sizes; a driver or GPU that fails does the same. The error is told at a later "
    "call than the one at fault.",
    "Run again with CUDA_LAUNCH_BLOCKING=1, which names the call, and then under "
    "`compute-sanitizer`, which names the kernel. `sudo dmesg | grep -i xid` shows whether the "
    "hardware failed.",
    messages=(
        "unspecified launch failure",
        "an illegal instruction was encountered",
    ),
    codes=(714, 715, 716, 717, 718, 719),
    said="CUDA error {number}: a kernel was stopped: {text}",
)

LAUNCH_SHAPE: Final = Entry(
    "launch-shape",
    "CUDA error 9: a kernel was launched with a grid that does not exist",
    "A side of the grid or block is 0 or too large: an empty tensor, or a batch or sequence "
    "beyond 65,535 in a kernel that counts it along y or z. In a cluster launch (912) the cluster "
    "does not divide the grid or does not fit the GPU.",
    "Run again with CUDA_LAUNCH_BLOCKING=1, which names the call, and look at the shapes that go "
    "into it: leave empty tensors out, split a large batch.",
    messages=("invalid configuration argument",),
    codes=(9, 912),
    said="CUDA error {number}: a kernel was launched with a grid that does not exist",
)

LAUNCH_RESOURCES: Final = Entry(
    "launch-resources",
    "CUDA error 701: a block needs more registers than the GPU has",
    "The block has more threads than its registers allow, often in a kernel that was compiled for "
    "another GPU or in debug mode (`-G`).",
    "Call it with fewer threads per block, or compile it with `__launch_bounds__` or "
    "`--maxrregcount`. Of a package take a build for this GPU.",
    messages=("too many resources requested for launch",),
    codes=(701, 720),
    said="CUDA error {number}: {text}",
)

LAUNCH_TIMEOUT: Final = Entry(
    "launch-timeout",
    "CUDA error 702: a kernel ran longer than the display allows",
    "A GPU that draws a screen stops kernels after a few seconds (Windows: TDR, two seconds).",
    "Let a GPU without a screen compute, or give the kernel less work per call. Under Windows "
    "TdrDelay in the registry allows more time.",
    messages=("the launch timed out and was terminated",),
    codes=(702,),
)

WRONG_DEVICE_NUMBER: Final = Entry(
    "wrong-device-number",
    "CUDA error 101: there is no GPU of this number",
    "The program asks for a GPU beyond those that it sees. CUDA_VISIBLE_DEVICES numbers them anew: "
    "with `CUDA_VISIBLE_DEVICES=3` the only one is `cuda:0`. Often more processes are started than "
    "there are GPUs.",
    "`python -c 'import torch; print(torch.cuda.device_count())'` shows how many the program "
    "sees: use smaller numbers, or start only that many processes.",
    messages=("invalid device ordinal",),
    codes=(101,),
)

CAPTURE_REFUSED: Final = Entry(
    "capture-refused",
    "CUDA errors 900 to 908: a call that a CUDA graph cannot hold",
    "While a stream is captured, nothing may wait for the GPU, allocate past torch's allocator, or "
    "use a stream that is not part of it: `.item()`, `.cpu()`, prints of tensors, the first call "
    "of a library. The error may show at the end of the capture.",
    "Call the same code once or twice before the capture, on a stream of its own, and move what "
    "reads values out of it. CUDA_LAUNCH_BLOCKING=1 cannot be used in a capture.",
    messages=(
        "operation not permitted when stream is capturing",
        "operation failed due to a previous error during capture",
        "dependency created on uncaptured work in another stream",
    ),
    codes=(900, 901, 902, 903, 904, 905, 906, 907, 908),
    said="CUDA error {number}: a call that a CUDA graph cannot hold: {text}",
)

KERNEL_SYMBOL_ABSENT: Final = Entry(
    "kernel-symbol-absent",
    "CUDA error 500: the driver does not find a kernel by its name",
    "The GPU code that was loaded lacks it: it is of another build or version than the program, "
    "as after an upgrade that kept compiled files, or it was left out for this GPU.",
    "Clear what was compiled before (`~/.triton/cache`, `~/.cache/torch_extensions`), then install "
    "the package again.",
    messages=("named symbol not found",),
    codes=(500,),
)

PEER_ACCESS: Final = Entry(
    "peer-access",
    "CUDA error 217: one GPU may not read the other's memory",
    "The two have no link that allows it: GeForce cards of recent series, GPUs on different "
    "sockets, virtual machines, or an IOMMU in between.",
    "Let data go through the host: `export NCCL_P2P_DISABLE=1` for NCCL. `nvidia-smi topo -p2p r` "
    "shows which pairs can.",
    messages=("peer access is not supported between these two devices",),
    codes=(217,),
)

NVLINK_ERROR: Final = Entry(
    "nvlink-error",
    "CUDA errors 220 and 226: a link between GPUs failed",
    "An access over NVLink ended in an error of the link or of the GPU at its other end. It is "
    "nearly always hardware, or a peer process that died.",
    "Start the program again; `nvidia-smi nvlink -e` counts the errors of each link. If they "
    "grow, reset the GPUs or have the machine looked at.",
    codes=(220, 226),
    said="CUDA error {number}: {text}",
)

CONTEXT_GONE: Final = Entry(
    "context-gone",
    "CUDA errors 4, 201 and 709: CUDA has ended in this process",
    "A call comes after CUDA was shut down: at the end of the program, in a destructor or thread "
    "that outlives it, or after another error or a device reset took the context away.",
    "Look for an error before this one: it is the cause. At the end of a program join threads "
    "and delete tensors before Python exits.",
    messages=("context is destroyed",),
    codes=(4, 201, 709),
    said="CUDA error {number}: CUDA has ended in this process: {text}",
)

CUDA_NOT_SUPPORTED: Final = Entry(
    "cuda-not-supported",
    "CUDA errors 800 and 801: the call is not offered here",
    "The program uses a feature that is not here: memory pools or IPC under WSL, vGPU or "
    "some containers, multicast without NVSwitch, a newer call on an older driver.",
    "Run again with CUDA_LAUNCH_BLOCKING=1: the trace names the feature, which most programs can "
    "leave out. `python -m flash_dist doctor` names the driver and what is unusual here.",
    codes=(800, 801),
    said="CUDA error {number}: this GPU, driver or system does not offer the call: {text}",
)

CUDA_INVALID_CALL: Final = Entry(
    "cuda-invalid-call",
    "CUDA errors 1 and 400: a library called CUDA with something invalid",
    "A wrong pointer, size or handle went into CUDA: a stream or event of another GPU or process, "
    "an object that was freed, or libraries of different CUDA versions in one process.",
    "Run again with CUDA_LAUNCH_BLOCKING=1, which names the call. Where it began after an install, "
    "look for two versions of CUDA's libraries: `python -m pip list | grep -i nvidia`.",
    codes=(1, 13, 17, 21, 400),
    said="CUDA error {number}: a library called CUDA with something invalid: {text}",
)

CUDA_ERROR: Final = Entry(
    "cuda-error",
    "A call of CUDA failed",
    "The code names what CUDA objects to, and not who is at fault; no common cause of it is known "
    "here. Kernels run after their call, so that the line of the trace may be a later one.",
    "Run again with CUDA_LAUNCH_BLOCKING=1, which names the call. "
    "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html describes each code.",
    said="CUDA error {number} ({name}): {text}",
)
