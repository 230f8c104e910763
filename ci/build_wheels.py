"""Build, tag and audit one wheel per arch set into dist/<set>/; see `nox -s build_wheels`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version

from ci.choose import VARIABLE, choose_sets
from ci.project import ARCHSETS, ROOT, load_project
from ci.report import report_path
from ci.toolchain import find_toolchain
from flash_dist.audit import AuditResult, audit_wheel, describe_failure
from flash_dist.cli.audit import print_audit
from flash_dist.cli.results import make_console, print_result
from flash_dist.errors import FlashDistError
from flash_dist.published import load_archsets
from flash_dist.verify import check_record, check_sbom

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flash_dist.archs import ArchSet

# Loaded by torch, never to be packed or counted.
EXCLUDED = ("libtorch*.so*", "libc10*.so*", "libcuda.so.*", "libcudart.so.*")


class WheelBuildError(FlashDistError):
    """A step failed; its own words are above."""


@dataclass(frozen=True)
class BuiltWheel:
    """One finished wheel."""

    archset: ArchSet
    path: Path
    audit: AuditResult
    objects: str  # "N objects compiled, M reused"
    seconds: float

    def __str__(self) -> str:
        size = self.path.stat().st_size / 1e6
        name = self.path.relative_to(ROOT)
        return f"{self.archset.name}: {self.objects}; {size:.2f} MB in {self.seconds:.0f} s: {name}"


def build_wheel(archset: ArchSet, environ: Mapping[str, str], *, published: bool) -> BuiltWheel:
    """Build one wheel and let it pass every gate."""
    start = time.monotonic()
    print(f"\n== {archset.name}: {archset}", flush=True)
    target = ROOT / "dist" / archset.name
    with tempfile.TemporaryDirectory(prefix="flash_dist-") as folder:
        raw = _make_raw_wheel(archset, environ, Path(folder), published=published)
        wheel = _repair(raw, environ, Path(folder) / "repaired")
        audit = _audit(wheel, archset.budget_bytes)
        _verify(wheel)
        _run_tools(wheel, Path(folder) / "unpacked")
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        wheel = Path(shutil.move(wheel, target))
    objects = report_path(archset.label).read_text(encoding="utf-8").strip()
    return BuiltWheel(archset, wheel, audit, objects, time.monotonic() - start)


def _make_raw_wheel(
    archset: ArchSet, environ: Mapping[str, str], folder: Path, *, published: bool
) -> Path:
    chosen = {
        "FLASH_DIST_ARCH_SET": archset.name if published else "",
        VARIABLE: "" if published else str(archset),
    }
    command = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    _run([sys.executable, *command], {**environ, **chosen})
    return next(folder.glob("*.whl"))


def _repair(raw: Path, environ: Mapping[str, str], folder: Path) -> Path:
    """Give the wheel the oldest manylinux tag that is true."""
    excludes = [word for library in EXCLUDED for word in ("--exclude", library)]
    command = ["auditwheel", "repair", "--plat", "auto", "--only-plat", *excludes]
    _run([*command, "-w", str(folder), str(raw)], environ)
    return next(folder.glob("*.whl"))


def _audit(wheel: Path, budget_bytes: int | None) -> AuditResult:
    """Compare the wheel with its manifest, and show what every kernel takes."""
    result = audit_wheel(wheel, budget_bytes=budget_bytes)
    print_audit(make_console(), result, kernels=True)
    if not result:
        raise WheelBuildError(describe_failure(result))
    return result


def _verify(wheel: Path) -> None:
    """Insist that RECORD and the bill of materials are those of the finished wheel."""
    for check in (check_record, check_sbom):
        result = check(wheel)
        print_result(make_console(), result)
        if not result:
            message = f"`{wheel.name}`: {result.summary}"
            raise WheelBuildError(message)


def _run_tools(wheel: Path, folder: Path) -> None:
    """Let the tools of others judge: Python's stable ABI, torch's, glibc."""
    _run(
        ["abi3audit", "--strict", "--summary", "--assume-minimum-abi3", "3.10", str(wheel)],
        os.environ,
    )
    shutil.unpack_archive(wheel, folder, "zip")
    _run(["torch-abi-audit", str(folder / "flash_dist"), "--check", "both"], os.environ)
    _check_oldest_torch(folder / "flash_dist")
    _run(["auditwheel", "show", str(wheel)], os.environ)


def _check_oldest_torch(package: Path) -> None:
    """Insist that no symbol is younger than the torch that the metadata promises."""
    command = ["torch-abi-audit", str(package), "--json"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    versions = set(re.findall(r'"min_torch[a-z_]*": "([^"]+)"', text))
    promised = Version(load_project().torch_min)
    if not versions or any(Version(one) > promised for one in versions):
        message = f"the binding needs torch {sorted(versions) or 'unknown'}, promised is {promised}"
        raise WheelBuildError(message)


def _run(command: Sequence[str], environ: Mapping[str, str]) -> None:
    done = subprocess.run(command, check=False, env=dict(environ), cwd=ROOT)
    if done.returncode:
        message = f"`{Path(command[0]).name} {command[1]}` failed with exit code {done.returncode}"
        raise WheelBuildError(message, hint="its own words are above")


def build_all(args: Sequence[str]) -> list[BuiltWheel]:
    """Build every chosen set, one after the other, from one build folder."""
    sets = load_archsets(ARCHSETS)
    choice = choose_sets(args, os.environ, sets, find_toolchain().cuda)
    print(choice, flush=True)
    environ = {**os.environ, "SOURCE_DATE_EPOCH": load_project().epoch}
    environ.pop("FLASH_DIST_ARCH_SET", None)
    return [build_wheel(one, environ, published=one.name in sets) for one in choice.sets]


def main() -> int:
    """Command line."""
    try:
        wheels = build_all(sys.argv[1:])
    except FlashDistError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print()
    for wheel in wheels:
        print(wheel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
