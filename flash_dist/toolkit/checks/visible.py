"""Compares the GPUs that CUDA shows with the GPUs of nvidia-smi: number, order and MIG.

Sources: CUDA Programming Guide, "CUDA Environment Variables" (CUDA_VISIBLE_DEVICES ends at the
first invalid entry; CUDA_DEVICE_ORDER is FASTEST_FIRST unless set); MIG User Guide, "CUDA Device
Enumeration" (a process sees one instance).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..findings import host as ids
from ..findings.result import CheckResult
from ..machine.libcuda import Gpu
from ..machine.nvml import normalize_pci
from ..targets.advice import describe_device, describe_how
from ..targets.wording import count, read_whole
from .environment import judge_gpu
from .host import explain_no_gpu

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..machine.nvml import PhysicalGpu
    from .environment import Environment

_GIB = 1 << 30
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_BY_BUS = "`export CUDA_DEVICE_ORDER=PCI_BUS_ID` makes CUDA count as nvidia-smi does"


def check_visible(environment: Environment) -> CheckResult | None:
    """Check that CUDA shows all GPUs, in nvidia-smi's order; None if there is nothing to report."""
    physical = _list_physical(environment)
    known = physical and all(gpu.place for gpu in physical)
    if not known or environment.cuda.status != "ok":
        return None
    value = environment.variables.get(_VISIBLE)
    wrong = _find_invalid(value, physical) if value is not None else ""
    if wrong:
        summary = (
            f"{_VISIBLE}={value} names `{wrong}`, which is not a GPU here: CUDA ignores it "
            "and everything after it"
        )
        details = tuple(f"{_number([gpu.index])}: {_describe(gpu)}" for gpu in physical)
        fix = "`nvidia-smi -L` lists the names"
        return CheckResult("warn", summary, details, fix, ids.VISIBLE_DEVICES_INVALID)
    shown = {normalize_pci(gpu.pci) for gpu in environment.cuda.gpus}
    hidden = [gpu for gpu in physical if gpu.place not in shown]
    if hidden:
        return _describe_hidden(environment, hidden, value)
    return _describe_order(environment, physical)


def _list_physical(environment: Environment) -> tuple[PhysicalGpu, ...]:
    return environment.host.nvml.gpus if environment.host else ()


def _describe(gpu: PhysicalGpu) -> str:
    return describe_device(gpu.device, gpu.name) if gpu.device else gpu.name


def _find_invalid(value: str, physical: Sequence[PhysicalGpu]) -> str:
    """Return the first number or `GPU-` id that no GPU has; empty if there is none."""
    names = [gpu.uuid for gpu in physical]
    names += [instance.uuid for gpu in physical for instance in gpu.instances]
    for entry in (part.strip() for part in value.split(",")):
        number = read_whole(entry)
        if entry.isdecimal() and (number is None or number >= len(physical)):
            return entry
        if entry.startswith("GPU-") and not any(name.startswith(entry) for name in names):
            return entry
    return ""


def _describe_hidden(
    environment: Environment, hidden: Sequence[PhysicalGpu], value: str | None
) -> CheckResult | None:
    physical = _list_physical(environment)
    if value is None and any(gpu.mig for gpu in physical):
        return None  # reported by `check_mig`
    listed = _number([gpu.index for gpu in hidden])
    details = (*_describe_lost(environment, hidden), *_describe_places(environment, physical))
    if value is None:
        if environment.host and (
            environment.host.denied or explain_no_gpu(environment) is not None
        ):
            return None  # reported by the permission check or the driver check
        fix = "`nvidia-smi -q` shows what is wrong with it, such as its compute mode"
        return CheckResult("warn", f"CUDA does not show {listed}", details, fix, ids.GPU_NOT_SHOWN)
    summary = f"{_VISIBLE}={value} hides {len(hidden)} of {len(physical)} GPUs: {listed}"
    if environment.cuda.gpus:
        return CheckResult("ok", summary, details, entry=ids.GPU_HIDDEN)
    return CheckResult("warn", summary, details, f"`unset {_VISIBLE}`", ids.GPU_HIDDEN)


