"""Describes the machine for the chosen checks of `doctor`; needs neither torch nor a GPU."""

from __future__ import annotations

import os
import platform
import sys
import sysconfig
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..loading.linker import LOADER_VARIABLES
from ..loading.parts import Loading, predict_parts, try_loading
from ..machine.host import Host, gather_host
from ..machine.install_files import InstallFiles, read_install_files
from ..machine.installed import Installed, read_installed
from ..machine.libcuda import Cuda, imagine_cuda, read_cuda
from ..machine.torch_install import Torch, TorchCode, read_torch, read_torch_code
from ..product import NAME, PRODUCT
from ..targets.verdict import SMEM_VARIABLE, Build, DeviceVerdict, Situation, judge_device

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ..machine.libcuda import Gpu
    from ..targets.devices import Device, Driver

_OF_PRODUCT = tuple(one.name for one in PRODUCT.variables)
# Variables that change which code is loaded, the cost of the JIT, or which GPUs are visible.
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_FORCE_PTX_JIT",
    "CUDA_FORCE_JIT",
    "CUDA_DISABLE_PTX_JIT",
    "CUDA_DISABLE_JIT",
    "CUDA_CACHE_DISABLE",
    "CUDA_CACHE_PATH",
    "CUDA_CACHE_MAXSIZE",
    "CUDA_MODULE_LOADING",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    SMEM_VARIABLE,
    *_OF_PRODUCT,
)
# Variables that have no effect on an imagined machine: `doctor --env` rejects them.
_OF_A_MACHINE = {
    "CUDA_CACHE_PATH",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    *_OF_PRODUCT,
}
WHAT_IF_VARIABLES = tuple(name for name in VARIABLES if name not in _OF_A_MACHINE)
# Variables that change which files are found. Empty variables have no effect.
SEARCH_VARIABLES = (*LOADER_VARIABLES, "PYTHONPATH")
FREE_THREADED = "free-threaded"  # a Python without the GIL


@dataclass(frozen=True)
class CheckChoice:
    """The chosen checks of doctor (all, some by name, or all except some) and the chosen GPUs."""

    only: frozenset[str] = frozenset()  # names of checks; empty: all
    skip: frozenset[str] = frozenset()
    devices: tuple[int, ...] | None = None  # the GPUs to judge and test; None: all

    def __contains__(self, name: str) -> bool:
        return name not in self.skip and (not self.only or name in self.only)

    def require_known(self, names: Iterable[str]) -> None:
        """Reject names that are not checks, and a choice that leaves no check.

        Raises:
            UsageError: A name is unknown, or no check is left.
        """
        known = tuple(names)
        unknown = sorted((self.only | self.skip) - set(known))
        if unknown:
            message = f"a check must be {', '.join(known[:-1])} or {known[-1]}, got `{unknown[0]}`"
            raise UsageError(message, hint="`--only gpu,driver` runs only these two")
        if not any(name in self for name in known):
            message = f"no check is left of --only {','.join(sorted(self.only)) or 'all'} "
            message += f"without --skip {','.join(sorted(self.skip))}"
            raise UsageError(message, hint=f"the checks are {', '.join(known)}")

    def to_json(self) -> dict[str, Any]:
        """Return the choice as plain data."""
        return {
            "only": sorted(self.only) or None,
            "skip": sorted(self.skip),
            "devices": None if self.devices is None else list(self.devices),
        }


EVERYTHING = CheckChoice()


@dataclass(frozen=True)
class Environment:
    """The machine that the checks judge. In a what-if, its GPUs are imagined and host is None."""

    system: str
    machine: str
    libc: str
    python: str
    torch: Torch
    cuda: Cuda
    installed: Installed
    loading: Loading = field(default_factory=lambda: Loading("not-tried"))
    predicted: Loading | None = None  # the prediction, made before loading was tried
    variables: Mapping[str, str] = field(default_factory=dict)
    files: InstallFiles = field(default_factory=InstallFiles)
    what_if: bool = False
    host: Host | None = None  # None: not examined, as in a what-if
    torch_code: TorchCode | None = None  # None: not read, for example without a GPU

    def to_json(self) -> dict[str, Any]:
        """Return the environment as plain data."""
        return {
            "system": self.system,
            "machine": self.machine,
            "libc": self.libc,
            "python": self.python,
            "torch": self.torch.to_json(),
            "cuda": self.cuda.to_json(),
            "installed": self.installed.to_json(),
            "files": self.files.to_json(),
            "loading": self.loading.to_json(),
            "predicted_loading": self.predicted.to_json() if self.predicted else None,
            "variables": dict(self.variables),
            "what_if": self.what_if,
            "host": self.host.to_json() if self.host else None,
            "torch_code": self.torch_code.to_json() if self.torch_code else None,
        }


