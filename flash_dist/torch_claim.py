"""What torch itself has for a GPU, and what it says of it, read without importing it.

torch.cuda.get_arch_list() is a text from when torch was compiled, and `_check_capability` warns by
it: it drops suffixes and takes PTX for SASS. What the library holds decides.
"""

from __future__ import annotations

import importlib.metadata
import mmap
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .advice import describe_archs, describe_device
from .archs import Arch
from .compatibility import Origin, driver_refusal, judge
from .errors import FlashDistError
from .fatbin import read_fatbin
from .files import open_file
from .gpu_checks import describe_how, find_situation, judge_gpu
from .library_verdict import judge_library
from .result import CheckResult

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .environment import Environment
    from .images import FatbinReport
    from .nvidia import Gpu
    from .result import Status

# CUDA_ARCH_FLAGS in libtorch_python.so: `sm_75 sm_80 sm_86 compute_86`, the end of a C string.
_ARCH_LIST = re.compile(rb"\0((?:(?:sm|compute)_[0-9]{2,3}[af]?(?: |(?=\0)))+)(?=\0)")
_GET_TORCH = "install a torch with code for it (https://pytorch.org/get-started/locally)"


@dataclass(frozen=True)
class TorchCode:
    """The GPU code of torch. No reports: it could not be read, reason says why."""

    reports: tuple[FatbinReport, ...] = ()
    arch_list: tuple[Arch, ...] = ()  # what torch.cuda.get_arch_list() answers; empty if unknown
    reason: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the state as plain data, without the single images."""
        return {
            "libraries": [
                {
                    "path": report.path,
                    "targets": [str(arch) for arch in report.archs],
                    "images": len(report.entries),
                }
                for report in self.reports
            ],
            "arch_list": [str(arch) for arch in self.arch_list],
            "reason": self.reason or None,
        }


def read_torch_code() -> TorchCode:
    """Read the headers of the installed torch's GPU code."""
    try:
        distribution = importlib.metadata.distribution("torch")
        folder = Path(str(distribution.locate_file("torch/lib")))
    except importlib.metadata.PackageNotFoundError:
        return TorchCode(reason="torch is not installed")
    return read_torch_folder(folder)


def read_torch_folder(folder: Path) -> TorchCode:
    """Read the headers of GPU code in torch's folder of libraries."""
    try:
        reports = tuple(read_fatbin(path) for path in sorted(folder.glob("libtorch_cuda*.so")))
        arch_list = read_arch_list(folder / "libtorch_python.so")
    except FlashDistError as error:
        return TorchCode(reason=error.message)
    reports = tuple(report for report in reports if report.entries)
    return TorchCode(reports, arch_list, "" if reports else f"no GPU code in {folder}")


def read_arch_list(library: Path) -> tuple[Arch, ...]:
    """Find what get_arch_list() answers; empty where torch has no such text."""
    if not library.is_file():
        return ()
    with open_file(library) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        words = max(_find_arch_lists(data), key=len, default=[])
    return tuple(Arch.parse(word) for word in words)


def _find_arch_lists(data: mmap.mmap) -> Iterator[list[str]]:
    """Yield the texts that look like one; `find` is faster than an expression with choices."""
    for start in (b"\0sm_", b"\0compute_"):
        place = data.find(start)
        while place >= 0:
            match = _ARCH_LIST.match(data, place)
            if match:
                yield match[1].decode("ascii").split()
            place = data.find(start, place + 1)


def check_torch_claim(environment: Environment, gpu: Gpu) -> CheckResult | None:
    """Torch and this build fare alike on a GPU; None where they do, or torch has no GPU code."""
    code = environment.torch_code
    if code is None or not code.reports or environment.installed.build is None:
        return None
    torch, verdict = f"torch {environment.torch.version}", judge_gpu(environment, gpu)
    where = f"GPU {gpu.index}, {describe_device(gpu.device, gpu.name)}"
    archs = sorted({arch for report in code.reports for arch in report.archs})
    has = f"{torch} has {describe_archs(archs)}"
    refusal = find_refusal(environment, code, gpu)
    if refusal and verdict:
        summary = f"{torch} itself has {refusal} for {where}: what is not of flash_dist fails there"
        details = (has, f"this build has {describe_how(verdict)}")
        return _differ(gpu, "fail", summary, details, _GET_TORCH)
    if refusal:
        return None
    if not verdict:
        summary = f"{torch} itself has code for {where}: its working proves nothing of this build"
        return _differ(gpu, "warn", summary, (has,))
    if gpu.device.integrated or claims(code, gpu):
        return None
    listed = " ".join(map(str, code.arch_list))
    details = (has, f"torch goes by torch.cuda.get_arch_list(): {listed}")
    summary = f"{torch} warns that it does not support {where}, but its library has code for it"
    return _differ(gpu, "ok", summary, details)


def _differ(
    gpu: Gpu, status: Status, summary: str, details: tuple[str, ...], fix: str = ""
) -> CheckResult:
    name = f"torch {gpu.index}"
    return CheckResult(name, status, summary, details, fix, "torch-claim-differs", gpu.index)


def find_refusal(environment: Environment, code: TorchCode, gpu: Gpu) -> str:
    """Say what torch lacks for a GPU; empty where most of its code has something for it.

    Most, because single kernels are for newer GPUs alone.
    """
    cuda, torch = environment.cuda, environment.torch
    if cuda.driver is not None and torch.cuda:
        refusal = driver_refusal(cuda.driver, Origin(torch.cuda))
        if refusal is not None:
            return f"nothing that the driver loads ({refusal})"
    situation = find_situation(environment, gpu)
    verdicts = [judge_library(report, situation) for report in code.reports]
    containers = sum(len(verdict.containers) for verdict in verdicts)
    unfit = sum(len(verdict.unfit) for verdict in verdicts)
    if 2 * unfit < containers:
        return ""
    obstacle = next((verdict.obstacle for verdict in verdicts if verdict.obstacle), "")
    return f"nothing that the driver loads ({obstacle})" if obstacle else "no code"


def claims(code: TorchCode, gpu: Gpu) -> bool:
    """Whether `_check_capability` is content: code of the same major, no newer, suffix dropped."""
    plain = {Arch(arch.major, arch.minor) for arch in code.arch_list}
    return not plain or any(
        judge(arch, gpu.device, None, Origin(None), "allowed") for arch in plain
    )
