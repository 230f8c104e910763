"""Checks of machine and install: each a pure function from `Environment` to `CheckResult`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from ..builds.package import PACKAGE
from ..findings.driver import (
    DRIVER_ABSENT,
    DRIVER_BROKEN,
    DRIVER_TOO_OLD,
    JIT_VARIABLE,
    SMEM_LIMIT,
    SMEM_LIMIT_MALFORMED,
    WORKSPACE_MALFORMED,
)
from ..findings.install import (
    EMBEDDED_DIFFERS,
    INSTALL_DAMAGED,
    INSTALL_LEFTOVERS,
    INSTALL_TWICE,
    LIBC_UNSUPPORTED,
    LIBRARY_UNREADABLE,
    MANIFEST_UNREADABLE,
    NOT_BUILT,
    TORCH_CPU_BUILD,
    TORCH_NEWER_THAN_TESTED,
    TORCH_TOO_OLD,
)
from ..findings.result import CheckResult
from ..kernels.budget import BUDGET_VARIABLE, find_budget_problem
from ..machine.torch_install import TORCH_PROBLEMS
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
            "fail",
            f"the wheels are built for glibc, this system has {environment.libc} ({summary})",
            fix=GET_GLIBC,
            entry=LIBC_UNSUPPORTED,
        )
    return CheckResult("ok", summary)


def check_torch(environment: Environment) -> CheckResult:
    """Torch is there, not too old, a CUDA build where there are GPUs, and tested."""
    torch, installed = environment.torch, environment.installed
    if torch.status != "ok":
        fix = torch_fix(installed.torch_min)
        return CheckResult("fail", torch.reason, fix=fix, entry=TORCH_PROBLEMS[torch.status])
    kind = f"CUDA {torch.cuda}" if torch.cuda else "CPU build"
    summary = f"torch {torch.version} ({kind})"
    oldest, newest = installed.torch_min, installed.torch_tested_max
    if oldest and _minor(torch.version) < _minor(oldest):
        return CheckResult(
            "fail",
            f"{summary} is too old: this build needs {oldest} or newer",
            fix=torch_fix(oldest),
            entry=TORCH_TOO_OLD,
        )
    if environment.cuda.gpus and not torch.cuda:
        return CheckResult(
            "fail",
            f"{summary} cannot use the GPU of this machine",
            fix="install a CUDA build of torch (https://pytorch.org/get-started/locally)",
            entry=TORCH_CPU_BUILD,
        )
    if newest and _minor(torch.version) > _minor(newest):
        return CheckResult(
            "warn",
            f"{summary} is newer than {newest}, the newest torch this build was tested with",
            fix="if something fails, look for a newer flash_dist",
            entry=TORCH_NEWER_THAN_TESTED,
        )
    return CheckResult("ok", summary)


def require_torch(torch: Torch, oldest: str = "") -> CheckResult:
    """Say that a selftest did not run because torch is not there, or broken."""
    summary = f"not run: {torch.reason}"
    return CheckResult("fail", summary, fix=torch_fix(oldest), entry=TORCH_PROBLEMS[torch.status])


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
            "fail",
            f"{' and '.join(parts)} in {files.folder}: {list_few(names, _SHOWN_DIFFERENCES)}",
            fix=reinstall_fix(),
            entry=INSTALL_DAMAGED,
        )
    if files.copies:
        copies = list_few(files.copies, _SHOWN_DIFFERENCES)
        summary = f"{PACKAGE.name} lies in {files.folder}, which runs, and in {copies}"
        fix = f"remove the copy, or `pip uninstall {PACKAGE.name}` there"
        return CheckResult("warn", summary, fix=fix, entry=INSTALL_TWICE)
    if files.leftovers:
        leftovers = list_few(files.leftovers, _SHOWN_DIFFERENCES)
        summary = f"what no install of this version put there: {leftovers}"
        details = (f"in {files.folder}",)
        fix = f"`pip uninstall {PACKAGE.name}`, delete what is left, and install again"
        return CheckResult("warn", summary, details, fix, INSTALL_LEFTOVERS)
    if files.status == "unrecorded":
        summary = f"pip has no record of the package in {files.folder}"
        return CheckResult("ok", summary)
    return CheckResult("ok", f"{files.count} files as recorded, in {files.folder}")


def _count_files(names: tuple[str, ...]) -> str:
    return "1 file is" if len(names) == 1 else f"{len(names)} files are"


def check_build(environment: Environment) -> CheckResult:
    """The build manifest and the code really embedded are there and agree."""
    installed = environment.installed
    build = installed.build
    if build is None:
        problems = (installed.manifest_problem, installed.library_problem)
        return CheckResult(
            "fail",
            "there is no built flash_dist here: neither its manifest nor its kernels can be read",
            tuple(problem for problem in problems if problem),
            "install a wheel: `nox -s build_wheels -- <arch set>` builds one into dist/",
            NOT_BUILT,
        )
    archs = describe_archs(build.archs)
    summary = f"{build.name}, {len(build.keys)} kernels for {archs}"
    if installed.library_problem or installed.manifest_problem:
        problem = installed.library_problem or installed.manifest_problem
        entry = LIBRARY_UNREADABLE if installed.library_problem else MANIFEST_UNREADABLE
        details = (f"judged by what is left: {summary}",)
        return CheckResult("fail", problem, details, reinstall_fix(), entry)
    if installed.differences:
        return CheckResult(
            "fail",
            f"the code embedded in {build.name} is not what its manifest declares",
            few_lines(installed.differences, _SHOWN_DIFFERENCES),
            reinstall_fix(),
            EMBEDDED_DIFFERS,
        )
    return CheckResult("ok", summary)


def reinstall_fix() -> str:
    """Return the step for files that are not what was built."""
    return "`pip install --force-reinstall --no-deps` the wheel again"


def check_variables(environment: Environment) -> CheckResult:
    """Variables that make the driver ignore embedded code, or that we cannot read."""
    shown = tuple(f"{name}={value}" for name, value in environment.variables.items())
    limit = environment.variables.get(SMEM_VARIABLE, "").strip()
    if limit and not (limit.isdecimal() and int(limit)):
        return CheckResult(
            "fail",
            f"{SMEM_VARIABLE} must be a number of bytes such as 65536, got `{limit}`",
            shown,
            f"`unset {SMEM_VARIABLE}`",
            SMEM_LIMIT_MALFORMED,
        )
    problem = find_budget_problem(environment.variables.get(BUDGET_VARIABLE, ""))
    if problem:
        fix = f"`unset {BUDGET_VARIABLE}`"
        return CheckResult("fail", problem, shown, fix, WORKSPACE_MALFORMED)
    for name in _JIT_VARIABLES:
        if is_set(environment.variables, name):
            return CheckResult(
                "warn",
                f"{name} is set: the driver does not use all embedded code",
                shown,
                f"`unset {name}`",
                JIT_VARIABLE,
            )
    if limit:
        return CheckResult(
            "warn",
            f"{SMEM_VARIABLE} is set: smaller tiles than the GPU allows are used",
            shown,
            f"`unset {SMEM_VARIABLE}`",
            SMEM_LIMIT,
        )
    told = environment.host is not None and environment.host.nvml.gpus  # by `check_visible`
    if environment.variables.get("CUDA_VISIBLE_DEVICES") is not None and not told:
        visible = environment.variables["CUDA_VISIBLE_DEVICES"]
        summary = f"CUDA_VISIBLE_DEVICES={visible} hides the other GPUs, if there are any"
        return CheckResult("ok", summary, shown[1:])
    return CheckResult("ok", ", ".join(shown) or "none that changes what is loaded")


def check_driver(environment: Environment) -> CheckResult:
    """The driver is there and new enough for the toolkit, the PTX ISA and the compression."""
    cuda, build = environment.cuda, environment.installed.build
    explained = explain_no_gpu(environment)
    if explained is not None:
        return explained
    if cuda.status == "absent":
        return CheckResult(
            "skip",
            f"no NVIDIA driver here: {cuda.reason}",
            fix=GET_DRIVER,
            entry=DRIVER_ABSENT,
        )
    if cuda.status == "broken":
        return CheckResult(
            "fail",
            f"the NVIDIA driver does not answer: {cuda.reason}",
            fix="`nvidia-smi` shows whether the driver works; after an update of it, reboot",
            entry=DRIVER_BROKEN,
        )
    needs = driver_needs(build) if build else ()
    if cuda.driver is None:
        summary = "no driver given, taken as new enough"
        return CheckResult("ok", summary, needs)
    refusals = [driver_refusal(cuda.driver, v.origin) for v in build.variants] if build else []
    if build and refusals and all(refusals):
        return CheckResult(
            "fail",
            str(refusals[0]),
            needs,
            driver_fix(build, cuda.driver, (gpu.device for gpu in cuda.gpus)),
            DRIVER_TOO_OLD,
        )
    details = (*needs, *describe_driver(environment))
    return CheckResult("ok", str(cuda.driver), details)


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
