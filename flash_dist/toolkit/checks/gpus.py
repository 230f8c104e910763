"""Checks GPUs against the code of the installed build."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..builds.published import known_sets
from ..findings import FINDINGS
from ..findings import gpus as ids
from ..findings.driver import NO_GPU
from ..findings.result import CheckResult
from ..indexes.selection import candidates_of
from ..product import IMPORTED_AS, NAME, PRODUCT, PROGRAM
from ..targets.advice import (
    arm_note,
    code_fix,
    covering_set,
    describe_covering,
    describe_device,
    describe_how,
    explain_refusal,
    jit_fix,
)
from ..targets.axes import name_sizes
from ..targets.compatibility import ALLOWED
from ..targets.devices import KIB, KNOWN_DEVICES
from ..targets.verdict import DeviceVerdict, judge_device
from .driver import describe_first_start
from .environment import _build, find_situation, judge_gpu

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ..machine.libcuda import Gpu
    from ..targets.axes import Axes
    from ..targets.devices import Device
    from ..targets.verdict import Build, KernelVerdict
    from .environment import Environment

_GIB = 1 << 30
_FIRST_PROOF = "its selftest here is the first proof on real hardware"


def check_gpu(environment: Environment, gpu: Gpu) -> CheckResult:
    """Say which variant each kernel will use on this GPU, or what to do if there is none."""
    if environment.installed.build is None:
        return _judge_sets(environment, gpu)
    verdict = judge_gpu(environment, gpu)
    if not verdict:
        return _refuse(environment, gpu, verdict)
    result = CheckResult(
        "ok",
        f"{describe_gpu(gpu)}: {describe_how(verdict)}",
        (
            *describe_lacking(verdict),
            *describe_first_start(verdict, environment),
            *describe_proof(verdict),
            *describe_unknown(environment, gpu),
            *_describe_arm(environment, gpu),
        ),
        data=verdict.to_json(),
        background=describe_plans(verdict),
    )
    if verdict.how == "unverified":
        may_compile = _is_compiled_without(verdict, _build(environment))
        better = _allow_jit(environment, verdict) if may_compile else _better(environment)
        fix = f"`{PROGRAM} selftest` on it shows whether it does; {better}"
        return replace(result, status="warn", fix=fix, entry=ids.UNVERIFIED)
    if verdict.missing_words:
        missing = f"this build has no {' and no '.join(verdict.missing_words)} kernels"
        summary = f"{result.summary}; {missing}"
        fix = _better(environment)
        return replace(result, status="warn", summary=summary, fix=fix, entry=ids.DTYPE_NOT_BUILT)
    if environment.what_if and not gpu.device.known:
        summary = f"{result.summary}; no such GPU is known"
        return replace(result, status="warn", summary=summary, entry=ids.UNKNOWN_GPU)
    return result


def _judge_sets(environment: Environment, gpu: Gpu) -> CheckResult:
    """Name the project's arch sets that would serve this GPU; used if there is no build."""
    sets = () if IMPORTED_AS else candidates_of(known_sets(), environment.machine)
    if not sets:
        summary = f"{describe_gpu(gpu)}: not judged, there is no build to judge it against"
        return CheckResult("skip", summary, entry=ids.NOT_JUDGED)
    situation = find_situation(environment, gpu)
    verdicts = {one.name: judge_device(one.build, situation) for one in sets}
    serving = [f"`{name}`" for name, verdict in verdicts.items() if verdict]
    told = tuple(
        f"{name}: {describe_how(verdict) if verdict else verdict.reason}"
        for name, verdict in verdicts.items()
    )
    if not serving:
        fix = f"add `{gpu.device}` to a set, if its kernels are for such a GPU"
        summary = f"{describe_gpu(gpu)}: no arch set of the project serves it"
        cause = next(iter(verdicts.values())).cause
        return CheckResult("fail", summary, told, fix, FINDINGS[cause])
    return CheckResult("ok", f"{describe_gpu(gpu)}: served by {' and '.join(serving)}", told)


def _better(environment: Environment) -> str:
    """Return the fix that installs a build with better code for all GPUs."""
    return code_fix(_all_devices(environment), _build(environment), environment.cuda.driver)


