"""Entries that explain calls that fail on the GPU: faults of kernels, memory and hardware.

Sources: CUDA runtime API, "Data types" (cudaError), XID errors of NVIDIA's driver.
"""

from __future__ import annotations

from typing import Final

from ...product import NAME, PROGRAM, VARIABLES
from ..entry import Entry

DEVICE_ASSERT: Final = Entry(
    "CUDA error 710: a kernel's own check failed",
    "A kernel found an invalid value, nearly always an index outside of its tensor: a token that "
    "is not in the vocabulary, or a class that does not exist. The error appears at a later call "
    "than the faulty one, and the process can no longer use the GPU.",
    "A line above it says which assertion failed. Run again with CUDA_LAUNCH_BLOCKING=1, which "
    "names the call, or on the CPU, which names the value.",
    messages=("device-side assert triggered",),
    codes=(710,),
)

ILLEGAL_ADDRESS: Final = Entry(
    "CUDA error 700: a kernel read or wrote outside of its memory",
    "A kernel has a bug or got wrong arguments: lengths that do not match the tensor "
    "(cu_seqlens), a tensor of another GPU, or freed memory. The error appears at a later call "
    "than the faulty one.",
    "Run again with CUDA_LAUNCH_BLOCKING=1, which names the call, and then under "
    f"`compute-sanitizer`, which names the kernel. For calls of this package {VARIABLES}CHECK=1 "
    "checks cu_seqlens.",
    messages=("an illegal memory access was encountered",),
    codes=(700,),
)

OUT_OF_MEMORY: Final = Entry(
    "The GPU's memory is full",
    "The message says how much was asked for, what is free, and what torch itself holds. If much "
    "is `reserved but unallocated`, the memory is fragmented. If torch holds little, another "
    "process holds it, which `nvidia-smi` lists.",
    "Use a smaller batch, a shorter sequence, or attention that does not store the scores. "
    "`export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` helps against fragmentation.",
    messages=(
        "CUDA out of memory",
        "CUDA error: out of memory",
        "CUDA failed with error out of memory",
        "cudaMalloc failed: out of memory",
    ),
    codes=(2,),
)

FORKED_PROCESS: Final = Entry(
    "CUDA was used before the process was forked",
    "A forked child cannot use the CUDA of its parent. The parent used the GPU, or asked for one, "
    "before it started workers.",
    'Start workers by `torch.multiprocessing.set_start_method("spawn")`, or do not use CUDA '
    f"before they run: `{NAME}.check()` asks the driver in a process of its own.",
    messages=("Cannot re-initialize CUDA in forked subprocess",),
)

KERNEL_FAULT: Final = Entry(
    "CUDA errors 714 to 719: a kernel was stopped by a fault",
    "The kernel used a misaligned address (716) or an illegal instruction (715), or failed in "
    "another way (719). Most often it has a bug or got wrong sizes; a failing driver or GPU looks "
    "the same. The error appears at a later call than the faulty one.",
    "Run again with CUDA_LAUNCH_BLOCKING=1, which names the call, and then under "
    "`compute-sanitizer`, which names the kernel. `sudo dmesg | grep -i xid` shows whether the "
    "hardware failed.",
    messages=("unspecified launch failure", "an illegal instruction was encountered"),
    codes=(714, 715, 716, 717, 718, 719),
    said="CUDA error {number}: a kernel was stopped: {text}",
)

LAUNCH_SHAPE: Final = Entry(
    "CUDA error 9: a kernel was launched with an invalid grid",
    "A side of the grid or block is 0 or too large: an empty tensor, or a batch or sequence "
    "beyond 65,535 in a kernel that uses y or z for it. In a cluster launch (912) the cluster "
    "does not divide the grid or does not fit the GPU.",
    "Run again with CUDA_LAUNCH_BLOCKING=1, which names the call, and look at the shapes that go "
    "into it: leave empty tensors out, split a large batch.",
    messages=("invalid configuration argument",),
    codes=(9, 912),
    said="CUDA error {number}: a kernel was launched with an invalid grid",
)

LAUNCH_RESOURCES: Final = Entry(
    "CUDA error 701: a block needs more registers than the GPU has",
    "The block has more threads than its registers allow, often in a kernel that was compiled for "
    "another GPU or in debug mode (`-G`).",
    "Call it with fewer threads per block, or compile it with `__launch_bounds__` or "
    "`--maxrregcount`. Install a build of the package for this GPU.",
    messages=("too many resources requested for launch",),
    codes=(701, 720),
    said="CUDA error {number}: {text}",
)

LAUNCH_TIMEOUT: Final = Entry(
    "CUDA error 702: a kernel ran longer than the display allows",
    "A GPU that draws a screen stops kernels after a few seconds (Windows: TDR, two seconds).",
    "Use a GPU without a display, or give the kernel less work per call. Under Windows TdrDelay "
    "in the registry allows more time.",
    messages=("the launch timed out and was terminated",),
    codes=(702,),
)

