"""`check()`: the GPU results of doctor as data for programs."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any

from ..checks.environment import gather_gpus, judge_gpu
from ..checks.gpus import check_gpu
from ..errors import show
from ..machine.apart import read_cuda_apart
from ..machine.installed import read_installed
from ..product import NAME

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..checks.environment import Environment
    from ..findings.result import Status
    from ..machine.libcuda import Gpu
    from ..targets.verdict import KernelHow


@dataclass(frozen=True)
class GpuReport:
    """How the installed build serves one GPU; true if the kernels run on it."""

    index: int  # in CUDA's order, as in torch
    name: str
    compute_capability: str  # "9.0"
    status: Status  # "ok", "warn" (runs, with a remark), "fail" or "skip" (there is no build)
    how: KernelHow  # worst way in which code runs there: "native", ..., "jit", "none"
    targets: tuple[str, ...]  # of the code that runs there: ("sm_90a",)
    sentence: str  # as in doctor; the operators raise it as an error if they cannot use the GPU
    fix: str = ""
    id: str = ""  # stable id of the cause; empty if there is none

    def __bool__(self) -> bool:
        return self.status in {"ok", "warn"}

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        targets, fix, name = list(self.targets), self.fix or None, self.id or None
        return {**vars(self), "targets": targets, "fix": fix, "id": name}


@dataclass(frozen=True)
class Report:
    """All requested GPUs; true if there is at least one and each is served."""

    build: str  # "NAME 0.1.0+cu130.hopper"; empty if there is none
    gpus: tuple[GpuReport, ...]
    sentence: str  # the first reason why the report is false; empty if it is true

    def __bool__(self) -> bool:
        return bool(self.gpus) and all(self.gpus)

    @property
    def usable(self) -> tuple[int, ...]:
        """The indices of the GPUs that the build serves."""
        return tuple(gpu.index for gpu in self.gpus if gpu)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "build": self.build or None,
            "usable": list(self.usable),
            "sentence": self.sentence or None,
            "gpus": [gpu.to_json() for gpu in self.gpus],
        }


def check(devices: Iterable[int] | None = None) -> Report:
    """Judge the GPUs of this process against the code in the installed build.

    Prints nothing, runs no kernel and does not need torch. CUDA is not initialised in this process,
    so that processes forked later can use CUDA. Instead, a separate process asks the driver for the
    GPUs; its answer is cached until a variable such as CUDA_VISIBLE_DEVICES changes. If this
    process already uses CUDA, it asks the driver itself. Reading the kernel library takes a moment,
    so keep the result.

    Args:
        devices: GPU numbers, as in torch. None for all that this process sees.

    Returns:
        A report that is true if there is a GPU and every requested one is served.

    Raises:
        TypeError: devices is not iterable.
        ValueError: An entry of devices is not the number of a GPU.
    """
    environment = gather_gpus(read_installed(), read_cuda_apart())
    gpus = environment.cuda.gpus if devices is None else _find(environment, devices)
    reports = tuple(_report(environment, gpu) for gpu in gpus)
    build = environment.installed.build
    return Report(build.name if build else "", reports, _find_sentence(environment, reports))


def _find(environment: Environment, devices: Iterable[int]) -> tuple[Gpu, ...]:
    known = {gpu.index: gpu for gpu in environment.cuda.gpus}
    try:
        wanted = tuple(devices)
    except TypeError as error:
        message = f"devices must be several numbers or None, got {show(devices)}"
        raise TypeError(message) from error
    for index in wanted:
        if not isinstance(index, Integral) or index not in known:
            allowed = ", ".join(map(str, known)) or "absent: there is no GPU here"
            message = f"devices must be {allowed}, got {show(index)}"
            raise ValueError(message)
    return tuple(known[index] for index in wanted)


def _report(environment: Environment, gpu: Gpu) -> GpuReport:
    result = check_gpu(environment, gpu)
    verdict = judge_gpu(environment, gpu)
    return GpuReport(
        gpu.index,
        gpu.name,
        str(gpu.device),
        result.status,
        verdict.how if verdict else "none",
        tuple(str(arch) for arch in verdict.targets) if verdict else (),
        result.summary,
        result.fix,
        result.id,
    )


def _find_sentence(environment: Environment, reports: tuple[GpuReport, ...]) -> str:
    """Return a sentence about the first problem; empty if there is none."""
    installed, cuda = environment.installed, environment.cuda
    if installed.build is None:
        problem = installed.manifest_problem or installed.library_problem
        return f"no built {NAME} was found: {problem}"
    if not reports:
        return f"no GPU here{f': {cuda.reason}' if cuda.reason else ''}"
    return next((gpu.sentence for gpu in reports if not gpu), "")
