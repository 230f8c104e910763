"""Checks that every wheel must pass before it is put into dist/, on any machine.

python -m PACKAGE.toolkit.make.wheels.gates --archs '9.0a' --budget BYTES --platform TAG WHEEL
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version

from ...audit.own import audit_wheel, describe_failure
from ...audit.verify import verify_wheel
from ...binaries.wheel import open_wheel
from ...builds.contents import LIBRARIES, MANIFEST
from ...builds.manifest import declare_build
from ...builds.published import load_archsets
from ...cli.audit import print_audit
from ...cli.terminal.results import make_console, print_result
from ...errors import KernelsError
from ...product import NAME
from ...targets.archs import ArchSet
from ...targets.compatibility import judge
from ...targets.devices import KNOWN_DEVICES
from ...targets.verdict import Situation, judge_device
from ...targets.wording import list_few
from ..command import command
from ..compile.build_info import hash_sources
from ..project import ARCHSETS, MAKE, PACKAGE, ROOT, TEMPORARY, find_installed, load_project
from .fingerprints import recordings_of
from .platform_tags import require_glibc, require_platform, require_same_tags
from .run_time import run_time_files

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ...audit.own import AuditResult
    from ...builds.manifest import Manifest


class WheelBuildError(KernelsError):
    """A step of a build failed, or a wheel did not pass a check."""


def audit(wheel: Path, asked: ArchSet) -> AuditResult:
    """Check a wheel against its manifest, the requested set and the sources; print its sizes."""
    result = audit_wheel(wheel, budget_bytes=asked.budget_bytes)
    print_audit(make_console(), result)  # `audit --kernels WHEEL` lists every kernel
    if not result:
        raise WheelBuildError(describe_failure(result))
    require_archs(result, asked)
    require_served(result.contents.manifest)
    require_fresh(wheel, result.contents.manifest)
    require_same_tags(wheel)
    verify(wheel)
    require_package(wheel, recordings_of(result.contents.manifest))
    return result


def verify(wheel: Path) -> None:
    """Print the results of `verify` on a finished wheel; raise if one fails or there is none."""
    results = [result for result in verify_wheel(wheel).results if result.status != "skip"]
    if not results:
        message = f"`{wheel.name}` is not of this package, and nothing of it was verified"
        raise WheelBuildError(message)
    for result in results:
        print_result(make_console(), result)
    for result in results:
        if not result:
            details = "".join(f"\n  {detail}" for detail in result.details)
            message = f"`{wheel.name}`: {result.summary}{details}"
            raise WheelBuildError(message)


def require_archs(result: AuditResult, asked: ArchSet) -> None:
    """Check that a wheel has the requested targets: a sound wheel may have other targets."""
    built = result.contents.manifest.arch_set
    if built.archs != asked.archs:
        message = f"{result.contents.path} is built for `{built}`, requested was `{asked}`"
        raise WheelBuildError(message, hint="the arch set did not reach the compiler")


def require_served(manifest: Manifest) -> None:
    """Check that each known GPU that runs SASS of the wheel can run every kernel meant for it."""
    build = declare_build(manifest)
    compiled = [arch for arch in manifest.arch_set.archs if not arch.ptx]
    for device in KNOWN_DEVICES:
        if not any(judge(arch, device) for arch in compiled):
            continue
        verdict = judge_device(build, Situation(device))
        lacking = next((kernel.key for kernel in verdict.kernels if not kernel), None)
        if lacking is not None:
            named = " ".join(map(str, (lacking.role, *lacking.words, *lacking.sizes)))
            message = f"compute capability {device} has no kernel `{named}`: {verdict.reason}"
            hint = "add a tile with less shared memory, or `floors` of the axis of its size"
            raise WheelBuildError(message, hint=hint)


def require_fresh(wheel: Path, manifest: Manifest) -> None:
    """Check that `_build.json` matches these sources: an older one may list the same kernels."""
    project = load_project()
    told = {
        "the hash of the C++ and CUDA files": (manifest.sources, hash_sources()),
        "the published sets": (
            {one.name: one.archs for one in manifest.archsets},
            {one.name: one.archs for one in load_archsets(ARCHSETS).values()},
        ),
        "the torch versions": (
            (manifest.torch_min, manifest.torch_tested_max),
            (project.torch_min, project.torch_tested_max),
        ),
    }
    stale = [what for what, (found, wanted) in told.items() if found != wanted]
    if stale:
        named = ", ".join(stale)
        message = f"`{wheel.name}` has a stale _build.json, it differs in {named}"
        raise WheelBuildError(message, hint="build it again from this source")


def require_package(wheel: Path, others: Mapping[str, bytes], root: Path = ROOT) -> None:
    """Check that the package's Python files and data are the same as in the sources.

    Args:
        wheel: The wheel.
        others: Contents, by name, of files that differ from the sources in this wheel.
        root: The folder of the project.
    """
    package = root / PACKAGE.relative_to(ROOT)
    files = find_installed(package)
    sources = {
        f"{NAME}/{path.relative_to(package).as_posix()}": path.read_bytes() for path in files
    }
    sources |= {f"{NAME}/{name}": data for name, data in {**run_time_files(), **others}.items()}
    with open_wheel(wheel) as opened:
        packed = set(opened.names)
        missing = [name for name in sorted(sources) if name not in packed]
        other = [
            name for name in sorted(packed & sources.keys()) if opened.read(name) != sources[name]
        ]
    built = {MANIFEST, *LIBRARIES, *sources}
    strange = [name for name in sorted(packed - built) if name.startswith(f"{NAME}/")]
    wrong = [
        *(f"{name} is missing" for name in missing),
        *(f"{name} differs" for name in other),
        *(f"{name} is not in the sources" for name in strange),
    ]
    if wrong or not sources:
        message = f"`{wheel.name}` does not hold the package: {list_few(wrong, 5)}"
        raise WheelBuildError(message, hint="the sources changed during the build: build again")


def run_tools(wheel: Path, folder: Path) -> None:
    """Run third-party tools that check the use of torch's stable ABI and of glibc."""
    require_glibc(wheel)
    shutil.unpack_archive(wheel, folder, "zip")
    run(["torch-abi-audit", str(folder / NAME), "--check", "torch"], os.environ)
    _check_oldest_torch(folder / NAME)
    run(["auditwheel", "show", str(wheel)], os.environ)


