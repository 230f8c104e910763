"""Ids of findings about the driver's host: containers, WSL, MIG, hidden GPUs, the JIT's cache."""

from __future__ import annotations

from typing import Final

from .entry import Entry

CONTAINER_WITHOUT_GPU: Final = Entry(
    "The container was started without its GPUs",
    "The host has a driver, but the container has neither its libraries nor its devices. They are "
    "added when the container starts, not when the image is built.",
    "Start it with `docker run --gpus all` (NVIDIA Container Toolkit), "
    "`podman run --device nvidia.com/gpu=all`, or a limit `nvidia.com/gpu` in Kubernetes.",
)

CONTAINER_TOOLKIT: Final = Entry(
    "docker cannot give GPUs to a container",
    "`--gpus` needs NVIDIA's Container Toolkit. It is not installed on the host, or this docker "
    "does not know it: docker from a snap and Docker Desktop have their own configuration.",
    "Install `nvidia-container-toolkit` on the host, then "
    "`sudo nvidia-ctk runtime configure --runtime=docker` and `sudo systemctl restart docker`.",
    messages=("could not select device driver",),
)

CONTAINER_LOST_GPU: Final = Entry(
    "The container lost access to its GPUs",
    "It had access when it started. With cgroups under systemd, `systemctl daemon-reload` on the "
    "host removes devices that docker does not list itself. A kernel module that was reloaded has "
    "new devices.",
    "Restart the container. To prevent it, name the devices (`--device /dev/nvidia0`, `--device "
    "/dev/nvidiactl`, `--device /dev/nvidia-uvm`), or use CDI.",
    messages=("Failed to initialize NVML: Unknown Error",),
)

CAPABILITIES_WITHOUT_COMPUTE: Final = Entry(
    "The container has the driver without its compute libraries",
    "NVIDIA_DRIVER_CAPABILITIES says which libraries a container gets. Without `compute` there is "
    "no libcuda.so.1, although `nvidia-smi` works with only `utility`.",
    "Start the container with `-e NVIDIA_DRIVER_CAPABILITIES=compute,utility`, or set it in "
    "the image.",
)

LIBCUDA_MISSING: Final = Entry(
    "The kernel module is loaded, but libcuda.so.1 is not installed",
    "A distribution may split the driver into packages; the one with the compute libraries is "
    "missing.",
    "Install it in the release of the kernel module: libcuda1 (Debian), libnvidia-compute "
    "(Ubuntu), nvidia-driver-cuda-libs (Fedora, RHEL).",
)

LIBCUDA_NOT_ON_PATH: Final = Entry(
    "libcuda.so.1 is in a folder that the loader does not search",
    "The driver's libraries are on the disk, in a folder that is neither in the loader's cache "
    "nor in LD_LIBRARY_PATH. Under WSL it is `/usr/lib/wsl/lib`. A program that loads "
    "`libcuda.so`, without `.1`, does not find `libcuda.so.1` in the cache.",
    "Put the folder into LD_LIBRARY_PATH, or into a file of `/etc/ld.so.conf.d` and run "
    "`sudo ldconfig`.",
    messages=(
        "libcuda.so: cannot open shared object file",
        "libcuda.so: cannot open shared object file: No such file or directory",
        "Failed to dlopen libcuda.so",
    ),
)

DRIVER_MODULE_MISMATCH: Final = Entry(
    "libcuda.so.1 and the kernel module are of different releases",
    "The driver was updated, and the old kernel module still runs, or a container was started "
    "before the update. Or a libcuda.so.1 of another release, such as that of cuda-compat, is "
    "found first. nvidia-smi says `Driver/library version mismatch`, CUDA says error 803.",
    "Reboot, or unload and load the nvidia modules when nothing uses the GPU. Restart a "
    "container, so that it gets the current libraries, and look for other copies in "
    "LD_LIBRARY_PATH.",
    messages=(
        "Driver/library version mismatch",
        "system has unsupported display driver / cuda driver combination",
    ),
    codes=(803,),
)

DEVICE_FILES_MISSING: Final = Entry(
    "NVIDIA's device files are missing",
    "The kernel module is loaded. Programs reach the GPU through `/dev/nvidia*`, which was not "
    "created or not passed to this container.",
    "`sudo nvidia-smi` and `sudo nvidia-modprobe -u` create them. Start a container with the GPU "
    "runtime instead of passing single devices.",
)

DEVICE_PERMISSION: Final = Entry(
    "This user cannot open the GPU's device files",
    "The permissions of `/dev/nvidia*`, or the container's device rules, forbid it. CUDA shows no "
    "GPU, or not all of them.",
    "`ls -l /dev/nvidia*` shows the group that has access: join it and log in again. In a "
    "container or job, ask for the GPU instead of opening the device.",
)

CUDA_COMPAT: Final = Entry(
    "cuda-compat is in use",
    "NVIDIA's forward-compatibility package puts a newer libcuda.so.1 on an older kernel module. "
    "GPUs are judged by the CUDA version that this library supports, not by the release of the "
    "driver.",
    "Nothing has to be done. Some features, such as graphics interoperability, still depend on "
    "the kernel module.",
)

CUDA_COMPAT_OLDER: Final = Entry(
    "cuda-compat is older than the driver it replaces",
    "A compat library that was needed once, or came with an image, hides the newer "
    "libcuda.so.1 of the driver.",
    "Take its folder out of LD_LIBRARY_PATH and `/etc/ld.so.conf.d`, then run `sudo ldconfig`.",
)

