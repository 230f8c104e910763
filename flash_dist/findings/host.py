"""Ids of what is around the driver: containers, WSL, MIG, hidden GPUs, the cache of the JIT."""

from __future__ import annotations

from typing import Final

from .entry import Entry

CONTAINER_WITHOUT_GPU: Final = Entry(
    "container-without-gpu",
    "The container was started without its GPUs",
    "The host has a driver, and the container got neither its libraries nor its devices: they "
    "are put in when the container starts, not when the image is built.",
    "Start it with `docker run --gpus all` (NVIDIA Container Toolkit), "
    "`podman run --device nvidia.com/gpu=all`, or a limit `nvidia.com/gpu` in Kubernetes.",
)

CONTAINER_TOOLKIT: Final = Entry(
    "container-toolkit",
    "docker has nothing that gives GPUs to a container",
    "`--gpus` asks for NVIDIA's Container Toolkit, which is not installed on the host or not "
    "known to this docker: one of a snap, or Docker Desktop, has a configuration of its own.",
    "Install `nvidia-container-toolkit` on the host, then "
    "`sudo nvidia-ctk runtime configure --runtime=docker` and `sudo systemctl restart docker`.",
    messages=("could not select device driver",),
)

CONTAINER_LOST_GPU: Final = Entry(
    "container-lost-gpu",
    "The container may no longer open its GPUs",
    "It had them when it started. With cgroups under systemd a `systemctl daemon-reload` on the "
    "host takes devices away that docker does not list itself, and a kernel module that was "
    "loaded again has other ones.",
    "Start the container again. Name the devices (`--device /dev/nvidia0`, "
    "`--device /dev/nvidiactl`, `--device /dev/nvidia-uvm`), or use CDI, so that it does not "
    "happen again.",
    messages=("Failed to initialize NVML: Unknown Error",),
)

CAPABILITIES_WITHOUT_COMPUTE: Final = Entry(
    "capabilities-without-compute",
    "The container has the driver without its compute part",
    "NVIDIA_DRIVER_CAPABILITIES says which libraries a container gets. Without `compute` there "
    "is no libcuda.so.1, though `nvidia-smi` works with `utility` alone.",
    "Start the container with `-e NVIDIA_DRIVER_CAPABILITIES=compute,utility`, or set it in "
    "the image.",
)

LIBCUDA_MISSING: Final = Entry(
    "libcuda-missing",
    "The kernel module is loaded, libcuda.so.1 is not installed",
    "A distribution may split the driver into packages; the one with the compute libraries is "
    "not there.",
    "Install it in the release of the kernel module: libcuda1 of Debian, libnvidia-compute of "
    "Ubuntu, nvidia-driver-cuda-libs of Fedora and RHEL.",
)

LIBCUDA_NOT_ON_PATH: Final = Entry(
    "libcuda-not-on-path",
    "libcuda.so.1 lies where the loader does not look",
    "The driver's libraries are on the disk, in a folder that is neither in the loader's cache "
    "nor in LD_LIBRARY_PATH. Under WSL it is `/usr/lib/wsl/lib`; a program that asks for "
    "`libcuda.so`, without the 1, is content with nothing in the cache.",
    "Put the folder into LD_LIBRARY_PATH, or into a file of `/etc/ld.so.conf.d` and run "
    "`sudo ldconfig`.",
    messages=(
        "libcuda.so: cannot open shared object file",
        "libcuda.so: cannot open shared object file: No such file or directory",
        "Failed to dlopen libcuda.so",
    ),
)

DRIVER_MODULE_MISMATCH: Final = Entry(
    "driver-module-mismatch",
    "libcuda.so.1 and the kernel module are of different releases",
    "The driver was updated, and the old kernel module still runs, or a container was started "
    "before the update. Or a libcuda.so.1 of another release, such as that of cuda-compat, "
    "stands in front. nvidia-smi says `Driver/library version mismatch`, CUDA says error 803.",
    "Reboot, or unload and load the nvidia modules when nothing uses the GPU. Start a "
    "container again, so that it gets the present libraries, and look for other copies in "
    "LD_LIBRARY_PATH.",
    messages=(
        "Driver/library version mismatch",
        "system has unsupported display driver / cuda driver combination",
    ),
    codes=(803,),
)