WRONG_DEVICE_NUMBER: Final = Entry(
    "CUDA error 101: there is no GPU of this number",
    "The program asks for a GPU beyond those that it sees. CUDA_VISIBLE_DEVICES renumbers them: "
    "with `CUDA_VISIBLE_DEVICES=3` the only one is `cuda:0`. Often more processes are started "
    "than there are GPUs.",
    "`python -c 'import torch; print(torch.cuda.device_count())'` shows how many the program "
    "sees: use smaller numbers, or start only that many processes.",
    messages=("invalid device ordinal",),
    codes=(101,),
)

CAPTURE_REFUSED: Final = Entry(
    "CUDA errors 900 to 908: a CUDA graph cannot capture this call",
    "While a stream is captured, nothing may wait for the GPU, allocate past torch's allocator, or "
    "use a stream that is not part of it: `.item()`, `.cpu()`, prints of tensors, the first call "
    "of a library. The error may show at the end of the capture.",
    "Call the same code once or twice before the capture, on a stream of its own, and move calls "
    "that read values out of it. CUDA_LAUNCH_BLOCKING=1 cannot be used in a capture.",
    messages=(
        "operation not permitted when stream is capturing",
        "operation failed due to a previous error during capture",
        "dependency created on uncaptured work in another stream",
    ),
    codes=(900, 901, 902, 903, 904, 905, 906, 907, 908),
    said="CUDA error {number}: a CUDA graph cannot capture this call: {text}",
)

KERNEL_SYMBOL_ABSENT: Final = Entry(
    "CUDA error 500: the driver does not find a kernel by its name",
    "The GPU code that was loaded lacks it: it is of another build or version than the program, "
    "as after an upgrade that kept compiled files, or it was left out for this GPU.",
    "Delete the compiled files (`~/.triton/cache`, `~/.cache/torch_extensions`), then install the "
    "package again.",
    messages=("named symbol not found",),
    codes=(500,),
)

PEER_ACCESS: Final = Entry(
    "CUDA error 217: one GPU cannot access the other's memory",
    "The two have no link that allows it: GeForce cards of recent series, GPUs on different "
    "sockets, virtual machines, or an IOMMU in between.",
    "Send data through the host: `export NCCL_P2P_DISABLE=1` for NCCL. `nvidia-smi topo -p2p r` "
    "shows which pairs can.",
    messages=("peer access is not supported between these two devices",),
    codes=(217,),
)

NVLINK_ERROR: Final = Entry(
    "CUDA errors 220 and 226: a link between GPUs failed",
    "An access over NVLink ended in an error of the link or of the GPU at its other end. It is "
    "nearly always hardware, or a peer process that died.",
    "Start the program again; `nvidia-smi nvlink -e` counts the errors of each link. If they "
    "grow, reset the GPUs or have the machine serviced.",
    codes=(220, 226),
    said="CUDA error {number}: {text}",
)

CONTEXT_GONE: Final = Entry(
    "CUDA errors 4, 201 and 709: CUDA was shut down in this process",
    "A call comes after CUDA was shut down: at the end of the program, in a destructor or thread "
    "that outlives it, or after another error or a device reset took the context away.",
    "Look for an error before this one: it is the cause. At the end of a program join threads "
    "and delete tensors before Python exits.",
    messages=("context is destroyed",),
    codes=(4, 201, 709),
    said="CUDA error {number}: CUDA was shut down in this process: {text}",
)

CUDA_NOT_SUPPORTED: Final = Entry(
    "CUDA errors 800 and 801: the call is not supported here",
    "The program uses a feature that is not available: memory pools or IPC under WSL, vGPU or "
    "some containers, multicast without NVSwitch, a newer call on an older driver.",
    "Run again with CUDA_LAUNCH_BLOCKING=1: the trace names the feature, which most programs can "
    f"leave out. `{PROGRAM} doctor` names the driver and anything unusual.",
    codes=(800, 801),
    said="CUDA error {number}: this GPU, driver or system does not support the call: {text}",
)

CUDA_INVALID_CALL: Final = Entry(
    "CUDA errors 1 and 400: a library passed an invalid argument to CUDA",
    "CUDA got a wrong pointer, size or handle: a stream or event of another GPU or process, an "
    "object that was freed, or libraries of different CUDA versions in one process.",
    "Run again with CUDA_LAUNCH_BLOCKING=1, which names the call. If it started after an install, "
    "look for two versions of CUDA's libraries: `python -m pip list | grep -i nvidia`.",
    codes=(1, 13, 17, 21, 400),
    said="CUDA error {number}: a library passed an invalid argument to CUDA: {text}",
)

CUDA_ERROR: Final = Entry(
    "A CUDA call failed",
    f"The code names the error but not its cause, and {NAME} knows no common cause for it. "
    "Kernels run asynchronously, so the trace may show a later line.",
    "Run again with CUDA_LAUNCH_BLOCKING=1, which names the call. "
    "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html describes each code.",
    said="CUDA error {number} ({name}): {text}",
)