def _check_oldest_torch(package: Path) -> None:
    """Check that the libraries need no torch newer than the `torch_min` of the project."""
    command = ["torch-abi-audit", str(package), "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    versions = set(re.findall(r'"min_torch[a-z_]*": "([^"]+)"', done.stdout))
    promised = Version(load_project().torch_min)
    if not versions or any(Version(one) > promised for one in versions):
        message = f"the binding needs torch {sorted(versions) or 'unknown'}, promised is {promised}"
        raise WheelBuildError(message)


def repair(raw: Path, environ: Mapping[str, str], folder: Path) -> Path:
    """Make a copy of the wheel with the oldest manylinux tag that fits it; return its path."""
    run(
        [sys.executable, "-m", f"{__package__}.repair", str(raw), str(folder)],
        environ,
    )
    return next(folder.glob("*.whl"))


def run(
    command: Sequence[str],
    environ: Mapping[str, str],
    folder: Path = ROOT,
    *,
    hint: str = "its output is above",
    apart: bool = False,
) -> None:
    """Run a command with its output shown to the user; raise if it fails.

    Args:
        command: Program and arguments.
        environ: Environment of the command.
        folder: Working folder of the command.
        hint: The remedy if it fails.
        apart: Let Ctrl-C reach only this process, which then ends the command and its children.
            Otherwise each Python program among them would print a traceback.
    """
    try:
        call = _call_apart if apart else subprocess.call
        code = call(command, env=dict(environ), cwd=folder)
    except FileNotFoundError as error:
        message = f"`{command[0]}` is not installed, which a wheel must pass"
        raise WheelBuildError(message, hint="`nox -s build_wheels` installs it") from error
    if code:
        words = " ".join([Path(command[0]).name, *command[1:3]])
        message = f"`{words}` failed with exit code {code}"
        raise WheelBuildError(message, hint=hint)


def _call_apart(command: Sequence[str], *, env: Mapping[str, str], cwd: Path) -> int:
    with subprocess.Popen(command, env=env, cwd=cwd, start_new_session=True) as process:
        try:
            return process.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            raise


def read_arguments(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line that `make/container/portable.py` writes."""
    parser = argparse.ArgumentParser(prog=f"python -m {MAKE}.wheels.gates")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--archs", required=True, help="what was asked for: 8.0;9.0a+PTX")
    parser.add_argument("--budget", type=int, help="bytes that the wheel may have")
    parser.add_argument("--platform", required=True, help="the one platform tag it must have")
    return parser.parse_args(args)


@command
def main() -> int:
    """Run the command, which cibuildwheel calls to audit a wheel."""
    args = read_arguments()
    asked = replace(ArchSet.parse(args.archs), budget_bytes=args.budget)
    require_platform(args.wheel, args.platform)
    audit(args.wheel, asked)
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as folder:
        run_tools(args.wheel, Path(folder) / "unpacked")
    return 0


if __name__ == "__main__":
    sys.exit(main())