DEVICE_FILES_MISSING: Final = Entry(
    "device-files-missing",
    "There are no device files of NVIDIA",
    "The kernel module is loaded, but `/dev/nvidia*`, through which programs reach the GPU, "
    "was not made or not given to this container.",
    "`sudo nvidia-smi` and `sudo nvidia-modprobe -u` make them. Start a container with the GPU "
    "runtime instead of passing single devices.",
)

DEVICE_PERMISSION: Final = Entry(
    "device-permission",
    "This user may not open the GPU's device files",
    "The permissions of `/dev/nvidia*`, or the container's device rules, forbid it, so that "
    "CUDA shows no GPU, or not all.",
    "`ls -l /dev/nvidia*` shows which group may: join it and log in again. In a container or "
    "job, ask for the GPU instead of opening the device.",
)

CUDA_COMPAT: Final = Entry(
    "cuda-compat",
    "cuda-compat is in use",
    "NVIDIA's forward-compatibility package puts a newer libcuda.so.1 on an older kernel "
    "module. GPUs are judged by the CUDA version that this library speaks, not by the release "
    "of the driver.",
    "Nothing has to be done. Some features, such as graphics interoperability, stay those of "
    "the kernel module.",
)

CUDA_COMPAT_OLDER: Final = Entry(
    "cuda-compat-older",
    "cuda-compat is older than the driver it replaces",
    "A compat library that was needed once, or came with an image, hides the newer "
    "libcuda.so.1 of the driver.",
    "Take its folder out of LD_LIBRARY_PATH and `/etc/ld.so.conf.d`, then run `sudo ldconfig`.",
)

CUDA_COMPAT_REFUSED: Final = Entry(
    "cuda-compat-refused",
    "cuda-compat does not work with this GPU or kernel module",
    "Forward compatibility is supported on data-center GPUs, and for certain pairs of kernel "
    "module and library only. Elsewhere cuInit fails with 803 or 804.",
    "Take its folder out of LD_LIBRARY_PATH and `/etc/ld.so.conf.d`, and install a driver that "
    "is new enough.",
    messages=("forward compatibility was attempted on non supported HW",),
    codes=(804,),
)

WSL_WITHOUT_DRIVER: Final = Entry(
    "wsl-without-driver",
    "WSL shows no NVIDIA driver",
    "Under WSL the driver is that of Windows, whose libraries appear in `/usr/lib/wsl/lib`. "
    "There is no libcuda.so.1: Windows has no NVIDIA driver, or this is WSL 1.",
    "Install the newest driver in Windows, then `wsl --update` and `wsl --shutdown` in a "
    "PowerShell. `wsl --list --verbose` shows whether the distribution is version 2.",
)

WSL_LINUX_DRIVER: Final = Entry(
    "wsl-linux-driver",
    "A Linux driver stands in front of WSL's",
    "The distribution has a libcuda.so.1 of its own. It looks for a kernel module that WSL "
    "does not have.",
    "Remove the NVIDIA driver packages from the distribution. Of CUDA's packages take "
    "`cuda-toolkit`, not `cuda`, which brings a driver.",
)

GPU_HIDDEN: Final = Entry(
    "gpu-hidden",
    "CUDA_VISIBLE_DEVICES hides GPUs",
    "The machine has more GPUs than this process sees. They were not judged with the others.",
    "Nothing, if it is meant so. `unset CUDA_VISIBLE_DEVICES` shows all of them; job systems "
    "set it for a reason.",
)

GPU_ORDER: Final = Entry(
    "gpu-order",
    "CUDA and nvidia-smi count the GPUs differently",
    "CUDA puts the fastest GPU first, nvidia-smi goes by place on the bus. `cuda:0` need not "
    "be GPU 0 of nvidia-smi.",
    "`export CUDA_DEVICE_ORDER=PCI_BUS_ID` makes CUDA count as nvidia-smi does.",
)

