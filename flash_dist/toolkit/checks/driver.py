"""Checks the NVIDIA driver, its JIT compiler, and the variables that change which code it loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..findings import FINDINGS
from ..findings import driver as ids
from ..findings.explain import explain
from ..findings.result import CheckResult
from ..findings.said.faults import CUDA_ERROR
from ..findings.said.starting import LIBCUDA_EMPTY
from ..machine.host import find_cache_problem
from ..product import NAME, PRODUCT
from ..targets.advice import GET_DRIVER, driver_fix
from ..targets.compatibility import driver_refusal, jit_policy
from ..targets.devices import ZSTD_CUDA, first_driver, format_version, ptx_isa_cuda, toolkit_driver
from ..targets.verdict import SMEM_VARIABLE, read_smem_limit
from .environment import judge_gpu
from .host import describe_driver, explain_no_gpu

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..findings.entry import Entry
    from ..machine.libcuda import Cuda
    from ..targets.verdict import Build, DeviceVerdict
    from .environment import Environment

# Variables that select GPUs or change the cost of the JIT. They do not change which code runs.
_NEUTRAL = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "CUDA_CACHE_DISABLE",
    "CUDA_CACHE_MAXSIZE",
    "CUDA_MODULE_LOADING",
)
_SHOWN_TOGETHER = 2  # maximum variables in one line
_LONGEST_VALUE = 80


def check_variables(environment: Environment) -> CheckResult:
    """Check for variables that are malformed, disable embedded code, or limit shared memory."""
    shown = tuple(f"{name}={_shorten(value)}" for name, value in environment.variables.items())
    malformed = _find_malformed(environment.variables)
    if malformed:
        name, problem, entry = malformed
        return CheckResult("fail", problem, shown, f"`unset {name}`", entry)
    switches = jit_policy(environment.variables).variables
    if switches:
        one = len(switches) == 1
        uses = "is set: the driver does not use all" if one else "are set: the driver uses no"
        summary = f"{' and '.join(switches)} {uses} embedded code"
        fix = f"`unset {' '.join(switches)}`"
        return CheckResult("warn", summary, shown, fix, ids.JIT_VARIABLE)
    if environment.variables.get(SMEM_VARIABLE):
        summary = f"{SMEM_VARIABLE} is set: smaller tiles than the GPU allows are used"
        return CheckResult("warn", summary, shown, f"`unset {SMEM_VARIABLE}`", ids.SMEM_LIMIT)
    # If NVML lists the GPUs, `check_visible` reports those that CUDA_VISIBLE_DEVICES hides.
    told = environment.host is not None and environment.host.nvml.gpus
    if environment.variables.get("CUDA_VISIBLE_DEVICES") is not None and not told:
        visible = environment.variables["CUDA_VISIBLE_DEVICES"]
        summary = f"CUDA_VISIBLE_DEVICES={visible} hides the other GPUs, if there are any"
        return CheckResult("ok", summary, shown[1:])
    if len(shown) > _SHOWN_TOGETHER:
        return CheckResult("ok", f"{len(shown)} that change what is loaded", shown)
    return CheckResult("ok", ", ".join(shown) or "none that changes what is loaded")


def check_neutral(environment: Environment) -> CheckResult | None:
    """In a what-if, name the variables that affect no verdict; None if there are none."""
    named = [name for name in _NEUTRAL if name in environment.variables]
    if not environment.what_if or not named:
        return None
    return CheckResult("ok", f"which code runs does not depend on {' and '.join(named)}")


def _shorten(value: str) -> str:
    """Shorten a long value, such as a list of folders; `--json` shows it in full."""
    return value if len(value) <= _LONGEST_VALUE else f"{value[:_LONGEST_VALUE]}..."


def _find_malformed(variables: Mapping[str, str]) -> tuple[str, str, Entry] | None:
    """Return the first malformed variable of this package, the problem and its finding, or None."""
    limit = variables.get(SMEM_VARIABLE, "")
    if limit and read_smem_limit(limit) is None:
        problem = f"{SMEM_VARIABLE} must be a number of bytes such as 65536, got `{limit:.60}`"
        return SMEM_VARIABLE, problem, ids.SMEM_LIMIT_MALFORMED
    for one in PRODUCT.variables:
        problem = PRODUCT.load(one.check)(variables.get(one.name, ""))
        if problem:
            return one.name, problem, FINDINGS[one.finding["id"]]
    return None


def check_driver(environment: Environment) -> CheckResult:
    """Check that a driver exists and is new enough for the build's toolkit, PTX and compression."""
    cuda, build = environment.cuda, environment.installed.build
    explained = explain_no_gpu(environment)
    if explained is not None:
        return explained
    if cuda.status == "absent":
        summary = f"no NVIDIA driver here: {cuda.reason}"
        return CheckResult("skip", summary, fix=GET_DRIVER, entry=ids.DRIVER_ABSENT)
    if cuda.status == "broken":
        entry = explain_broken(cuda)
        summary = f"the NVIDIA driver does not answer: {cuda.reason}"
        return CheckResult("fail", summary, (entry.meaning,), entry.remedy, entry)
    needs = driver_needs(build) if build else ()
    if cuda.driver is None:
        summary = "no driver given, assumed new enough"
        return CheckResult("ok", summary, background=needs)
    refusals = [driver_refusal(cuda.driver, v.origin) for v in build.variants] if build else []
    if build and refusals and all(refusals):
        fix = driver_fix(build, cuda.driver, (gpu.device for gpu in cuda.gpus))
        return CheckResult("fail", str(refusals[0]), needs, fix, ids.DRIVER_TOO_OLD)
    details = describe_driver(environment)
    return CheckResult("ok", str(cuda.driver), details, background=needs)


