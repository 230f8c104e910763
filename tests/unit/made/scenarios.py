"""Machines from practice, each a record of `doctor --save`, and doctor's expected results.

To add one: run `doctor --save FILE` on the machine, or edit a copy of another file; then add its
line to the table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from flash_dist.toolkit.doctor.record import Record
from flash_dist.toolkit.gpucode.images import FatbinEntry, FatbinReport
from flash_dist.toolkit.machine.host import DeviceFile, Host, JitCache
from flash_dist.toolkit.machine.libcuda import Gpu
from flash_dist.toolkit.machine.nvml import Nvml, PhysicalGpu
from flash_dist.toolkit.machine.torch_install import TorchCode
from flash_dist.toolkit.targets.archs import Arch, ArchSet
from flash_dist.toolkit.targets.devices import Device
from tests.unit.made.builds import make_environment

if TYPE_CHECKING:
    from flash_dist.toolkit.checks.environment import Environment

PLACE = Path(__file__).parents[1] / "toolkit" / "doctor" / "scenarios"
FOLDER = "/usr/lib/x86_64-linux-gnu"
CACHE = JitCache("/home/user/.nv/ComputeCache", "writable", 100 << 30)

TURING = ("NVIDIA GeForce RTX 2080 Ti", "7.5", "0000:01:00.0")
AMPERE = ("NVIDIA GeForce RTX 3090", "8.6", "0000:02:00.0")

Found = tuple[str, str, str]  # name, status, id


@dataclass(frozen=True)
class Scenario:
    """A machine, every result of doctor with an id, the exit status, and the output."""

    record: Record
    found: tuple[Found, ...]
    exit_code: int
    says: tuple[str, ...] = ()

    @property
    def environment(self) -> Environment:
        return self.record.environment


def load(name: str) -> Record:
    """Read a machine as `--load` does."""
    path = PLACE / f"{name}.json"
    return Record.from_text(path.read_bytes(), source=path.name)


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
    """Return a sound machine. CUDA sees `gpus`, in order; NVML also lists `hidden`, all by bus."""
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
    """Return the same machine with other host facts."""
    assert environment.host is not None
    host = replace(environment.host, **changes)  # type: ignore[arg-type]
    return replace(environment, host=host)


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


SCENARIOS: dict[str, Scenario] = {
    "a sound machine": Scenario(load("a-sound-machine"), (), 0),
    "2080 and 3090 with a wheel for 7.5 and PTX": Scenario(
        load("2080-and-3090-with-a-wheel-for-7-5-and-ptx"),
        (("gpu 1", "warn", "dtype-not-built"),),
        0,
        ("0.3 to 0.4 s in the first forward", "no bf16 kernels", "`nox -s build_wheels -- "),
    ),
    "driver 470": Scenario(
        load("driver-470"),
        (
            ("driver", "fail", "driver-too-old"),
            ("gpu 0", "fail", "driver-too-old"),
            ("selftest 0", "skip", "selftest-not-run"),
        ),
        1,
        ("needs driver 580 or newer, not driver 470.82.01 (CUDA 11.4)",),
    ),
    "cuda-compat on the kernel module of 525": Scenario(
        load("cuda-compat-on-the-kernel-module-of-525"),
        (("compat", "ok", "cuda-compat"),),
        0,
        (
            "/compat/libcuda.so.570.86.10 supports CUDA 12.8 on kernel module 525.147.05",
            "judged by CUDA 12.8",
        ),
    ),
    "cuda-compat that is older than the driver": Scenario(
        load("cuda-compat-that-is-older-than-the-driver"),
        (("compat", "warn", "cuda-compat-older"),),
        0,
        ("remove /usr/local/cuda-12.8/compat from LD_LIBRARY_PATH",),
    ),
    "cuda-compat on a GeForce": Scenario(
        load("cuda-compat-on-a-geforce"),
        (("driver", "fail", "cuda-compat-refused"), ("gpu", "skip", "no-gpu")),
        1,
        ("does not work with this GPU", "data-center GPUs"),
    ),
    "a CPU torch with a GPU": Scenario(
        load("a-cpu-torch-with-a-gpu"),
        (("torch", "fail", "torch-cpu-build"),),
        1,
        ("cannot use the GPU of this machine",),
    ),
    "two copies": Scenario(
        load("two-copies"),
        (("install", "warn", "install-twice"),),
        0,
        ("in /opt/a, which is used, and in /opt/b",),
    ),
    "the source tree in place of the wheel": Scenario(
        load("the-source-tree-in-place-of-the-wheel"),
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
        load("no-gpu-and-no-driver"),
        (("driver", "skip", "driver-absent"), ("gpu", "skip", "no-gpu")),
        3,
    ),
    "a container on a host without a driver": Scenario(
        load("a-container-on-a-host-without-a-driver"),
        (("driver", "skip", "driver-absent"), ("gpu", "skip", "no-gpu")),
        3,
    ),
    "a container without the GPU runtime": Scenario(
        load("a-container-without-the-gpu-runtime"),
        (("driver", "fail", "container-without-gpu"), ("gpu", "skip", "no-gpu")),
        1,
        ("the host has driver 580.65.06 and 2 GPUs", "`docker run --gpus all`"),
    ),
    "a container whose capabilities lack compute": Scenario(
        load("a-container-whose-capabilities-lack-compute"),
        (("driver", "fail", "capabilities-without-compute"), ("gpu", "skip", "no-gpu")),
        1,
        ("NVIDIA_DRIVER_CAPABILITIES=utility,video lacks `compute`",),
    ),
    "a driver without its compute libraries": Scenario(
        load("a-driver-without-its-compute-libraries"),
        (("driver", "fail", "libcuda-missing"), ("gpu", "skip", "no-gpu")),
        1,
    ),
    "libcuda where the loader does not look": Scenario(
        load("libcuda-where-the-loader-does-not-look"),
        (("driver", "fail", "libcuda-not-on-path"), ("gpu", "skip", "no-gpu")),
        1,
        ("`export LD_LIBRARY_PATH=/usr/local/nvidia/lib64`",),
    ),
    "MIG": Scenario(
        load("mig"),
        (("mig", "ok", "mig"),),
        0,
        (
            "has 2 MIG instances; CUDA shows a process one: NVIDIA A100-SXM4-40GB MIG 1g.5gb",
            "MIG 1g.5gb with 5 GiB and 14 SMs",
            "`export CUDA_VISIBLE_DEVICES=MIG-1111` chooses NVIDIA A100-SXM4-40GB MIG 2g.10gb",
        ),
    ),
    "MIG without an instance": Scenario(
        load("mig-without-an-instance"),
        (("mig", "fail", "mig-without-instance"), ("gpu", "skip", "no-gpu")),
        1,
        ("in MIG mode without an instance",),
    ),
    "WSL": Scenario(load("wsl"), (), 0, ("WSL: this is the driver of Windows",)),
    "WSL with PTX alone": Scenario(load("wsl-with-ptx-alone"), (), 0),
    "WSL with a Linux driver in it": Scenario(
        load("wsl-with-a-linux-driver-in-it"),
        (("driver", "fail", "wsl-linux-driver"), ("gpu", "skip", "no-gpu")),
        1,
        ("remove the NVIDIA driver from this distribution",),
    ),
    "WSL without a driver": Scenario(
        load("wsl-without-a-driver"),
        (("driver", "skip", "wsl-without-driver"), ("gpu", "skip", "no-gpu")),
        3,
        ("install the NVIDIA driver in Windows",),
    ),
    "a read-only JIT cache with PTX alone": Scenario(
        load("a-read-only-jit-cache-with-ptx-alone"),
        (("jit", "warn", "jit-cache-read-only"),),
        0,
        (
            "is not writable: the driver compiles the PTX again at every start",
            "is not writable, so the driver compiles the PTX at every start",
        ),
    ),
    "a read-only JIT cache that nothing needs": Scenario(
        load("a-read-only-jit-cache-that-nothing-needs"),
        (),
        0,
    ),
    "a full disk below the JIT cache": Scenario(
        load("a-full-disk-below-the-jit-cache"),
        (("jit", "warn", "jit-cache-full"),),
        0,
        ("on a full disk (1 MiB free)",),
    ),
    "a JIT cache without a folder": Scenario(
        load("a-jit-cache-without-a-folder"),
        (("jit", "warn", "jit-cache-homeless"),),
        0,
    ),
    "a JIT cache that is too small": Scenario(
        load("a-jit-cache-that-is-too-small"),
        (("jit", "warn", "jit-cache-small"),),
        0,
        ("CUDA_CACHE_MAXSIZE=1024 is too small",),
    ),
    "a JIT cache that is switched off, all PTX loaded at once": Scenario(
        load("a-jit-cache-that-is-switched-off-all-ptx-loaded-at-once"),
        (("jit", "warn", "jit-cache-disabled"),),
        0,
        ("CUDA_MODULE_LOADING=EAGER asks (27 s on an H200)",),
    ),
    "PTX without the JIT compiler": Scenario(
        load("ptx-without-the-jit-compiler"),
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
        load("a-missing-jit-compiler-that-nothing-needs"), (), 0
    ),
    "a hidden GPU": Scenario(
        load("a-hidden-gpu"),
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
        load("all-gpus-hidden"),
        (("visible", "warn", "gpu-hidden"), ("gpu", "skip", "no-gpu")),
        3,
        ("CUDA_VISIBLE_DEVICES= hides 2 of 2 GPUs: GPUs 0, 1 of nvidia-smi",),
    ),
    "a GPU that does not exist is asked for": Scenario(
        load("a-gpu-that-does-not-exist-is-asked-for"),
        (("visible", "warn", "visible-devices-invalid"),),
        0,
        ("names `2`, which is not a GPU here",),
    ),
    "CUDA and nvidia-smi count differently": Scenario(
        load("cuda-and-nvidia-smi-count-differently"),
        (("visible", "ok", "gpu-order"),),
        0,
        (
            "GPU 0 of CUDA (NVIDIA GeForce RTX 3090) is GPU 1 of nvidia-smi",
            "`export CUDA_DEVICE_ORDER=PCI_BUS_ID`",
        ),
    ),
    "a GPU that CUDA leaves out": Scenario(
        load("a-gpu-that-cuda-leaves-out"),
        (("visible", "warn", "gpu-not-shown"),),
        0,
        ("CUDA does not show GPU 0 of nvidia-smi",),
    ),
    "a kernel module of another driver": Scenario(
        load("a-kernel-module-of-another-driver"),
        (("driver", "fail", "driver-module-mismatch"), ("gpu", "skip", "no-gpu")),
        1,
        ("is of driver 580.95.05, the kernel module of 580.65.06", "reboot"),
    ),
    "device files of another group": Scenario(
        load("device-files-of-another-group"),
        (("driver", "fail", "device-permission"), ("gpu", "skip", "no-gpu")),
        1,
        ("this user cannot open /dev/nvidia0, /dev/nvidiactl",),
    ),
    "one device file of another group": Scenario(
        load("one-device-file-of-another-group"),
        (("devices", "warn", "device-permission"),),
        0,
    ),
    "a container without device files": Scenario(
        load("a-container-without-device-files"),
        (("driver", "fail", "device-files-missing"), ("gpu", "skip", "no-gpu")),
        1,
        ("`podman run --device nvidia.com/gpu=all`",),
    ),
    "a torch without code for the GPU": Scenario(
        load("a-torch-without-code-for-the-gpu"),
        (("torch 0", "fail", "torch-claim-differs"),),
        1,
        ("torch 2.11.0 itself has no code for GPU 0", "torch 2.11.0 has SASS sm_80, sm_90; no PTX"),
    ),
    "a torch with code where the build has none": Scenario(
        load("a-torch-with-code-where-the-build-has-none"),
        (
            ("gpu 0", "fail", "no-matching-code"),
            ("torch 0", "warn", "torch-claim-differs"),
            ("selftest 0", "skip", "selftest-not-run"),
        ),
        1,
        ("that proves nothing about this build",),
    ),
    "a torch that warns although it has code": Scenario(
        load("a-torch-that-warns-although-it-has-code"),
        (("torch 0", "ok", "torch-claim-differs"),),
        0,
        ("torch.cuda.get_arch_list(): sm_80 compute_80",),
    ),
    "a torch with the same view": Scenario(
        load("a-torch-with-the-same-view"),
        (),
        0,
    ),
}  # fmt: skip