def _is_compiled_without(verdict: DeviceVerdict, build: Build) -> bool:
    """Tell if the driver would compile PTX of a build if nothing prevented it."""
    situation = replace(verdict.situation, jit=ALLOWED)
    return judge_device(build, situation).how == "jit"


def _allow_jit(environment: Environment, verdict: DeviceVerdict) -> str:
    """Return the step that lets the driver compile the PTX of this build."""
    jit = verdict.situation.jit
    if jit.lacks_compiler:
        driver = environment.cuda.driver
        return jit_fix(_all_devices(environment), _build(environment), driver)
    return f"`unset {jit.disabled}` lets the driver compile the PTX of this build"


def _describe_arm(environment: Environment, gpu: Gpu) -> tuple[str, ...]:
    """In a what-if, say if the GPU exists only in Arm machines, and name the arch set for it."""
    if not environment.what_if:
        return ()
    own = _build(environment).project == NAME
    note = arm_note([gpu.device], environment.machine, known_sets()) if own else ""
    return (note,) if note else ()


def _refuse(environment: Environment, gpu: Gpu, verdict: DeviceVerdict) -> CheckResult:
    others = _all_devices(environment)
    summary, fix = explain_refusal(verdict, _build(environment), name=gpu.name, others=others)
    details = describe_lacking(verdict) if verdict.targets else ()
    details += describe_unknown(environment, gpu)
    background = describe_plans(verdict) if verdict.targets else ()
    entry, data = FINDINGS[verdict.cause], verdict.to_json()
    return CheckResult("fail", summary, details, fix, entry, data=data, background=background)


def check_any_gpu(environment: Environment) -> CheckResult:
    """Report that there is no GPU, so nothing could be tested."""
    cuda = environment.cuda
    reason = cuda.reason if cuda.status == "ok" else ""  # else the driver check reports it
    summary = "no GPU was found, so nothing could be tested" + (f" ({reason})" if reason else "")
    fix = f"`{PROGRAM} doctor --gpu 8.6,9.0 --driver 580` judges other GPUs"
    return CheckResult("skip", summary, fix=fix, entry=NO_GPU)


def check_all_gpus(environment: Environment, results: Sequence[CheckResult]) -> CheckResult | None:
    """Say which GPUs are usable if some are not; None if all or none are usable."""
    able = [result.gpu for result in results if result and result.gpu is not None]
    if not able or len(able) == len(results):
        return None
    names = ", ".join(f"GPU {index}" for index in able)
    visible = ",".join(_visible_names(environment, able))
    devices, build = _all_devices(environment), _build(environment)
    covering = covering_set(devices, build.archsets, build.floor)
    left = {device for index, device in enumerate(devices) if index not in able}
    if max(left) < build.floor:
        details: tuple[str, ...] = (f"no build serves {', '.join(map(str, sorted(left)))}",)
    else:
        details = (describe_covering(devices, covering, build.floor), _better(environment))
    summary = f"{len(able)} of {len(results)} GPUs can use this build: {names}"
    fix = f"`export CUDA_VISIBLE_DEVICES={visible}` hides the others"
    data = {
        "usable": able,
        "cuda_visible_devices": visible,
        "covering_set": covering.to_json() if covering else None,
    }
    return CheckResult("warn", summary, details, fix, ids.SOME_GPUS_UNSERVED, data=data)


def _visible_names(environment: Environment, indices: Iterable[int]) -> Iterator[str]:
    """Yield names for a new CUDA_VISIBLE_DEVICES; the current one may hide and reorder GPUs."""
    visible = environment.variables.get("CUDA_VISIBLE_DEVICES", "")
    given = dict(enumerate(name.strip() for name in visible.split(",")))
    for index in indices:
        yield given.get(index) or str(index)


def _all_devices(environment: Environment) -> tuple[Device, ...]:
    return tuple(gpu.device for gpu in environment.cuda.gpus)