def _number(indices: Sequence[int]) -> str:
    numbers = ", ".join(map(str, indices))
    return f"GPU{'s' * (len(indices) > 1)} {numbers} of nvidia-smi"


def _describe_lost(environment: Environment, hidden: Sequence[PhysicalGpu]) -> Iterator[str]:
    """Say which code the GPUs hidden from CUDA would run; identical GPUs share a line."""
    groups: dict[str, list[int]] = {}
    for gpu in hidden:
        use = f"{_describe(gpu)}{_judge_lost(environment, gpu)}"
        groups.setdefault(use, []).append(gpu.index)
    for use, indices in groups.items():
        yield f"{_number(indices)}: {use}"


def _judge_lost(environment: Environment, gpu: PhysicalGpu) -> str:
    if gpu.device is None or environment.installed.build is None:
        return ""
    verdict = judge_gpu(environment, Gpu(gpu.index, gpu.name, gpu.device))
    return f", {describe_how(verdict)}" if verdict else ", this build has no code for it"


def _describe_places(environment: Environment, physical: Sequence[PhysicalGpu]) -> tuple[str, ...]:
    """Return a sentence for each GPU whose number in CUDA is not its number in nvidia-smi."""
    numbers = {gpu.place: gpu.index for gpu in physical}
    pairs = [(gpu, numbers.get(normalize_pci(gpu.pci))) for gpu in environment.cuda.gpus]
    return tuple(
        f"GPU {gpu.index} of CUDA ({gpu.name}) is GPU {number} of nvidia-smi"
        for gpu, number in pairs
        if number not in {None, gpu.index}
    )


def _describe_order(
    environment: Environment, physical: Sequence[PhysicalGpu]
) -> CheckResult | None:
    places = _describe_places(environment, physical)
    if not places:
        return None
    if environment.variables.get(_VISIBLE) is not None:
        cause, fix = f"{_VISIBLE} reorders the GPUs", ""
    else:
        cause, fix = "CUDA counts the fastest GPU first, nvidia-smi counts by bus address", _BY_BUS
    return CheckResult("ok", cause, places, fix, ids.GPU_ORDER)


def check_mig(environment: Environment) -> CheckResult | None:
    """Report GPUs that MIG divides; None if there are none."""
    divided = [gpu for gpu in _list_physical(environment) if gpu.mig]
    if not divided:
        return None
    empty = [gpu for gpu in divided if not gpu.instances]
    if empty and not environment.cuda.gpus and len(empty) == len(divided):
        listed = ", ".join(str(gpu.index) for gpu in empty)
        return CheckResult(
            "fail",
            f"GPU {listed} of nvidia-smi is in MIG mode without an instance: CUDA does not show it",
            fix=f"`sudo nvidia-smi mig -i {empty[0].index} -lgip` lists possible instances, `-cgi "
            f"ID -C` creates one; `sudo nvidia-smi -i {empty[0].index} -mig 0` turns MIG off",
            entry=ids.MIG_WITHOUT_INSTANCE,
        )
    instances = count(sum(len(gpu.instances) for gpu in divided), "MIG instance")
    names = ", ".join(f"GPU {gpu.index}" for gpu in divided)
    summary = (
        f"{names} of nvidia-smi has {instances}; CUDA shows a process one: "
        f"{_describe_instance(environment, divided)}"
    )
    details = (
        *(
            f"`export {_VISIBLE}={instance.uuid}` chooses {instance.name}"
            for gpu in divided
            for instance in gpu.instances
        ),
        *(f"GPU {gpu.index} has no instance, so CUDA does not show it" for gpu in empty),
        "it runs the code of the whole GPU; memory and speed are those of the instance",
    )
    return CheckResult("ok", summary, details, entry=ids.MIG)


def _describe_instance(environment: Environment, divided: Sequence[PhysicalGpu]) -> str:
    places = {gpu.place for gpu in divided}
    shown = [gpu for gpu in environment.cuda.gpus if normalize_pci(gpu.pci) in places]
    if not shown:
        return "none is visible"
    gpu = shown[0]
    memory = f"{gpu.memory_bytes / _GIB:.0f} GiB" if gpu.memory_bytes else "its own memory"
    return f"{gpu.name} with {memory} and {gpu.sm_count or 'its own'} SMs"