def explain_broken(cuda: Cuda) -> Entry:
    """Return the finding for a broken driver's error code if that is known, else DRIVER_BROKEN."""
    found = [one.entry for one in explain(cuda.reason)]
    sure = cuda.code is not None or found == [LIBCUDA_EMPTY]
    return found[0] if sure and found and found[0] is not CUDA_ERROR else ids.DRIVER_BROKEN


def driver_needs(build: Build) -> tuple[str, ...]:
    """Say what each property of a build requires of the driver."""
    lines = []
    if build.toolkit:
        lines.append(f"CUDA {build.toolkit} needs driver {toolkit_driver(build.toolkit)} or newer")
    isas = {v.origin.ptx_isa for v in build.variants if v.arch.ptx and v.origin.ptx_isa}
    for isa in sorted(isas):
        cuda = ptx_isa_cuda(isa)
        release = first_driver(cuda) if cuda else None
        known = (
            f"driver {release} or newer"
            if release
            else f"a driver newer than any known to this {NAME}"
        )
        lines.append(f"PTX ISA {format_version(isa)} needs {known}")
    if any(variant.origin.codec == "zstd" for variant in build.variants):
        lines.append(f"zstd compression needs driver {first_driver(ZSTD_CUDA)} or newer")
    return tuple(lines)


def uses_jit(verdict: DeviceVerdict) -> bool:
    """Tell if any kernel needs the JIT on this GPU."""
    return any(kernel.how == "jit" for kernel in verdict.kernels)


def describe_first_start(verdict: DeviceVerdict, environment: Environment) -> tuple[str, ...]:
    """Say when compiling PTX costs time, and how much; empty if no kernel needs the JIT."""
    if not uses_jit(verdict):
        return ()
    cache = environment.host.cache if environment.host else None
    problem = find_cache_problem(environment.variables, cache)
    when = (
        f"{problem.summary}, so the driver compiles the PTX at every start"
        if problem
        else "the driver compiles the PTX at the first start and caches it for later ones"
    )
    cost = describe_cost(environment.variables)
    return (f"{when}: {cost}" if cost else when,)


def describe_cost(variables: Mapping[str, str]) -> str:
    """Describe the cost of JIT compilation; empty if lazy loading is on and was not measured."""
    if variables.get("CUDA_MODULE_LOADING", "").upper() == "EAGER":
        measured = PRODUCT.jit_cost.get("eager")
        told = f" ({measured})" if measured else ""
        return f"all of it at once, as CUDA_MODULE_LOADING=EAGER asks{told}"
    return PRODUCT.jit_cost.get("lazy", "")


def check_jit(environment: Environment) -> CheckResult | None:
    """Check that the driver can cache compiled PTX; None if so, or if no kernel needs the JIT."""
    cache = environment.host.cache if environment.host else None
    problem = find_cache_problem(environment.variables, cache)
    if problem is None or environment.installed.build is None:
        return None
    if not any(uses_jit(judge_gpu(environment, gpu)) for gpu in environment.cuda.gpus):
        return None
    summary = f"{problem.summary}: the driver compiles the PTX again at every start"
    details = tuple(filter(None, [describe_cost(environment.variables)]))
    return CheckResult("warn", summary, details, problem.fix, problem.entry)
