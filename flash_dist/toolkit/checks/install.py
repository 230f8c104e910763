"""Checks the installation: system, torch, files, build."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from packaging.version import InvalidVersion, Version

from ..builds.package import PACKAGE
from ..findings import install as ids
from ..findings.result import CheckResult
from ..machine.torch_install import TORCH_PROBLEMS
from ..product import IMPORTED_AS, NAME, PRODUCT, PROGRAM, PROJECT_FOLDER
from ..targets.advice import GET_GLIBC, describe_archs, torch_fix
from ..targets.wording import count, few_lines, list_few

if TYPE_CHECKING:
    from ..machine.torch_install import Torch
    from .environment import Environment

_SHOWN_DIFFERENCES = 8
_LEAVE = (
    "leave the source tree, which Python imports instead of the wheel: `cd ..` and run it again"
)


def check_system(environment: Environment) -> CheckResult:
    """Describe the operating system and Python; check that the C library is glibc."""
    summary = (
        f"{environment.system}, {environment.machine}, {environment.libc}, "
        f"Python {environment.python}"
    )
    if not environment.libc.startswith("glibc"):
        summary = f"the wheels are built for glibc, this system has {environment.libc} ({summary})"
        return CheckResult("fail", summary, fix=GET_GLIBC, entry=ids.LIBC_UNSUPPORTED)
    return CheckResult("ok", summary)


def check_torch(environment: Environment) -> CheckResult:
    """Check that torch is new enough, tested with this build, and has CUDA if there are GPUs."""
    torch, installed = environment.torch, environment.installed
    if torch.status != "ok":
        if torch.status == "absent" and not IMPORTED_AS:  # a standalone toolkit has no operators
            return CheckResult("skip", torch.reason)
        fix = torch.advise(installed.torch_min)
        return CheckResult("fail", torch.reason, fix=fix, entry=TORCH_PROBLEMS[torch.status])
    kind = f"CUDA {torch.cuda}" if torch.cuda else "CPU build"
    summary = f"torch {torch.version} ({kind})"
    oldest, newest = installed.torch_min, installed.torch_tested_max
    if oldest and _minor(torch.version) < _minor(oldest):
        summary = f"{summary} is too old: this build needs {oldest} or newer"
        result = CheckResult("fail", summary, fix=torch_fix(oldest), entry=ids.TORCH_TOO_OLD)
        return _prefer_another(environment, result)
    if environment.cuda.gpus and not torch.cuda:
        summary = f"{summary} cannot use the GPU of this machine"
        fix = "install a CUDA build of torch (https://pytorch.org/get-started/locally)"
        result = CheckResult("fail", summary, fix=fix, entry=ids.TORCH_CPU_BUILD)
        return _prefer_another(environment, result)
    if newest and _minor(torch.version) > _minor(newest):
        summary = f"{summary} is newer than {newest}, the newest torch this build was tested with"
        fix = f"if something fails, look for a newer {NAME}"
        return CheckResult("warn", summary, fix=fix, entry=ids.TORCH_NEWER_THAN_TESTED)
    devices = [gpu.device for gpu in environment.cuda.gpus]
    background: tuple[str, ...] = ()
    if devices and PRODUCT.torch_note:
        background = (PRODUCT.load(PRODUCT.torch_note)(devices, torch.version),)
    return CheckResult("ok", summary, background=background)


def _prefer_another(environment: Environment, result: CheckResult) -> CheckResult:
    """List every installed torch, and advise to use one that fits before installing another."""
    if not environment.torch.copies:
        return result
    first, *others = environment.torch.copies
    oldest, needed = environment.installed.torch_min, bool(environment.cuda.gpus)
    serving = [
        one
        for one in others
        if (one.cuda or not needed) and (not oldest or _minor(one.version) >= _minor(oldest))
    ]
    listed = (f"Python searches {first.folder} first", *(f"then: {one}" for one in others))
    take = f"remove {first.folder} from Python's search path, or remove the torch in it"
    step = environment.torch.step or take
    fix = f"{step}; {serving[0]} fits" if serving else f"{step}, then {result.fix}"
    return replace(result, details=listed, fix=fix)


def require_torch(torch: Torch, oldest: str = "") -> CheckResult:
    """Say that a selftest did not run because torch is absent, broken or shadowed."""
    summary = f"not run: {torch.reason}"
    fix = torch.advise(oldest)
    return CheckResult("fail", summary, fix=fix, entry=TORCH_PROBLEMS[torch.status])


def _minor(version: str) -> tuple[int, int]:
    """Return the major and minor version: tests cover all patch releases of a minor version."""
    try:
        parsed = Version(version)
    except InvalidVersion:
        return (0, 0)
    return parsed.major, parsed.minor


def check_install(environment: Environment) -> CheckResult:
    """Check that the installed files are exactly the files that pip recorded, in one folder."""
    files = environment.files
    if files.unreadable and not (files.missing or files.changed):
        summary = (
            f"this user cannot read {count(len(files.unreadable), 'file')} in {files.folder}: "
            f"{list_few(files.unreadable, _SHOWN_DIFFERENCES)}"
        )
        fix = f"as its owner: `chmod -R a+rX '{files.folder}/{PACKAGE.name}'*`"
        return CheckResult("fail", summary, fix=fix, entry=ids.INSTALL_UNREADABLE)
    if files.missing or files.changed:
        parts = [
            f"{_count_files(names)} {what}"
            for names, what in ((files.missing, "missing"), (files.changed, "changed"))
            if names
        ]
        names = (*files.missing, *files.changed)
        summary = f"{' and '.join(parts)} in {files.folder}: {list_few(names, _SHOWN_DIFFERENCES)}"
        return CheckResult("fail", summary, fix=reinstall_fix(), entry=ids.INSTALL_DAMAGED)
    if files.copies:
        copies = list_few(files.copies, _SHOWN_DIFFERENCES)
        summary = f"{PACKAGE.name} is installed in {files.folder}, which is used, and in {copies}"
        fix = _leave(environment) or f"remove the copy, or `pip uninstall {PACKAGE.name}` there"
        return CheckResult("warn", summary, fix=fix, entry=ids.INSTALL_TWICE)
    if files.leftovers:
        leftovers = list_few(files.leftovers, _SHOWN_DIFFERENCES)
        summary = f"files that this version did not install: {leftovers}"
        details = (f"in {files.folder}",)
        fix = f"`pip uninstall {PACKAGE.name}`, delete what is left, and install again"
        return CheckResult("warn", summary, details, fix, ids.INSTALL_LEFTOVERS)
    if files.status == "unrecorded":
        summary = f"pip has no record of the package in {files.folder}"
        return CheckResult("ok", summary)
    return CheckResult("ok", f"{files.count} files as recorded, in {files.folder}")


def _count_files(names: tuple[str, ...]) -> str:
    return "1 file is" if len(names) == 1 else f"{len(names)} files are"


def check_build(environment: Environment) -> CheckResult:
    """Check that the build manifest and the embedded code exist and agree."""
    installed = environment.installed
    build = installed.build
    if build is None and not IMPORTED_AS:
        summary = "this is the toolkit by itself, which has no kernels to judge"
        return CheckResult("skip", summary, fix=_name_builds())
    if build is None:
        problems = (installed.manifest_problem, installed.library_problem)
        summary = f"no built {NAME} was found: neither its manifest nor its kernels can be read"
        details = tuple(problem for problem in problems if problem)
        return CheckResult("fail", summary, details, build_fix(environment), ids.NOT_BUILT)
    archs = describe_archs(build.archs)
    summary = f"{build.name}, {build.counts} for {archs}"
    if installed.library_problem or installed.manifest_problem:
        problem = installed.library_problem or installed.manifest_problem
        entry = ids.LIBRARY_UNREADABLE if installed.library_problem else ids.MANIFEST_UNREADABLE
        details = (f"judged by what could be read: {summary}",)
        fix = installed.access_fix or reinstall_fix()
        return CheckResult("fail", problem, details, fix, entry)
    if installed.differences:
        summary = f"the code embedded in {build.name} differs from its manifest"
        details = few_lines(installed.differences, _SHOWN_DIFFERENCES)
        return CheckResult("fail", summary, details, reinstall_fix(), ids.EMBEDDED_DIFFERS)
    return CheckResult("ok", summary)


def _name_builds() -> str:
    """Return the commands with which a standalone toolkit judges a build."""
    name = NAME if PROJECT_FOLDER else "PACKAGE"
    installed = f"`python -m {name} doctor` judges the installed package"
    return f"{installed}, `{PROGRAM} doctor --wheel WHEEL` a wheel before it is installed"


def _leave(environment: Environment) -> str:
    """Return the step to take if Python imports sources instead of a wheel; otherwise empty."""
    files = environment.files
    if files.in_sources and files.copies:
        return _LEAVE
    named = map(os.path.normpath, environment.variables.get("PYTHONPATH", "").split(os.pathsep))
    if files.copies and files.status == "unrecorded" and files.folder in named:
        return f"remove {files.folder} from PYTHONPATH: Python imports it instead of the wheel"
    return ""


def build_fix(environment: Environment) -> str:
    """Return the step after which Python finds a build: install a wheel, leave sources, or both."""
    files = environment.files
    if leave := _leave(environment):
        return leave
    if files.in_sources:
        get = "install a wheel: `nox -s build_wheels -- <arch set>` builds one into dist/"
        return f"{get}, then leave the source tree: `cd ..`"
    return f"install a wheel: `{PROGRAM} select` says which, and how"


def reinstall_fix() -> str:
    """Return the step to take if installed files differ from the build."""
    return "`pip install --force-reinstall --no-deps` the wheel again"