def gather_environment(choice: CheckChoice = EVERYTHING) -> Environment:
    """Examine this machine; run slow steps only if their check is wanted.

    Loading of the compiled parts is predicted, not tried.
    """
    installed = read_installed()
    found = _describe_host(read_cuda(), installed)
    loading = Loading("skipped")
    if "extension" in choice:
        loading = Loading("not-tried")
        if installed.library:
            loading = predict_parts(found.torch, found.libc, installed.torch_min)
    claims = "torch" in choice and found.cuda.gpus and found.torch.cuda
    return replace(
        found,
        loading=loading,
        variables=read_variables(os.environ),
        files=read_install_files() if "install" in choice else InstallFiles(),
        host=gather_host(os.environ),
        torch_code=read_torch_code() if claims else None,
    )


def gather_gpus(installed: Installed | None = None, cuda: Cuda | None = None) -> Environment:
    """Examine this machine, but neither this package's files nor whether they load.

    Args:
        installed: The build to judge; None for no build.
        cuda: The driver and GPUs; None to ask the driver in this process.
    """
    return replace(
        _describe_host(cuda or read_cuda(), installed or Installed()),
        variables=read_variables(os.environ),
        host=gather_host(os.environ),
    )


def imagine_environment(
    devices: Iterable[Device],
    driver: Driver | None,
    variables: Mapping[str, str] | None = None,
    *,
    installed: Installed | None = None,
    around: Environment | None = None,
) -> Environment:
    """Return the environment of an imagined machine with a build, by default the installed one.

    Args:
        devices: GPUs of the imagined machine.
        driver: None counts as new enough.
        variables: Environment variables of its processes.
        installed: The build to use instead of the installed one.
        around: A machine whose system, torch and build are used instead of this machine's.
    """
    cuda = imagine_cuda(devices, driver)
    if around is None:
        host = _describe_host(cuda, installed or read_installed())
    else:
        system = (around.system, around.machine, around.libc, around.python, around.torch)
        host = Environment(*system, cuda, installed or around.installed)
    return replace(host, variables=dict(variables or {}), what_if=True)


def _describe_host(cuda: Cuda, installed: Installed) -> Environment:
    return Environment(
        system=read_system(),
        machine=platform.machine(),
        libc=read_libc(),
        python=read_python(),
        torch=read_torch(),
        cuda=cuda,
        installed=installed,
    )


def read_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return those of VARIABLES that are set, and those of SEARCH_VARIABLES that are not empty."""
    found = {name: environ[name] for name in VARIABLES if name in environ}
    return found | {name: environ[name] for name in SEARCH_VARIABLES if environ.get(name)}


def read_system() -> str:
    """Name the operating system: `Debian GNU/Linux 12 (bookworm)`."""
    if sys.platform != "linux":
        return platform.platform()
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        return platform.platform()
    return release.get("PRETTY_NAME") or platform.platform()  # platform() may start a process


def read_python() -> str:
    """Return the version of Python: `3.13.1`, or `3.13.1 free-threaded`."""
    version = platform.python_version()
    return f"{version} {FREE_THREADED}" if sysconfig.get_config_var("Py_GIL_DISABLED") else version


def read_libc() -> str:
    """Name the C library: `glibc 2.36`; `musl or unknown` if confstr does not say."""
    try:
        text = os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, ValueError, OSError):
        text = None
    return text or "musl or unknown"


def prove_loading(environment: Environment) -> Environment:
    """Load the compiled parts if loading was only predicted, and keep the prediction as well."""
    if environment.loading.source != "predicted":
        return environment
    return replace(environment, loading=try_loading(), predicted=environment.loading)


def judge_gpu(environment: Environment, gpu: Gpu) -> DeviceVerdict:
    """Return how the build of an environment serves one of its GPUs."""
    return judge_device(_build(environment), find_situation(environment, gpu))


def find_situation(environment: Environment, gpu: Gpu) -> Situation:
    """Return a GPU with the driver, variables and JIT that decide which code it can load."""
    situation = Situation.of(
        gpu.device, environment.cuda.driver, environment.variables, smem_optin=gpu.smem_optin
    )
    lacking = environment.host is not None and environment.host.lacks_jit_compiler
    return replace(situation, jit=replace(situation.jit, lacks_compiler=lacking))


def _build(environment: Environment) -> Build:
    return environment.installed.build or Build(NAME, ())
