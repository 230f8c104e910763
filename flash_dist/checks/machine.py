"""Checks of machine and install: each a pure function from `Environment` to `CheckResult`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from ..builds.package import PACKAGE
from ..findings.result import CheckResult
from ..kernels.budget import BUDGET_VARIABLE, find_budget_problem
from ..targets.advice import GET_DRIVER, GET_GLIBC, describe_archs, driver_fix, torch_fix
from ..targets.compatibility import driver_refusal, is_set
from ..targets.devices import ZSTD_CUDA, first_driver, format_version, ptx_isa_cuda, toolkit_driver
from ..targets.verdict import SMEM_VARIABLE
from ..targets.wording import few_lines, list_few
from .host import describe_driver, explain_no_gpu

if TYPE_CHECKING:
    from ..machine.torch_install import Torch
    from ..targets.verdict import Build
    from .environment import Environment

_JIT_VARIABLES = ("CUDA_FORCE_PTX_JIT", "CUDA_DISABLE_PTX_JIT")
_SHOWN_DIFFERENCES = 8


def check_system(environment: Environment) -> CheckResult:
    """Operating system, C library and Python."""
    summary = (
        f"{environment.system}, {environment.machine}, {environment.libc}, "
        f"Python {environment.python}"
    )
    if not environment.libc.startswith("glibc"):
        return CheckResult(
            "system",
            "fail",
            f"the wheels are built for glibc, this system has {environment.libc} ({summary})",
            fix=GET_GLIBC,
            id="libc-unsupported",
        )
    return CheckResult("system", "ok", summary)


def check_torch(environment: Environment) -> CheckResult:
    """Torch is there, not too old, a CUDA build where there are GPUs, and tested."""
    torch, installed = environment.torch, environment.installed
    if torch.status != "ok":
        fix = torch_fix(installed.torch_min)
        return CheckResult("torch", "fail", torch.reason, fix=fix, id=f"torch-{torch.status}")
    kind = f"CUDA {torch.cuda}" if torch.cuda else "CPU build"
    summary = f"torch {torch.version} ({kind})"
    oldest, newest = installed.torch_min, installed.torch_tested_max
    if oldest and _minor(torch.version) < _minor(oldest):
        return CheckResult(
            "torch",
            "fail",
            f"{summary} is too old: this build needs {oldest} or newer",
            fix=torch_fix(oldest),
            id="torch-too-old",
        )
    if environment.cuda.gpus and not torch.cuda:
        return CheckResult(
            "torch",
            "fail",
            f"{summary} cannot use the GPU of this machine",
            fix="install a CUDA build of torch (https://pytorch.org/get-started/locally)",
            id="torch-cpu-build",
        )
    if newest and _minor(torch.version) > _minor(newest):
        return CheckResult(
            "torch",
            "warn",
            f"{summary} is newer than {newest}, the newest torch this build was tested with",
            fix="if something fails, look for a newer flash_dist",
            id="torch-newer-than-tested",
        )
    return CheckResult("torch", "ok", summary)


def require_torch(name: str, torch: Torch, oldest: str = "") -> CheckResult:
    """Say that a selftest did not run because torch is not there, or broken."""
    summary = f"not run: {torch.reason}"
    return CheckResult(name, "fail", summary, fix=torch_fix(oldest), id=f"torch-{torch.status}")


def _minor(version: str) -> tuple[int, int]:
    """Return major and minor: tests cover whole minor releases."""
    try:
        parsed = Version(version)
    except InvalidVersion:
        return (0, 0)
    return parsed.major, parsed.minor


def check_install(environment: Environment) -> CheckResult:
    """The files are those that pip recorded, once."""
    files = environment.files
    if files.missing or files.changed:
        parts = [
            f"{_count_files(names)} {what}"
            for names, what in (
                (files.missing, "missing"),
                (files.changed, "not what was installed"),
            )
            if names
        ]
        names = (*files.missing, *files.changed)
        return CheckResult(
            "install",
            "fail",
            f"{' and '.join(parts)} in {files.folder}: {list_few(names, _SHOWN_DIFFERENCES)}",
            fix=reinstall_fix(),
            id="install-damaged",
        )
    if files.copies:
        copies = list_few(files.copies, _SHOWN_DIFFERENCES)
        summary = f"{PACKAGE.name} lies in {files.folder}, which runs, and in {copies}"
        fix = f"remove the copy, or `pip uninstall {PACKAGE.name}` there"
        return CheckResult("install", "warn", summary, fix=fix, id="install-twice")
    if files.leftovers:
        leftovers = list_few(files.leftovers, _SHOWN_DIFFERENCES)
        summary = f"what no install of this version put there: {leftovers}"
        details = (f"in {files.folder}",)
        fix = f"`pip uninstall {PACKAGE.name}`, delete what is left, and install again"
        return CheckResult("install", "warn", summary, details, fix, "install-leftovers")
    if files.status == "unrecorded":
        summary = f"pip has no record of the package in {files.folder}"
        return CheckResult("install", "ok", summary)
    return CheckResult("install", "ok", f"{files.count} files as recorded, in {files.folder}")


def _count_files(names: tuple[str, ...]) -> str:
    return "1 file is" if len(names) == 1 else f"{len(names)} files are"


def check_build(environment: Environment) -> CheckResult:
    """The build manifest and the code really embedded are there and agree."""
    installed = environment.installed
    build = installed.build
    if build is None:
        problems = (installed.manifest_problem, installed.library_problem)
        return CheckResult(
            "build",
            "fail",
            "there is no built flash_dist here: neither its manifest nor its kernels can be read",
            tuple(problem for problem in problems if problem),
            "install a wheel: `nox -s build_wheels -- <arch set>` builds one into dist/",
            "not-built",
        )
    archs = describe_archs(build.archs)
    summary = f"{build.name}, {len(build.keys)} kernels for {archs}"
    if installed.library_problem or installed.manifest_problem:
        problem = installed.library_problem or installed.manifest_problem
        cause = "library-unreadable" if installed.library_problem else "manifest-unreadable"
        details = (f"judged by what is left: {summary}",)
        return CheckResult("build", "fail", problem, details, reinstall_fix(), cause)
    if installed.differences:
        return CheckResult(
            "build",
            "fail",
            f"the code embedded in {build.name} is not what its manifest declares",
            few_lines(installed.differences, _SHOWN_DIFFERENCES),
            reinstall_fix(),
            "embedded-differs",
        )
    return CheckResult("build", "ok", summary)


def reinstall_fix() -> str:
    """Return the step for files that are not what was built."""
    return "`pip install --force-reinstall --no-deps` the wheel again"


def check_variables(environment: Environment) -> CheckResult:
    """Variables that make the driver ignore embedded code, or that we cannot read."""
    shown = tuple(f"{name}={value}" for name, value in environment.variables.items())
    limit = environment.variables.get(SMEM_VARIABLE, "").strip()
    if limit and not (limit.isdecimal() and int(limit)):
        return CheckResult(
            "variables",
            "fail",
            f"{SMEM_VARIABLE} must be a number of bytes such as 65536, got `{limit}`",
            shown,
            f"`unset {SMEM_VARIABLE}`",
            "smem-limit-malformed",
        )
    problem = find_budget_problem(environment.variables.get(BUDGET_VARIABLE, ""))
    if problem:
        fix = f"`unset {BUDGET_VARIABLE}`"
        return CheckResult("variables", "fail", problem, shown, fix, "workspace-malformed")
    for name in _JIT_VARIABLES:
        if is_set(environment.variables, name):
            return CheckResult(
                "variables",
                "warn",
                f"{name} is set: the driver does not use all embedded code",
                shown,
                f"`unset {name}`",
                "jit-variable",
            )
    if limit:
        return CheckResult(
            "variables",
            "warn",
            f"{SMEM_VARIABLE} is set: smaller tiles than the GPU allows are used",
            shown,
            f"`unset {SMEM_VARIABLE}`",
            "smem-limit",
        )
    told = environment.host is not None and environment.host.nvml.gpus  # by `check_visible`
    if environment.variables.get("CUDA_VISIBLE_DEVICES") is not None and not told:
        visible = environment.variables["CUDA_VISIBLE_DEVICES"]
        summary = f"CUDA_VISIBLE_DEVICES={visible} hides the other GPUs, if there are any"
        return CheckResult("variables", "ok", summary, shown[1:])
    return CheckResult("variables", "ok", ", ".join(shown) or "none that changes what is loaded")


def check_driver(environment: Environment) -> CheckResult:
    """The driver is there and new enough for the toolkit, the PTX ISA and the compression."""
    cuda, build = environment.cuda, environment.installed.build
    explained = explain_no_gpu(environment)
    if explained is not None:
        return explained
    if cuda.status == "absent":
        return CheckResult(
            "driver",
            "skip",
            f"no NVIDIA driver here: {cuda.reason}",
            fix=GET_DRIVER,
            id="driver-absent",
        )
    if cuda.status == "broken":
        return CheckResult(
            "driver",
            "fail",
            f"the NVIDIA driver does not answer: {cuda.reason}",
            fix="`nvidia-smi` shows whether the driver works; after an update of it, reboot",
            id="driver-broken",
        )
    needs = driver_needs(build) if build else ()
    if cuda.driver is None:
        summary = "no driver given, taken as new enough"
        return CheckResult("driver", "ok", summary, needs)
    refusals = [driver_refusal(cuda.driver, v.origin) for v in build.variants] if build else []
    if build and refusals and all(refusals):
        return CheckResult(
            "driver",
            "fail",
            str(refusals[0]),
            needs,
            driver_fix(build, cuda.driver, (gpu.device for gpu in cuda.gpus)),
            "driver-too-old",
        )
    details = (*needs, *describe_driver(environment))
    return CheckResult("driver", "ok", str(cuda.driver), details)


def driver_needs(build: Build) -> tuple[str, ...]:
    """Say what each property of a build asks of the driver."""
    lines = []
    if build.toolkit:
        lines.append(f"CUDA {build.toolkit} needs driver {toolkit_driver(build.toolkit)} or newer")
    isas = {v.origin.ptx_isa for v in build.variants if v.arch.ptx and v.origin.ptx_isa}
    for isa in sorted(isas):
        cuda = ptx_isa_cuda(isa)
        release = first_driver(cuda) if cuda else None
        known = f"driver {release} or newer" if release else "a driver newer than we know"
        lines.append(f"PTX ISA {format_version(isa)} needs {known}")
    if any(variant.origin.codec == "zstd" for variant in build.variants):
        lines.append(f"zstd compression needs driver {first_driver(ZSTD_CUDA)} or newer")
    return tuple(lines)
