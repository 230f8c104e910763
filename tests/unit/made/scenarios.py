"""Machines as they were met, and what doctor is to say of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flash_dist.gpucode.images import FatbinEntry, FatbinReport
from flash_dist.loading.parts import Loading
from flash_dist.machine.host import DeviceFile, Host
from flash_dist.machine.install_files import InstallFiles
from flash_dist.machine.installed import Installed
from flash_dist.machine.jit_cache import JitCache
from flash_dist.machine.libcuda import Cuda, Gpu
from flash_dist.machine.nvml import MigInstance, Nvml, PhysicalGpu
from flash_dist.machine.torch_code import TorchCode
from flash_dist.machine.torch_install import Torch
from flash_dist.targets.archs import Arch, ArchSet
from flash_dist.targets.devices import Device, Driver
from tests.unit.made.builds import ALL, HOPPER, TURING_AMPERE_ADA, make_environment, make_installed

if TYPE_CHECKING:
    from flash_dist.checks.environment import Environment

FOLDER = "/usr/lib/x86_64-linux-gnu"
CACHE = JitCache("/home/user/.nv/ComputeCache", "writable", 100 << 30)
NO_LIBCUDA = Cuda("absent", reason="libcuda.so.1 was not found")
NO_DEVICE = "cuInit failed with CUDA_ERROR_NO_DEVICE (100)"

TURING = ("NVIDIA GeForce RTX 2080 Ti", "7.5", "0000:01:00.0")
AMPERE = ("NVIDIA GeForce RTX 3090", "8.6", "0000:02:00.0")
HOPPER_GPU = ("NVIDIA H200", "9.0", "0000:0f:00.0")

Found = tuple[str, str, str]  # name, status, id


@dataclass(frozen=True)
class Scenario:
    """A machine, every result of doctor that has an id, the exit status, and what is said."""

    environment: Environment
    found: tuple[Found, ...]
    exit_code: int
    says: tuple[str, ...] = ()


def make_physical(*gpus: tuple[str, str, str]) -> tuple[PhysicalGpu, ...]:
    """List GPUs as NVML does."""
    return tuple(
        PhysicalGpu(
            index,
            name,
            f"GPU-{index:08x}-aaaa-bbbb-cccc-dddddddddddd",
            f"0000{pci}".upper(),
            Device.parse(device),
        )
        for index, (name, device, pci) in enumerate(gpus)
    )


def make_host(release: str = "580.65.06", *gpus: tuple[str, str, str]) -> Host:
    """Return a sound machine with these GPUs in the order of nvidia-smi."""
    return Host(
        libcuda=f"{FOLDER}/libcuda.so.{release}",
        jit_compiler=f"{FOLDER}/libnvidia-ptxjitcompiler.so.{release}",
        module_release=release,
        module_gpus=len(gpus),
        device_files=tuple(
            DeviceFile(f"/dev/{name}", allowed=True)
            for name in ("nvidia-uvm", *(f"nvidia{n}" for n in range(len(gpus))), "nvidiactl")
        ),
        cache=CACHE,
        nvml=Nvml("ok", make_physical(*gpus)),
    )


def make_machine(
    archs: str,
    *gpus: tuple[str, str, str],
    driver: str = "580.65.06",
    hidden: tuple[tuple[str, str, str], ...] = (),
) -> Environment:
    """Return a sound machine; its GPUs in the order of CUDA, those that CUDA hides in front."""
    machine = make_environment(archs, driver=driver)
    shown = tuple(
        Gpu(index, name, Device.parse(device), 24 << 30, 82, pci=pci)
        for index, (name, device, pci) in enumerate(gpus)
    )
    cuda = replace(machine.cuda, gpus=shown)
    return replace(machine, cuda=cuda, host=make_host(driver, *sorted((*hidden, *gpus), key=_bus)))


def _bus(gpu: tuple[str, str, str]) -> str:
    return gpu[2]


def change_host(environment: Environment, **changes: object) -> Environment:
    """Return the same machine with other facts around its GPUs."""
    assert environment.host is not None
    host = replace(environment.host, **changes)  # type: ignore[arg-type]
    return replace(environment, host=host)


def hide_gpus(environment: Environment, reason: str = NO_DEVICE) -> Environment:
    """Return the same machine where CUDA shows no GPU."""
    return replace(environment, cuda=replace(environment.cuda, gpus=(), reason=reason))


def break_driver(environment: Environment, error: str) -> Environment:
    """Return the same machine where cuInit fails."""
    return replace(environment, cuda=Cuda("broken", reason=f"cuInit failed with {error}"))


def make_container(*, module: str = "", gpus: int = 0, **variables: str) -> Environment:
    """Return a container without libcuda, on a host with or without a driver."""
    host = Host(container="docker", module_release=module, module_gpus=gpus, cache=CACHE)
    return replace(make_environment(ALL), cuda=NO_LIBCUDA, host=host, variables=variables)


def make_torch(archs: str, *, claims: str = "", containers: int = 4) -> TorchCode:
    """Return the GPU code of a torch whose fatbins all have these targets."""
    targets = ArchSet.parse(archs).archs
    entries = tuple(
        FatbinEntry(
            "ptx" if arch.ptx else "sass",
            *(arch, "none", (8, 7) if arch.ptx else None, 0, 1, 1, ".nv_fatbin", container, ""),
            *(0, 0, 0, 0),
        )
        for container in range(containers)
        for arch in targets
    )
    report = FatbinReport("torch/lib/libtorch_cuda.so", entries)
    return TorchCode((report,), tuple(Arch.parse(word) for word in claims.split()))


BOX = make_machine("7.5+PTX", TURING, AMPERE)
JIT_BOX = make_machine(TURING_AMPERE_ADA, HOPPER_GPU)
OLD = make_installed("8.0;9.0")
BUILD_12 = (
    replace(
        OLD.build,
        toolkit="12.8",
        variants=tuple(
            replace(variant, origin=replace(variant.origin, toolkit="12.8"))
            for variant in OLD.build.variants
        ),
    )
    if OLD.build
    else None
)
COMPAT_FILE = "/usr/local/cuda-12.8/compat/libcuda.so.570.86.10"
COMPAT = change_host(
    replace(
        make_machine(ALL, HOPPER_GPU),
        installed=replace(OLD, build=BUILD_12),
        cuda=Cuda(
            "ok",
            Driver((12, 8), "525.147.05"),
            make_machine(ALL, HOPPER_GPU).cuda.gpus,
        ),
    ),
    libcuda=COMPAT_FILE,
    module_release="525.147.05",
)
MIG_NAMES = ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA A100-SXM4-40GB MIG 2g.10gb")
MIG_GPU = replace(
    make_physical(("NVIDIA A100-SXM4-40GB", "8.0", "0000:07:00.0"))[0],
    mig=True,
    instances=tuple(MigInstance(name, f"MIG-{n}111") for n, name in enumerate(MIG_NAMES)),
)
MIG_CUDA = replace(
    make_machine(ALL).cuda,
    gpus=(Gpu(0, MIG_NAMES[0], Device(8, 0), 4864 << 20, 14, pci="0000:07:00.0"),),
)
MIG = change_host(replace(make_machine(ALL), cuda=MIG_CUDA), nvml=Nvml("ok", (MIG_GPU,)))
WSL = change_host(
    make_machine(ALL, AMPERE),
    wsl=True,
    dxg=True,
    libcuda="/usr/lib/wsl/lib/libcuda.so.1.1",
    jit_compiler="",
    module_release="",
    module_gpus=0,
    device_files=(),
)
DENIED = (DeviceFile("/dev/nvidia0", allowed=False), DeviceFile("/dev/nvidiactl", allowed=False))

SCENARIOS: dict[str, Scenario] = {
    "a sound machine": Scenario(make_machine(ALL, TURING, AMPERE), (), 0),
    "2080 and 3090 with a wheel for 7.5 and PTX": Scenario(
        BOX,
        (("gpu 1", "warn", "dtype-not-built"),),
        0,
        ("0.3 to 0.4 s in the first forward", "no bf16 kernels", "`nox -s build_wheels -- "),
    ),
    "driver 470": Scenario(
        make_machine(ALL, AMPERE, driver="470.82.01"),
        (
            ("driver", "fail", "driver-too-old"),
            ("gpu 0", "fail", "driver-too-old"),
            ("selftest 0", "skip", "selftest-not-run"),
        ),
        1,
        ("needs driver 580 or newer, not driver 470.82.01 (CUDA 11.4)",),
    ),
    "cuda-compat on the kernel module of 525": Scenario(
        COMPAT,
        (("compat", "ok", "cuda-compat"),),
        0,
        (f"{COMPAT_FILE} speaks CUDA 12.8 on kernel module 525.147.05", "judged by CUDA 12.8"),
    ),
    "cuda-compat that is older than the driver": Scenario(
        change_host(make_machine(ALL, HOPPER_GPU), libcuda=COMPAT_FILE),
        (("compat", "warn", "cuda-compat-older"),),
        0,
        ("take /usr/local/cuda-12.8/compat out of LD_LIBRARY_PATH",),
    ),
    "cuda-compat on a GeForce": Scenario(
        break_driver(
            change_host(BOX, libcuda=COMPAT_FILE),
            "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE (804)",
        ),
        (("driver", "fail", "cuda-compat-refused"), ("gpu", "skip", "no-gpu")),
        1,
        ("does not work with this GPU", "data-center GPUs"),
    ),
    "a CPU torch with a GPU": Scenario(
        replace(make_machine(ALL, AMPERE), torch=Torch("ok", "2.13.0+cpu")),
        (("torch", "fail", "torch-cpu-build"),),
        1,
        ("cannot use the GPU of this machine",),
    ),
    "two copies": Scenario(
        replace(
            make_machine(ALL, AMPERE),
            files=InstallFiles("recorded", "/opt/a", 200, copies=("/opt/b",)),
        ),
        (("install", "warn", "install-twice"),),
        0,
        ("lies in /opt/a, which runs, and in /opt/b",),
    ),
    "the source tree in place of the wheel": Scenario(
        replace(
            make_machine(ALL, AMPERE),
            files=InstallFiles(folder="/src", copies=("/opt/b",), in_sources=True),
            installed=Installed(manifest_problem="no manifest", library_problem="no library"),
            loading=Loading("not-tried"),
        ),
        (
            ("install", "warn", "install-twice"),
            ("build", "fail", "not-built"),
            ("extension", "skip", "extension-absent"),
            ("gpu 0", "skip", "not-judged"),
            ("selftest 0", "skip", "selftest-not-run"),
        ),
        1,
        ("leave the source tree, which Python imports instead of the wheel: `cd ..`",),
    ),
    "no GPU and no driver": Scenario(
        replace(make_environment(ALL), cuda=NO_LIBCUDA, host=Host(cache=CACHE)),
        (("driver", "skip", "driver-absent"), ("gpu", "skip", "no-gpu")),
        3,
    ),
    "a container on a host without a driver": Scenario(
        make_container(NVIDIA_VISIBLE_DEVICES="all", NVIDIA_DRIVER_CAPABILITIES="utility"),
        (("driver", "skip", "driver-absent"), ("gpu", "skip", "no-gpu")),
        3,
    ),
    "a container without the GPU runtime": Scenario(
        make_container(module="580.65.06", gpus=2, NVIDIA_VISIBLE_DEVICES="all"),
        (("driver", "fail", "container-without-gpu"), ("gpu", "skip", "no-gpu")),
        1,
        ("the host has driver 580.65.06 and 2 GPUs", "`docker run --gpus all`"),
    ),
    "a container whose capabilities lack compute": Scenario(
        make_container(module="580.65.06", gpus=1, NVIDIA_DRIVER_CAPABILITIES="utility,video"),
        (("driver", "fail", "capabilities-without-compute"), ("gpu", "skip", "no-gpu")),
        1,
        ("NVIDIA_DRIVER_CAPABILITIES=utility,video lacks `compute`",),
    ),
    "a driver without its compute libraries": Scenario(
        change_host(make_container(module="580.65.06", gpus=1), container=""),
        (("driver", "fail", "libcuda-missing"), ("gpu", "skip", "no-gpu")),
        1,
    ),
    "libcuda where the loader does not look": Scenario(
        change_host(make_container(), stray_libcuda="/usr/local/nvidia/lib64/libcuda.so.580.65.06"),
        (("driver", "fail", "libcuda-not-on-path"), ("gpu", "skip", "no-gpu")),
        1,
        ("`export LD_LIBRARY_PATH=/usr/local/nvidia/lib64`",),
    ),
    "MIG": Scenario(
        MIG,
        (("mig", "ok", "mig"),),
        0,
        (
            "has 2 MIG instances; CUDA shows a process one: NVIDIA A100-SXM4-40GB MIG 1g.5gb",
            "MIG 1g.5gb with 5 GiB and 14 SMs",
            "`export CUDA_VISIBLE_DEVICES=MIG-1111` chooses NVIDIA A100-SXM4-40GB MIG 2g.10gb",
        ),
    ),
    "MIG without an instance": Scenario(
        change_host(hide_gpus(MIG), nvml=Nvml("ok", (replace(MIG_GPU, instances=()),))),
        (("mig", "fail", "mig-without-instance"), ("gpu", "skip", "no-gpu")),
        1,
        ("in MIG mode without an instance",),
    ),
    "WSL": Scenario(WSL, (), 0, ("WSL: this is the driver of Windows",)),
    "WSL with PTX alone": Scenario(
        replace(WSL, installed=make_installed("8.0+PTX"), variables={}), (), 0
    ),
    "WSL with a Linux driver in it": Scenario(
        hide_gpus(change_host(WSL, libcuda=f"{FOLDER}/libcuda.so.535.183.01")),
        (("driver", "fail", "wsl-linux-driver"), ("gpu", "skip", "no-gpu")),
        1,
        ("remove the NVIDIA driver from this distribution",),
    ),
    "WSL without a driver": Scenario(
        change_host(replace(WSL, cuda=NO_LIBCUDA), libcuda=""),
        (("driver", "skip", "wsl-without-driver"), ("gpu", "skip", "no-gpu")),
        3,
        ("install the NVIDIA driver in Windows",),
    ),
    "a read-only JIT cache with PTX alone": Scenario(
        change_host(JIT_BOX, cache=replace(CACHE, status="read-only")),
        (("jit", "warn", "jit-cache-read-only"),),
        0,
        (
            "may not be written: the driver compiles the PTX again at every start",
            "may not be written, so the driver compiles the PTX at every start",
        ),
    ),
    "a read-only JIT cache that nothing needs": Scenario(
        change_host(make_machine(HOPPER, HOPPER_GPU), cache=replace(CACHE, status="read-only")),
        (),
        0,
    ),
    "a full disk below the JIT cache": Scenario(
        change_host(JIT_BOX, cache=replace(CACHE, free_bytes=1 << 20)),
        (("jit", "warn", "jit-cache-full"),),
        0,
        ("on a full disk (1 MiB free)",),
    ),
    "a JIT cache without a folder": Scenario(
        change_host(JIT_BOX, cache=JitCache("", "homeless")),
        (("jit", "warn", "jit-cache-homeless"),),
        0,
    ),
    "a JIT cache that is too small": Scenario(
        replace(JIT_BOX, variables={"CUDA_CACHE_MAXSIZE": "1024"}),
        (("jit", "warn", "jit-cache-small"),),
        0,
        ("CUDA_CACHE_MAXSIZE=1024 is too small",),
    ),
    "a JIT cache that is switched off, all PTX loaded at once": Scenario(
        replace(
            JIT_BOX, variables={"CUDA_CACHE_DISABLE": "1", "CUDA_MODULE_LOADING": "EAGER"}
        ),
        (("jit", "warn", "jit-cache-disabled"),),
        0,
        ("CUDA_MODULE_LOADING=EAGER asks (27 s on an H200)",),
    ),
    "PTX without the JIT compiler": Scenario(
        change_host(JIT_BOX, jit_compiler=""),
        (
            ("gpu 0", "fail", "jit-compiler-absent"),
            ("selftest 0", "skip", "selftest-not-run"),
        ),
        1,
        (
            "libnvidia-ptxjitcompiler.so.1 is missing, so the driver does not compile compute_89",
            "`nox -s build_wheels -- hopper`",
        ),
    ),
    "a missing JIT compiler that nothing needs": Scenario(
        change_host(make_machine(HOPPER, HOPPER_GPU), jit_compiler=""), (), 0
    ),
    "a hidden GPU": Scenario(
        replace(
            make_machine(ALL, AMPERE, hidden=(TURING,)), variables={"CUDA_VISIBLE_DEVICES": "1"}
        ),
        (("visible", "ok", "gpu-hidden"),),
        0,
        (
            "CUDA_VISIBLE_DEVICES=1 hides 1 of 2 GPUs: GPU 0 of nvidia-smi",
            (
                "GPU 0 of nvidia-smi: NVIDIA GeForce RTX 2080 Ti (compute capability 7.5), native "
                "code (sm_75)"
            ),
            "GPU 0 of CUDA (NVIDIA GeForce RTX 3090) is GPU 1 of nvidia-smi",
        ),
    ),
    "all GPUs hidden": Scenario(
        replace(
            hide_gpus(make_machine(ALL, TURING, AMPERE)), variables={"CUDA_VISIBLE_DEVICES": ""}
        ),
        (("visible", "warn", "gpu-hidden"), ("gpu", "skip", "no-gpu")),
        3,
        ("CUDA_VISIBLE_DEVICES= hides 2 of 2 GPUs: GPUs 0, 1 of nvidia-smi",),
    ),
    "a GPU that does not exist is asked for": Scenario(
        replace(make_machine(ALL, TURING, AMPERE), variables={"CUDA_VISIBLE_DEVICES": "0,2,1"}),
        (("visible", "warn", "visible-devices-invalid"),),
        0,
        ("names `2`, which is no GPU here",),
    ),
    "CUDA and nvidia-smi count differently": Scenario(
        make_machine(ALL, AMPERE, TURING),
        (("visible", "ok", "gpu-order"),),
        0,
        (
            "GPU 0 of CUDA (NVIDIA GeForce RTX 3090) is GPU 1 of nvidia-smi",
            "`export CUDA_DEVICE_ORDER=PCI_BUS_ID`",
        ),
    ),
    "a GPU that CUDA leaves out": Scenario(
        make_machine(ALL, AMPERE, hidden=(TURING,)),
        (("visible", "warn", "gpu-not-shown"),),
        0,
        ("CUDA does not show GPU 0 of nvidia-smi",),
    ),
    "a kernel module of another driver": Scenario(
        break_driver(
            change_host(BOX, libcuda=f"{FOLDER}/libcuda.so.580.95.05"),
            "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)",
        ),
        (("driver", "fail", "driver-module-mismatch"), ("gpu", "skip", "no-gpu")),
        1,
        ("is of driver 580.95.05, the kernel module of 580.65.06", "reboot"),
    ),
    "device files of another group": Scenario(
        change_host(hide_gpus(BOX), device_files=DENIED),
        (("driver", "fail", "device-permission"), ("gpu", "skip", "no-gpu")),
        1,
        ("this user may not open /dev/nvidia0, /dev/nvidiactl",),
    ),
    "one device file of another group": Scenario(
        change_host(make_machine(ALL, AMPERE, hidden=(TURING,)), device_files=DENIED[:1]),
        (("devices", "warn", "device-permission"),),
        0,
    ),
    "a container without device files": Scenario(
        change_host(hide_gpus(BOX), device_files=(), container="podman"),
        (("driver", "fail", "device-files-missing"), ("gpu", "skip", "no-gpu")),
        1,
        ("`podman run --device nvidia.com/gpu=all`",),
    ),
    "a torch without code for the GPU": Scenario(
        replace(make_machine(ALL, TURING), torch_code=make_torch("8.0;9.0")),
        (("torch 0", "fail", "torch-claim-differs"),),
        1,
        ("torch 2.11.0 itself has no code for GPU 0", "torch 2.11.0 has SASS sm_80, sm_90; no PTX"),
    ),
    "a torch with code where the build has none": Scenario(
        replace(make_machine(HOPPER, AMPERE), torch_code=make_torch("8.0;9.0")),
        (
            ("gpu 0", "fail", "no-matching-code"),
            ("torch 0", "warn", "torch-claim-differs"),
            ("selftest 0", "skip", "selftest-not-run"),
        ),
        1,
        ("its working proves nothing of this build",),
    ),
    "a torch that warns although it has code": Scenario(
        replace(
            make_machine(ALL, HOPPER_GPU),
            torch_code=make_torch("8.0+PTX", claims="sm_80 compute_80"),
        ),
        (("torch 0", "ok", "torch-claim-differs"),),
        0,
        ("torch.cuda.get_arch_list(): sm_80 compute_80",),
    ),
    "a torch with the same view": Scenario(
        replace(
            make_machine(ALL, AMPERE), torch_code=make_torch("8.0;9.0", claims="sm_80 sm_90")
        ),
        (),
        0,
    ),
}  # fmt: skip
