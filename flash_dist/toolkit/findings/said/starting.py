"""Entries that explain failures to start CUDA although the driver is installed.

Doctor looks the entries up by the code that `cuInit` returned. Sources: CUDA driver API, "Data
types" (CUresult); CUDA 12.9 release notes, "Known issues" (KASLR and HMM); Multi-Process Service
guide; NVIDIA GPU debug guidelines (ECC, Xid); threads on seccomp and 304, such as
abetlen/llama-cpp-python 645.
"""

from __future__ import annotations

from typing import Final

from ...product import PROGRAM
from ..entry import Entry

CUDA_STUB: Final = Entry(
    "CUDA error 34: the toolkit's stub is loaded in place of the driver",
    "A CUDA toolkit has an empty libcuda.so to link against, in a folder `stubs`. That folder is "
    "in LD_LIBRARY_PATH or in the loader's cache, before the driver's, or the driver is not "
    "installed.",
    "Take the folder that ends in `stubs` out of LD_LIBRARY_PATH and `/etc/ld.so.conf.d`, then "
    "run `sudo ldconfig`. A link step finds it by LIBRARY_PATH or `-L` instead.",
    codes=(34,),
)

MPS_UNREACHABLE: Final = Entry(
    "CUDA errors 805 to 810: the MPS daemon does not serve this process",
    "The Multi-Process Service shares a GPU among processes. Its daemon's folder is there "
    "(CUDA_MPS_PIPE_DIRECTORY, else `/tmp/nvidia-mps`), so CUDA contacts it. But it was stopped, "
    "belongs to another user, is full, or is outside of this container.",
    "Restart it as the user who runs the program: `nvidia-cuda-mps-control -d`. Without MPS: "
    "`echo quit | nvidia-cuda-mps-control`, and `unset CUDA_MPS_PIPE_DIRECTORY`. A container "
    "needs that folder mounted and `--ipc=host`.",
    codes=(805, 806, 807, 808, 809, 810),
    said="CUDA error {number}: the MPS daemon does not serve this process",
)

ECC_ERROR: Final = Entry(
    "CUDA error 214: the GPU's memory has an error that ECC cannot correct",
    "Cells of the memory failed. It is a fault of the hardware, neither of the program nor of its "
    "packages. The GPU refuses work until it is reset, which replaces rows or pages that failed.",
    "End what uses the GPU, then `sudo nvidia-smi --gpu-reset -i N`, or reboot. If it happens "
    "again, have the GPU replaced: `nvidia-smi -q -d ECC,ROW_REMAPPER` shows the details that the "
    "vendor asks for.",
    messages=("uncorrectable ECC error encountered",),
    codes=(214,),
)

UVM_NOT_READY: Final = Entry(
    "CUDA error 3: the driver's memory module does not start",
    "cuInit fails, although `nvidia-smi` works. On some Linux kernels that are loaded at a random "
    "place (KASLR) `nvidia_uvm` cannot set up heterogeneous memory (HMM), as NVIDIA's release "
    "notes say. Or nvidia_uvm is of another release than the driver.",
    "As root write `options nvidia_uvm uvm_disable_hmm=1` into `/etc/modprobe.d/uvm.conf`, then "
    "reboot. `sudo dmesg | grep -i uvm` shows what the module said.",
    messages=(
        "cuInit failed with CUDA_ERROR_NOT_INITIALIZED (3)",
        "cuInit failed with error 3",
        "Call to cuInit results in CUDA_ERROR_NOT_INITIALIZED",
        "cuInit(0) failed -> CUDA_ERROR_NOT_INITIALIZED",
        "cuInit(0) failed - CUDA_ERROR_NOT_INITIALIZED",
    ),
)

CUDA_NOT_INITIALIZED: Final = Entry(
    "CUDA error 3: CUDA was not initialized in this process",
    "Most often this is a worker process: its parent used CUDA before it forked, and a forked "
    "child cannot use it. If a fresh process fails as well, the driver is at fault.",
    'Start workers by `multiprocessing_context="spawn"` of DataLoader, and create no CUDA tensors '
    f"in a Dataset. `{PROGRAM} doctor` asks the driver in a fresh process.",
    codes=(3,),
)