CUDA_COMPAT_REFUSED: Final = Entry(
    "cuda-compat does not work with this GPU or kernel module",
    "Forward compatibility is supported on data-center GPUs, and for certain pairs of kernel "
    "module and library only. Elsewhere cuInit fails with 803 or 804.",
    "Take its folder out of LD_LIBRARY_PATH and `/etc/ld.so.conf.d`, and install a driver that "
    "is new enough.",
    messages=("forward compatibility was attempted on non supported HW",),
    codes=(804,),
)

WSL_WITHOUT_DRIVER: Final = Entry(
    "WSL shows no NVIDIA driver",
    "Under WSL the driver is that of Windows, whose libraries appear in `/usr/lib/wsl/lib`. "
    "There is no libcuda.so.1: Windows has no NVIDIA driver, or this is WSL 1.",
    "Install the newest driver in Windows, then `wsl --update` and `wsl --shutdown` in a "
    "PowerShell. `wsl --list --verbose` shows whether the distribution is version 2.",
)

WSL_LINUX_DRIVER: Final = Entry(
    "A Linux driver hides WSL's driver",
    "The distribution has a libcuda.so.1 of its own. It looks for a kernel module that WSL "
    "does not have.",
    "Remove the NVIDIA driver packages from the distribution. Install CUDA's package "
    "`cuda-toolkit`, not `cuda`, which includes a driver.",
)

GPU_HIDDEN: Final = Entry(
    "CUDA_VISIBLE_DEVICES hides GPUs",
    "The machine has more GPUs than this process sees. The hidden GPUs were not judged.",
    "Nothing, if this is intended. `unset CUDA_VISIBLE_DEVICES` shows all of them; job systems "
    "set it for a reason.",
)

GPU_ORDER: Final = Entry(
    "CUDA and nvidia-smi count the GPUs differently",
    "CUDA puts the fastest GPU first, nvidia-smi counts by bus address. `cuda:0` need not be GPU "
    "0 of nvidia-smi.",
    "`export CUDA_DEVICE_ORDER=PCI_BUS_ID` makes CUDA count as nvidia-smi does.",
)

GPU_NOT_SHOWN: Final = Entry(
    "CUDA does not show a GPU that nvidia-smi lists",
    "No variable hides it. It may be in compute mode `Prohibited`, it may have failed (an `Xid` "
    "error in `dmesg`), or the container or job may not give this process access to it.",
    "`nvidia-smi -q` shows compute mode and errors of each GPU; `sudo nvidia-smi -i N -c DEFAULT` "
    "ends `Prohibited`.",
)

VISIBLE_DEVICES_INVALID: Final = Entry(
    "CUDA_VISIBLE_DEVICES names a GPU that does not exist",
    "CUDA reads the list up to the first entry that it does not know, and hides all the rest.",
    "`nvidia-smi -L` lists the numbers and names. Correct the list, or unset the variable.",
)

MIG: Final = Entry(
    "A GPU is divided by MIG",
    "Each instance is a GPU of its own with part of the memory and the multiprocessors, and a "
    "process sees one instance. The same code runs on it.",
    "`export CUDA_VISIBLE_DEVICES=MIG-...` chooses an instance; `nvidia-smi -L` lists them.",
)

MIG_WITHOUT_INSTANCE: Final = Entry(
    "A GPU is in MIG mode and has no instance",
    "In MIG mode CUDA shows only instances. This GPU has none, so it cannot be used.",
    "Create one (`sudo nvidia-smi mig -cgi ID -C`, with an id of `nvidia-smi mig -lgip`), or turn "
    "MIG off: `sudo nvidia-smi -i N -mig 0`.",
)

JIT_CACHE_DISABLED: Final = Entry(
    "The driver does not cache the code that it compiles",
    "This GPU runs some code from PTX. CUDA_CACHE_DISABLE makes the driver compile it at every "
    "start.",
    "`unset CUDA_CACHE_DISABLE`, or install a build that has machine code for this GPU.",
)

JIT_CACHE_HOMELESS: Final = Entry(
    "The driver's cache has no folder",
    "It is in `~/.nv/ComputeCache` or in CUDA_CACHE_PATH. Neither HOME nor CUDA_CACHE_PATH is "
    "set, as in services and some containers, so PTX is compiled at every start.",
    "`export CUDA_CACHE_PATH=/path/to/folder` sets a folder that outlives the process.",
)

JIT_CACHE_READ_ONLY: Final = Entry(
    "The driver's cache is not writable",
    "This user cannot write to the folder or the one above it, or the file system is read-only, "
    "so PTX is compiled at every start.",
    "`export CUDA_CACHE_PATH=/path/to/folder` sets a writable folder; in a container mount a "
    "volume there.",
)

JIT_CACHE_FULL: Final = Entry(
    "The driver's cache is on a full disk",
    "Compiled code cannot be stored, so PTX is compiled at every start.",
    "Free some space, delete `~/.nv/ComputeCache`, which the driver creates again, or set "
    "CUDA_CACHE_PATH to another folder.",
)

JIT_CACHE_SMALL: Final = Entry(
    "The driver's cache is too small",
    "CUDA_CACHE_MAXSIZE limits it to less than the compiled kernels need. Old kernels are dropped "
    "and compiled again.",
    "`unset CUDA_CACHE_MAXSIZE`, or set it to the size that the fix names.",
)

TORCH_CLAIM_DIFFERS: Final = Entry(
    "torch and this build support different GPUs",
    "torch has its own kernels, for its own targets. A GPU may have code in only one of the two. "
    "A program that uses both fails there, or torch warns although its library has code.",
    "Install a torch, or a build of this package, with code for the GPU. The message says which "
    "of the two lacks it.",
)
