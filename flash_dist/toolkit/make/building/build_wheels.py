"""Builds one wheel per arch set into dist/<set>/ with this machine's compiler, and audits it.

`nox -s build_wheels` runs this module if no container engine answers, or with `--native`.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ...builds.published import load_archsets
from ..project import ARCHSETS, ROOT, TEMPORARY, load_project, read_report
from ..toolchain.nvcc import find_toolchain, home_variable
from ..wheels.gates import audit, repair, run, run_tools
from .backend import UNFINISHED
from .build_many import Builds, BuiltWheel, build_each, report
from .choose import NAMED, VARIABLE, choose_sets
from .sdist import BY_ITSELF

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ...targets.archs import ArchSet


def build_wheel(archset: ArchSet, environ: Mapping[str, str], *, published: bool) -> BuiltWheel:
    """Build one wheel and run every check on it."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as folder:
        raw = _make_raw_wheel(archset, environ, Path(folder), published=published)
        wheel = repair(raw, environ, Path(folder) / "repaired")
        audit(wheel, archset)
        run_tools(wheel, Path(folder) / "unpacked")
        wheel = put_into_dist(wheel, archset)
    return BuiltWheel(archset, wheel, read_report(archset.label), time.monotonic() - start)


def dist_folder(archset: ArchSet) -> Path:
    """Return the folder for a set's wheel."""
    return ROOT / "dist" / archset.name


def put_into_dist(wheel: Path, archset: ArchSet) -> Path:
    """Move a wheel into dist/ in place of the older wheel, which stays if the disk is full."""
    target = dist_folder(archset)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".part-", dir=target.parent) as folder:
        part = Path(folder) / target.name  # renamed when the wheel is complete
        part.mkdir()
        shutil.move(wheel, part)
        shutil.rmtree(target, ignore_errors=True)
        part.rename(target)
    return target / wheel.name


def arch_environ(archset: ArchSet, *, published: bool) -> dict[str, str]:
    """Return the variables that tell the backend which set to build: its name or its targets."""
    return {NAMED: archset.name if published else "", VARIABLE: "" if published else str(archset)}


def _make_raw_wheel(
    archset: ArchSet, environ: Mapping[str, str], folder: Path, *, published: bool
) -> Path:
    chosen = arch_environ(archset, published=published)
    options = ["--wheel", *BY_ITSELF, "-C", f"{UNFINISHED}=true", "--outdir", str(folder)]
    run([sys.executable, "-m", "build", *options, str(ROOT)], {**environ, **chosen}, apart=True)
    return next(folder.glob("*.whl"))


def build_all(args: Sequence[str]) -> Builds:
    """Build every chosen set, one after the other, in one build folder."""
    sets = load_archsets(ARCHSETS)
    choice = choose_sets(args, os.environ, sets, find_toolchain().cuda)
    print(choice, flush=True)
    environ = {**os.environ, "SOURCE_DATE_EPOCH": load_project().epoch}
    environ.pop(NAMED, None)
    return build_each(
        choice.sets,
        lambda one: build_wheel(one, toolkit_environ(one, environ), published=one.name in sets),
    )


def toolkit_environ(archset: ArchSet, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a build.

    If a variable names a toolkit for the set's major CUDA version, CUDA_HOME is that toolkit.
    """
    home = environ.get(home_variable(archset.toolkit))
    return {**environ, "CUDA_HOME": home} if home else dict(environ)


if __name__ == "__main__":
    sys.exit(report(build_all))