START_MEMORY: Final = Entry(
    "CUDA error 2: the driver gets no host memory at start",
    "cuInit reserves more address space than the GPU has memory, before it uses any GPU memory. A "
    "limit of this process (`ulimit -v`, a job system, a container) or a full host forbids it.",
    "`ulimit -v unlimited` in the shell or job that starts the program; `free -h` shows whether "
    "the host itself is full.",
    messages=(
        "cuInit failed with CUDA_ERROR_OUT_OF_MEMORY (2)",
        "cuInit failed with error 2",
        "Call to cuInit results in CUDA_ERROR_OUT_OF_MEMORY",
        "failed call to cuInit: CUDA_ERROR_OUT_OF_MEMORY",
    ),
)

DEVICE_REFUSED: Final = Entry(
    "CUDA error 101: the driver cannot start a GPU that it lists",
    "cuInit reports a GPU's number as invalid: a GPU that failed or was reset, or a MIG instance "
    "that was recreated after this container started. A variable is not the cause: wrong entries "
    "of CUDA_VISIBLE_DEVICES hide GPUs without an error.",
    "`nvidia-smi -L` shows which GPUs answer. Restart a container; on the host `sudo dmesg | grep "
    "-i xid` names a GPU that failed, which a reboot resets.",
    messages=(
        "cuInit failed with CUDA_ERROR_INVALID_DEVICE (101)",
        "cuInit failed with error 101",
        (
            "cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() "
            "that might have already set an error? Error 101: invalid device ordinal"
        ),
    ),
)

SYSTEM_CALL_REFUSED: Final = Entry(
    "CUDA error 304: the system refuses a call that the driver makes",
    "A sandbox or a container's seccomp profile forbids a system call, such as memfd_create, or "
    "opening `/dev/nvidia*`. If the error comes later, host memory cannot be pinned.",
    "Try `docker run --gpus all --security-opt seccomp=unconfined`: if it works then, allow the "
    f"call in the profile. `strace -f {PROGRAM} doctor` shows which one fails.",
    codes=(304,),
)

GPU_UNAVAILABLE: Final = Entry(
    "CUDA error 46: the GPU is busy or not accessible",
    "Its compute mode allows one process (`Exclusive_Process`) and one is running, or it allows "
    "none (`Prohibited`). A job without access to the GPU gets the same error.",
    "`nvidia-smi` lists the processes: end the one that is left over, or take another GPU by "
    "CUDA_VISIBLE_DEVICES. `nvidia-smi -q -d COMPUTE` shows the mode; "
    "`sudo nvidia-smi -i N -c DEFAULT` lets several processes in.",
    messages=("all CUDA-capable devices are busy or unavailable",),
    codes=(46, 216),
    said="CUDA error {number}: the GPU is busy or not accessible",
)

GPU_LICENCE: Final = Entry(
    "CUDA error 102: the virtual GPU has no licence",
    "An NVIDIA vGPU needs a licence from the licence server of the machine's operator.",
    "`nvidia-smi -q | grep -i licen` shows its state; `sudo systemctl restart nvidia-gridd` "
    "requests it again.",
    codes=(102,),
)

LIBCUDA_EMPTY: Final = Entry(
    "libcuda.so.1 is an empty file",
    "The container runtime puts the driver's library over a file of that name when it starts with "
    "a GPU. An image that was saved from such a container keeps only its name.",
    "Start the container with the GPU runtime: `docker run --gpus all`. In the image delete the "
    "empty `libcuda.so.*`.",
    messages=("libcuda.so.1: file too short",),
)

GPU_LOST: Final = Entry(
    "The GPU has fallen off the bus",
    "The host cannot reach it (Xid 79): power, heat, a riser or cable, or the GPU itself. No "
    "program can cause or repair that.",
    "Switch the machine off and on again; a reboot may not be enough. If it happens again, check "
    "power and temperature (`nvidia-smi -q -d POWER,TEMPERATURE`) and the seat of the card.",
    messages=("GPU is lost. Reboot the system", "GPU has fallen off the bus"),
)

INFOROM_CORRUPTED: Final = Entry(
    "The GPU's infoROM, which stores its settings, is damaged",
    "The infoROM keeps serial number, ECC mode and retired pages. The GPU computes without it, but "
    "its count of memory errors cannot be trusted.",
    "Nothing at once: the warning stops no program. Have the vendor check the GPU; `nvidia-smi "
    "-q` shows which one it is.",
    messages=("infoROM is corrupted",),
)
