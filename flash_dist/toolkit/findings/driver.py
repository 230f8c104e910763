"""Ids of findings about the NVIDIA driver and about variables that change which code it loads."""

from __future__ import annotations

from typing import Final

from ..product import NAME, PRODUCT
from ..targets.verdict import SMEM_VARIABLE
from .entry import Entry

DRIVER_ABSENT: Final = Entry(
    "No NVIDIA driver was found",
    "`libcuda.so.1`, the user-space part of the driver, was not found. That is normal on a "
    "machine without a GPU. A container gets the file from the host when it is started, not from "
    "its image.",
    "On a GPU machine install the driver. Start a container with the GPU runtime: "
    "`docker run --gpus all`, or a limit `nvidia.com/gpu` in Kubernetes. Do not install the "
    "driver into the image.",
    messages=(
        "Found no NVIDIA driver on your system",
        "libcuda.so.1: cannot open shared object file",
        "libcuda.so.1: cannot open shared object file: No such file or directory",
        "libnvidia-ml.so.1: cannot open shared object file",
        "libnvidia-ml.so.1: cannot open shared object file: No such file or directory",
    ),
)

DRIVER_BROKEN: Final = Entry(
    "The NVIDIA driver does not answer",
    "`libcuda.so.1` exists, but `cuInit` fails. After an update the library may be newer than the "
    "loaded kernel module. Or the module is not loaded, or this user cannot open `/dev/nvidia*`.",
    "`nvidia-smi` says which it is. Reboot after `Driver/library version mismatch`. Restart a "
    "container, so that it gets the host's current libraries.",
    messages=("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver",),
)

CUDA_UNKNOWN_ERROR: Final = Entry(
    "CUDA error 999: the driver failed without a reason",
    "If CUDA does not start, most often the module `nvidia_uvm` is not loaded or is stuck, for "
    "example after a suspend, or `/dev/nvidia-uvm` is not passed to the container. A program that "
    "sets CUDA_VISIBLE_DEVICES after its first use of CUDA gets the same error. In the middle of "
    "a run the GPU itself may have failed.",
    "`sudo modprobe nvidia_uvm` loads the module; after a suspend reboot, or `sudo rmmod "
    "nvidia_uvm` first. Restart a container. `sudo dmesg | grep -i xid` names a GPU that failed.",
    messages=("CUDA unknown error",),
    codes=(999,),
)

FABRIC_MANAGER: Final = Entry(
    "CUDA error 802: the GPUs wait for the Fabric Manager",
    "GPUs behind NVSwitch (HGX A100, H100, H200, B200) can be used once NVIDIA's Fabric Manager "
    "has set up their links. It is not installed, does not run, or is of another release than "
    "the driver.",
    "On the host install `nvidia-fabricmanager` in exactly the release of the driver, then "
    "`sudo systemctl enable --now nvidia-fabricmanager`. `nvidia-smi -q` shows the state of "
    "`Fabric`.",
    messages=("system not yet initialized",),
    codes=(802,),
)

DRIVER_TOO_OLD: Final = Entry(
    "The driver is too old for the code, or for the GPU",
    "Code of a CUDA major version needs the driver of that major: 525 for CUDA 12, 580 for "
    "CUDA 13. Images that are compressed with zstd need 550. PTX needs a driver at least as "
    "new as the CUDA that wrote it, and a GPU one of the first CUDA that compiles for it.",
    "Install a newer driver on the host, or a build for an older CUDA. On datacenter GPUs "
    "NVIDIA's package `cuda-compat` lets an older kernel module run a newer CUDA.",
    messages=(
        "CUDA driver version is insufficient for CUDA runtime version",
        "The NVIDIA driver on your system is too old",
    ),
    codes=(35, 36),
)

JIT_VARIABLE: Final = Entry(
    "A variable stops the driver from using embedded code",
    "CUDA_FORCE_PTX_JIT makes the driver ignore all machine code and compile PTX; "
    "CUDA_DISABLE_PTX_JIT forbids compiling any; CUDA_FORCE_JIT and CUDA_DISABLE_JIT do the same "
    "where those are not set. A library that lacks the other kind fails with `no kernel image is "
    "available`, torch's own too. With both set nothing loads.",
    "Unset the variable, also in the profile, container image or job script that sets it. It is "
    "meant for tests.",
)

SMEM_LIMIT: Final = Entry(
    f"{SMEM_VARIABLE} lowers the shared memory",
    "Kernels whose tiles need more shared memory per block are skipped, and smaller, slower tiles "
    "are used. Below the smallest tiles of a kernel, no variant of it remains.",
    "Unset it unless you test the tiles of a smaller GPU. If the limit is that of the GPU itself, "
    "install an arch set that is made for it.",
)

SMEM_LIMIT_MALFORMED: Final = Entry(
    f"{SMEM_VARIABLE} is not a number",
    "The variable must be a number of bytes, such as 65536. The kernels do not run with a value "
    "that they cannot read.",
    "Unset it, or set bytes without a unit.",
)

NO_GPU: Final = Entry(
    "There is no GPU to check",
    "No GPU is visible to this process, so nothing could be tested. The exit status is 3. "
    "CUDA_VISIBLE_DEVICES set to nothing, or to -1, hides all GPUs.",
    "On a GPU machine check CUDA_VISIBLE_DEVICES and the finding on the driver. `python -m "
    f"{NAME} doctor --gpu 8.6,9.0 --driver 580` judges GPUs of another machine.",
    messages=(
        "No CUDA GPUs are available",
        "CUDA driver initialization failed, you might not have a CUDA gpu",
        "no CUDA-capable device is detected",
    ),
    codes=(100,),
)

# Findings of the package's own variables.
OWN_VARIABLES: Final = tuple(Entry(**one.finding) for one in PRODUCT.variables)
