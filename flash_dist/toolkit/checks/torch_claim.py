"""Checks whether torch itself supports the same GPUs as this build.

`torch.cuda.get_arch_list()` returns a list that was fixed when torch was compiled.
`torch.cuda._check_capability` warns according to this list, but drops suffixes and treats PTX as
SASS. This check reads the code in torch's library instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..findings.host import TORCH_CLAIM_DIFFERS
from ..findings.result import CheckResult
from ..targets.advice import describe_archs, describe_device, describe_how
from ..targets.archs import Arch
from ..targets.compatibility import Origin, driver_refusal, judge
from .environment import find_situation, judge_gpu
from .library_verdict import judge_library

if TYPE_CHECKING:
    from ..findings.result import Status
    from ..machine.libcuda import Gpu
    from ..machine.torch_install import TorchCode
    from .environment import Environment

_GET_TORCH = "install a torch with code for it (https://pytorch.org/get-started/locally)"


def check_torch_claim(environment: Environment, gpu: Gpu) -> CheckResult | None:
    """Check that torch and this build agree on a GPU; None if so, or if one of them has no code."""
    code = environment.torch_code
    if code is None or not code.reports or environment.installed.build is None:
        return None
    torch, verdict = f"torch {environment.torch.version}", judge_gpu(environment, gpu)
    where = f"GPU {gpu.index}, {describe_device(gpu.device, gpu.name)}"
    archs = sorted({arch for report in code.reports for arch in report.archs})
    has = f"{torch} has {describe_archs(archs)}"
    refusal = find_refusal(environment, code, gpu)
    if refusal and verdict:
        summary = f"{torch} itself has {refusal} for {where}: torch's own kernels fail there"
        details = (has, f"this build has {describe_how(verdict)}")
        return _differ("fail", summary, details, _GET_TORCH)
    if refusal:
        return None
    if not verdict:
        summary = f"{torch} itself has code for {where}: that proves nothing about this build"
        return _differ("warn", summary, (has,))
    if gpu.device.integrated or claims(code, gpu):
        return None
    listed = " ".join(map(str, code.arch_list))
    details = (has, f"torch.cuda.get_arch_list(): {listed}")
    summary = f"{torch} warns that it does not support {where}, but its library has code for it"
    return _differ("ok", summary, details)


def _differ(status: Status, summary: str, details: tuple[str, ...], fix: str = "") -> CheckResult:
    return CheckResult(status, summary, details, fix, TORCH_CLAIM_DIFFERS)


def find_refusal(environment: Environment, code: TorchCode, gpu: Gpu) -> str:
    """Say what torch lacks for a GPU; empty if most of its code supports it.

    Most of the code suffices, because some kernels exist only for newer GPUs.
    """
    cuda, torch = environment.cuda, environment.torch
    if cuda.driver is not None and torch.cuda:
        refusal = driver_refusal(cuda.driver, Origin(torch.cuda))
        if refusal is not None:
            return f"no code that the driver loads ({refusal})"
    situation = find_situation(environment, gpu)
    verdicts = [judge_library(report, situation) for report in code.reports]
    containers = sum(len(verdict.containers) for verdict in verdicts)
    unfit = sum(len(verdict.unfit) for verdict in verdicts)
    if 2 * unfit < containers:
        return ""
    obstacle = next((verdict.obstacle for verdict in verdicts if verdict.obstacle), "")
    return f"no code that the driver loads ({obstacle})" if obstacle else "no code"


def claims(code: TorchCode, gpu: Gpu) -> bool:
    """Tell if `_check_capability` accepts a GPU.

    It accepts a GPU if some entry of the list has the same major and no newer minor version;
    suffixes are ignored. If the list is empty, it accepts every GPU.
    """
    plain = {Arch(arch.major, arch.minor) for arch in code.arch_list}
    return not plain or any(judge(arch, gpu.device, None, Origin(None)) for arch in plain)
