"""The machine as `doctor` sees it: one frozen value, gathered without torch and without a GPU."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .advice import torch_fix
from .check_choice import EVERYTHING, CheckChoice
from .child import Outcome, run_child
from .errors import FatbinError
from .host import Host, gather_host
from .install_files import InstallFiles, read_install_files
from .installed import EXTENSION, LIBRARY, Installed, read_installed
from .load_host import read_host
from .load_prediction import predict_loading
from .manifest import PACKAGE
from .nvidia import Cuda, imagine_cuda, read_cuda
from .torch_claim import TorchCode, read_torch_code

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .devices import Device, Driver
    from .load_host import LoadHost

# Variables that change what is loaded or seen; all that doctor reports.
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_FORCE_PTX_JIT",
    "CUDA_DISABLE_PTX_JIT",
    "CUDA_CACHE_DISABLE",
    "CUDA_CACHE_PATH",
    "CUDA_CACHE_MAXSIZE",
    "CUDA_MODULE_LOADING",
    "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES",
    "FLASH_DIST_SMEM_LIMIT",
    "FLASH_DIST_WORKSPACE_MB",
)

LOAD_TIMEOUT = 120.0


@dataclass(frozen=True)
class Torch:
    """The installed torch, read from its metadata and `version.py`; it is not imported."""

    status: Literal["ok", "absent", "broken"]
    version: str = ""
    cuda: str = ""  # "13.0"; empty for a CPU build
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return {
            "status": self.status,
            "version": self.version or None,
            "cuda": self.cuda or None,
            "reason": self.reason or None,
        }


@dataclass(frozen=True)
class Loading:
    """Whether the compiled parts load: predicted from symbol tables, or tried in a child."""

    status: Literal["ok", "failed", "crashed", "unknown", "not-tried", "skipped"]
    stage: str = ""  # which part it was: "kernels", "torch" or "extension"
    reason: str = ""
    source: Literal["tried", "predicted"] = "tried"
    id: str = ""  # of a predicted cause
    fix: str = ""
    details: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return {
            "status": self.status,
            "source": None if self.status == "not-tried" else self.source,
            "stage": self.stage or None,
            "id": self.id or None,
            "reason": self.reason or None,
            "fix": self.fix or None,
            "details": list(self.details),
        }


@dataclass(frozen=True)
class Environment:
    """Everything the checks judge. A what-if has imagined GPUs and no machine around them."""

    system: str
    machine: str
    libc: str
    python: str
    torch: Torch
    cuda: Cuda
    installed: Installed
    loading: Loading = Loading("not-tried")
    predicted: Loading | None = None  # what was said of the loading before it was tried
    variables: Mapping[str, str] = field(default_factory=dict)
    files: InstallFiles = field(default_factory=InstallFiles)
    what_if: bool = False
    host: Host | None = None  # None: not looked at, as in a what-if
    torch_code: TorchCode | None = None  # None: no GPU to judge it on

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
    """Look at this machine; what takes long only where its check is wanted.

    Whether the compiled parts load is predicted, not tried.
    """
    installed = read_installed()
    found = _describe_host(read_cuda(), installed)
    loading = Loading("skipped")
    if "extension" in choice:
        loading = predict_parts(found) if installed.library else Loading("not-tried")
    claims = "torch" in choice and found.cuda.gpus and found.torch.cuda
    return replace(
        found,
        loading=loading,
        variables=read_variables(os.environ),
        files=read_install_files() if "install" in choice else InstallFiles(),
        host=gather_host(os.environ),
        torch_code=read_torch_code() if claims else None,
    )


def gather_gpus() -> Environment:
    """Look at this machine's GPUs and driver alone: what the libraries of others are judged by."""
    return replace(
        _describe_host(read_cuda(), Installed()),
        variables=read_variables(os.environ),
        host=gather_host(os.environ),
    )


def imagine_environment(
    devices: Iterable[Device],
    driver: Driver | None,
    variables: Mapping[str, str] | None = None,
    *,
    installed: Installed | None = None,
) -> Environment:
    """Put a build, by default this one, on a machine that is not here, with its own variables."""
    host = _describe_host(imagine_cuda(devices, driver), installed or read_installed())
    return replace(host, variables=dict(variables or {}), what_if=True)