def describe_gpu(gpu: Gpu) -> str:
    """Name a GPU with its compute capability, memory and multiprocessors.

    MIG and MPS may show fewer multiprocessors than the model has, which changes the bits of
    results.
    """
    parts = [describe_device(gpu.device, gpu.name)]
    if gpu.memory_bytes:
        parts.append(f"{gpu.memory_bytes / _GIB:.0f} GiB")
    if gpu.sm_count:
        parts.append(f"{gpu.sm_count} SMs")
    return ", ".join(parts)


def describe_unknown(environment: Environment, gpu: Gpu) -> tuple[str, ...]:
    """Say how a GPU that is missing from the tables was judged, and what was assumed."""
    device = gpu.device
    if device.known:
        return ()
    judged = f"compute capability {device} is unknown to this {NAME}: judged by the rules"
    if not environment.what_if:
        return (judged,)
    floor = _build(environment).floor
    known = ", ".join(str(one) for one in KNOWN_DEVICES if one >= floor)
    assumed = f"{device.smem_optin // KIB} KB of shared memory per block"
    return (
        f"assumed: {assumed}, the least of the known GPUs nearest to it",
        f"{judged}; known: {known}",
    )


def describe_plans(verdict: DeviceVerdict) -> tuple[str, ...]:
    """List each role's targets and shared-memory plans; dtypes with the same plans share a line."""
    lines: dict[tuple[str, str], list[str]] = {}
    for (role, words), kernels in _by_role_and_words(verdict).items():
        text = "; ".join(_describe_sizes(kernels, verdict.axes))
        lines.setdefault((role, text), []).append(" ".join(words))
    return tuple(
        f"{role:<16} {' '.join(words):<21}  {text}" for (role, text), words in lines.items()
    )


def describe_lacking(verdict: DeviceVerdict) -> tuple[str, ...]:
    """Say which dtypes and sizes the hardware cannot compute with."""
    lacking = dict.fromkeys(
        kernel.reason for kernel in verdict.kernels if kernel.how == "not-on-this-hardware"
    )
    return tuple(f"not on this hardware: {reason}" for reason in lacking)


def _by_role_and_words(
    verdict: DeviceVerdict,
) -> dict[tuple[str, tuple[str, ...]], list[KernelVerdict]]:
    """Group the kernels that the hardware could run, by role and by words such as the dtype."""
    groups: dict[tuple[str, tuple[str, ...]], list[KernelVerdict]] = {}
    able = [kernel for kernel in verdict.kernels if kernel.how != "not-on-this-hardware"]
    for kernel in sorted(able, key=lambda kernel: verdict.axes.rank(kernel.key)):
        groups.setdefault(kernel.key[:2], []).append(kernel)
    return groups


def _describe_sizes(kernels: list[KernelVerdict], axes: Axes) -> list[str]:
    """Describe the code for each size; sizes with the same code share an entry."""
    groups: dict[str, list[str]] = {}
    for kernel in kernels:
        groups.setdefault(_describe_kernel(kernel), []).append(name_sizes(kernel.key.sizes))
    if len(groups) == 1:
        return list(groups)
    name = axes.sizes[0] if axes.sizes else ""
    return [f"{name} {', '.join(sizes)}: {text}" for text, sizes in groups.items()]


def _describe_kernel(kernel: KernelVerdict) -> str:
    if kernel.variant is None:
        return f"none ({kernel.reason})"
    plan = f", {kernel.variant.plan} KB plan" if kernel.variant.plan else ""
    return f"{kernel.variant.arch}{plan}"


def describe_proof(verdict: DeviceVerdict) -> Iterator[str]:
    """Yield a sentence for each target whose code the builder never ran on real hardware."""
    unproven: dict[str, str] = {}
    for kernel in verdict.kernels:
        variant = kernel.variant
        if variant and (
            variant.proof == "assembled" or (variant.proof == "jit" and kernel.how != "jit")
        ):
            unproven[str(variant.arch)] = variant.proof
    first = f": {_FIRST_PROOF}" if PRODUCT.cases else ""
    for target, proof in unproven.items():
        so_far = "was only assembled" if proof == "assembled" else "ran only as PTX on newer GPUs"
        yield f"{target} {so_far} by its builder{first}"