GPU_NOT_SHOWN: Final = Entry(
    "gpu-not-shown",
    "CUDA does not show a GPU that nvidia-smi has",
    "No variable hides it. It may be in compute mode `Prohibited`, have failed (an `Xid` error "
    "in `dmesg`), or be closed to this process by its container or job.",
    "`nvidia-smi -q` shows compute mode and errors of each GPU; "
    "`sudo nvidia-smi -i N -c DEFAULT` takes a prohibition back.",
)

VISIBLE_DEVICES_INVALID: Final = Entry(
    "visible-devices-invalid",
    "CUDA_VISIBLE_DEVICES names a GPU that is not here",
    "CUDA reads the list up to the first entry that it does not know, and hides all the rest.",
    "`nvidia-smi -L` lists the numbers and names. Correct the list, or unset the variable.",
)

MIG: Final = Entry(
    "mig",
    "A GPU is divided by MIG",
    "Each instance is a GPU of its own with part of the memory and the multiprocessors, and a "
    "process sees one instance. The same code runs on it.",
    "`export CUDA_VISIBLE_DEVICES=MIG-...` chooses an instance; `nvidia-smi -L` lists them.",
)

MIG_WITHOUT_INSTANCE: Final = Entry(
    "mig-without-instance",
    "A GPU is in MIG mode and has no instance",
    "In this mode CUDA shows instances only, and none was made, so that nothing of the GPU can "
    "be used.",
    "Make one (`sudo nvidia-smi mig -cgi ID -C`, with an id of `nvidia-smi mig -lgip`), or end "
    "the mode: `sudo nvidia-smi -i N -mig 0`.",
)

JIT_CACHE_DISABLED: Final = Entry(
    "jit-cache-disabled",
    "The driver keeps nothing of what it compiles",
    "Some code gets to this GPU as PTX, and CUDA_CACHE_DISABLE makes the driver compile it at "
    "every start.",
    "`unset CUDA_CACHE_DISABLE`, or install a build that has machine code for this GPU.",
)

JIT_CACHE_HOMELESS: Final = Entry(
    "jit-cache-homeless",
    "The driver's cache has no folder",
    "It lies in `~/.nv/ComputeCache` or where CUDA_CACHE_PATH says. Neither HOME nor that is "
    "set, as in services and some containers, so that PTX is compiled at every start.",
    "`export CUDA_CACHE_PATH=/path/to/folder` names one that outlives the process.",
)

JIT_CACHE_READ_ONLY: Final = Entry(
    "jit-cache-read-only",
    "The driver's cache may not be written",
    "The folder, or the one above it, is closed to this user or on a file system that is "
    "read-only, so that PTX is compiled at every start.",
    "`export CUDA_CACHE_PATH=/path/to/folder` names one that may be written; in a container "
    "mount a volume there.",
)

JIT_CACHE_FULL: Final = Entry(
    "jit-cache-full",
    "The driver's cache is on a full disk",
    "What the driver compiles cannot be kept, so that PTX is compiled at every start.",
    "Make room, delete `~/.nv/ComputeCache`, which is made anew, or name another folder in "
    "CUDA_CACHE_PATH.",
)

JIT_CACHE_SMALL: Final = Entry(
    "jit-cache-small",
    "The driver's cache is too small",
    "CUDA_CACHE_MAXSIZE bounds it to less than the compiled kernels need: old ones are dropped "
    "and compiled again.",
    "`unset CUDA_CACHE_MAXSIZE`, or give it the bytes that the fix names.",
)

TORCH_CLAIM_DIFFERS: Final = Entry(
    "torch-claim-differs",
    "torch itself and this build do not serve the same GPUs",
    "torch has kernels of its own, for targets of its own. A GPU may have code in one of the "
    "two only: a program that uses both fails there, or torch warns although its library fits.",
    "Install a torch with code for the GPU, or a build of this package with it; the sentence "
    "says which of the two lacks it.",
)