def _describe_host(cuda: Cuda, installed: Installed) -> Environment:
    return Environment(
        system=read_system(),
        machine=platform.machine(),
        libc=read_libc(),
        python=platform.python_version(),
        torch=read_torch(),
        cuda=cuda,
        installed=installed,
    )


def read_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Keep the variables that matter."""
    return {name: environ[name] for name in VARIABLES if name in environ}


def read_system() -> str:
    """Name the operating system: `Debian GNU/Linux 12 (bookworm)`."""
    if sys.platform != "linux":
        return platform.platform()
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        return platform.platform()
    return release.get("PRETTY_NAME") or platform.platform()  # which starts a process


def read_libc() -> str:
    """Name the C library: `glibc 2.36`; `musl or unknown` where confstr does not tell."""
    try:
        text = os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, ValueError, OSError):
        text = None
    return text or "musl or unknown"


def read_torch() -> Torch:
    """Find torch without importing it."""
    try:
        distribution = importlib.metadata.distribution("torch")
        version = distribution.version
        path = Path(str(distribution.locate_file("torch/version.py")))
        text = path.read_text(encoding="utf-8")
    except importlib.metadata.PackageNotFoundError:
        return Torch("absent", reason="torch is not installed")
    except (OSError, UnicodeDecodeError, KeyError) as error:
        return Torch("broken", reason=f"torch is installed but cannot be read: {error}")
    if not version:
        return Torch("broken", reason="torch is installed but its metadata has no version")
    return Torch("ok", version, parse_torch_cuda(text))


def parse_torch_cuda(text: str) -> str:
    """Find the CUDA version in `torch/version.py`; empty for a CPU build."""
    match = re.search(r"""^cuda\b[^=\n]*=\s*['"]([0-9.]+)['"]""", text, re.MULTILINE)
    return match[1] if match else ""


def predict_parts(environment: Environment, package: Path = PACKAGE) -> Loading:
    """Predict what `try_loading` would find, from symbol tables, part by part."""
    torch, oldest = environment.torch, environment.installed.torch_min
    doubt = None
    try:
        host = read_host(torch, environment.libc)
        for stage, path in _find_parts(package, host):
            if stage == "torch" and torch.status != "ok":
                cause = f"torch-{torch.status}"
                return Loading("failed", stage, torch.reason, "predicted", cause, torch_fix(oldest))
            prediction = predict_loading(path, host, torch_min=oldest)
            if not prediction:
                first = prediction.causes[0]
                reason, rest = first.sentence, (first.id, first.fix, first.details)
                return Loading("failed", stage, reason, "predicted", *rest)
            if prediction.unknown and doubt is None:
                doubt = Loading("unknown", stage, prediction.unknown[0], "predicted")
    except FatbinError as error:
        return Loading("unknown", reason=error.message, source="predicted")
    return doubt or Loading("ok", source="predicted")


def _find_parts(package: Path, host: LoadHost) -> tuple[tuple[str, Path], ...]:
    """Return what is loaded one after the other, with the names of the stages."""
    extensions = host.torch_extensions()
    torch = extensions[0] if extensions else Path("torch")
    return (
        ("kernels", package / LIBRARY),
        ("torch", torch),
        ("extension", package / EXTENSION),
    )


def prove_loading(environment: Environment) -> Environment:
    """Load the parts where that was only predicted; the prediction is kept beside the result."""
    if environment.loading.source != "predicted":
        return environment
    return replace(environment, loading=try_loading(), predicted=environment.loading)


def try_loading() -> Loading:
    """Load the compiled parts in a child process, where a crash does no harm."""
    command = [sys.executable, "-m", "flash_dist.loading"]
    return judge_loading(run_child(command, timeout=LOAD_TIMEOUT))


def judge_loading(outcome: Outcome) -> Loading:
    """Turn what the child reported into a result."""
    stage = ""
    for event in outcome.events:
        stage = str(event.get("stage", stage))
        if event.get("event") == "failed":
            return Loading("failed", stage, str(event.get("reason", "")))
        if event.get("event") == "loaded":
            return Loading("ok")
    said = f"; it printed `{outcome.output[-1]}`" if outcome.output else ""
    return Loading("crashed", stage, f"{outcome.sentence}{said}")
