"""Packs a project's wheel, or its sources, with setuptools.

setuptools reads `[project]` and `[tool.setuptools]` of pyproject.toml as usual. This module adds
everything that depends on the arch set: version, dependencies, the libraries and the record of the
build. A package that does not contain this toolkit gets a copy of the toolkit's run-time half, as
`_toolkit`.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from setuptools import Distribution, Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

from ...builds.linkage import EXTRAS, runtime_requirements
from ...builds.manifest import FILE_NAME as MANIFEST
from ...builds.manifest import declare_build, load_manifest
from ...builds.metadata import ANY_PYTHON
from ...builds.published import load_archsets
from ...product import NAME
from ...targets.wording import count
from ..command import told_in_a_sentence
from ..compile.build_info import make_manifest
from ..compile.native import NativeOptions, build_native
from ..compile.sbom import write_sbom
from ..project import (
    ARCHSETS,
    EMBEDDED,
    NOT_INSTALLED,
    PACKAGE,
    PYPROJECT,
    ROOT,
    TEMPORARY,
    build_folder,
    list_below,
    load_project,
    read_pyproject,
    report_path,
)
from ..toolchain.cross import target_machine
from ..toolchain.nvcc import find_toolchain
from ..toolchain.preflight import read_host
from ..toolchain.torch_headers import FOLDER as HEADERS
from ..toolchain.torch_headers import find_headers
from ..wheels.fingerprints import recordings_of
from ..wheels.run_time import run_time_files
from .plan import plan_this_build
from .sdist import ADDED, tracked_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def choose_metadata(*, sources: bool, labelled: bool = True) -> dict[str, Any]:
    """Return the version and dependencies of an arch set's wheel, or of the sources.

    The result has optional dependencies if `dynamic` of the project lists `optional-dependencies`.

    Args:
        sources: Return the version and dependencies of the sources.
        labelled: Add the label of the arch set to the version of a wheel.
    """
    project = load_project()
    needed = list(project.requirements)
    dynamic = read_pyproject(PYPROJECT)["project"]["dynamic"]
    extras = {"extras_require": EXTRAS} if "optional-dependencies" in dynamic else {}
    if sources:
        return {"version": project.version, "install_requires": needed, **extras}
    plan = plan_this_build()
    version = project.wheel_version(plan.toolkit, plan.archset.label)
    return {
        "version": version if labelled else project.version,
        "install_requires": [*needed, *runtime_requirements(plan.toolkit)],
        **extras,
    }


class BuildNative(build_ext):
    """Builds the libraries and the manifest in place of setuptools' extension."""

    def run(self) -> None:
        """Compile the libraries and copy them into the package; exit with a message on failure."""
        with told_in_a_sentence():
            self.compile()

    def compile(self) -> None:
        """Compile with CMake; write the libraries, the wheel's generated files and the report."""
        toolchain = find_toolchain()
        headers = find_headers(build_folder() / HEADERS)
        print(headers, flush=True)
        plan = plan_this_build()
        jobs = read_host(os.environ).jobs
        published = tuple(load_archsets(ARCHSETS).values())
        options = NativeOptions(plan.archset, published, toolchain, headers, jobs)
        build = build_native(options)
        package = Path(self.build_lib) / NAME
        package.mkdir(parents=True, exist_ok=True)
        for library in build.libraries:
            shutil.copy2(library, package)
        for name, data in run_time_files().items():
            path = package / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        version = str(self.distribution.get_version())
        manifest = make_manifest(build, options, package, version)  # build_py has filled `package`
        (package / MANIFEST).write_text(manifest.to_text(), encoding="utf-8")
        for name, data in recordings_of(manifest).items():
            (package / name).write_bytes(data)
        report = report_path(plan.archset.label)
        report.parent.mkdir(parents=True, exist_ok=True)
        targets = count(len(manifest.targets), "target")
        counts = f"{declare_build(manifest).counts} for {targets}"
        report.write_text(f"{counts}; {build}\n", encoding="utf-8")


class BuildModules(build_py):
    """Excludes the toolkit's modules that build wheels."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """Return (package, name, path) of each module in `package_dir` that wheels contain."""
        found: list[tuple[str, str, str]] = super().find_package_modules(  # type: ignore[no-untyped-call]
            package, package_dir
        )
        left_out = set(NOT_INSTALLED)
        return [
            one
            for one in found
            if not left_out & {Path(one[2]).resolve(), *Path(one[2]).resolve().parents}
        ]


class WheelWithBill(bdist_wheel):
    """Tags the wheel, and adds the bill of materials, so that RECORD lists it like every file."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return one tag that fits all Python versions: the libraries call only torch and CUDA."""
        return (*ANY_PYTHON, f"linux_{target_machine()}")

    def write_wheelfile(self, wheelfile_base: str, *args: str) -> None:
        """Write the bill of materials as the last file before RECORD."""
        super().write_wheelfile(wheelfile_base, *args)
        dist_info = Path(wheelfile_base)
        print(f"packing {dist_info.name.removesuffix('.dist-info')}", flush=True)
        write_sbom(dist_info, load_manifest(dist_info.parent / NAME))


class SdistWithSources(sdist):
    """Adds the files of `_list_sources`, so that a standalone project needs no MANIFEST.in."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Put the files to pack into a folder."""
        super().make_release_tree(base_dir, sorted({*files, *_list_sources()}))
        if not (EMBEDDED or (ROOT / "setup.cfg").is_file()):
            # setuptools writes setup.cfg. An sdist made from this sdist would list that file.
            (Path(base_dir) / "setup.cfg").unlink(missing_ok=True)


def _list_sources() -> Iterator[str]:
    """Yield the files that [tool.kernels] names, and those in git or in an unpacked sdist."""
    if EMBEDDED:  # then MANIFEST.in lists everything
        return
    unpacked = [ROOT] if (ROOT / "PKG-INFO").is_file() else []
    known = [ROOT / name for name in tracked_files() or ()]
    for path in list_below(*load_project().compiled, *known, *unpacked):
        inside = path.relative_to(ROOT).as_posix()
        if "/." not in f"/{inside}" and not inside.startswith(ADDED):
            yield inside


def pack(*words: str, labelled: bool = True) -> Distribution:
    """Run setuptools with arguments of a command line.

    Args:
        words: The arguments, such as `bdist_wheel`.
        labelled: Add the label of the arch set to the version of a wheel.

    Temporary files are in a private staging folder, so that no module that was deleted since an
    earlier build is packed, and parallel builds do not collide.
    """
    with told_in_a_sentence():
        metadata = choose_metadata(sources="sdist" in words, labelled=labelled)
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as staging, warnings.catch_warnings():
        # bdist_wheel itself runs the command `install`, which is deprecated.
        warnings.filterwarnings("ignore", "setup.py install is deprecated")
        made: Distribution = setup(
            **metadata,
            **_find_modules(),
            script_name="setup.py",
            script_args=list(words),
            verbose=False,  # print warnings, but not one line per file
            ext_modules=[Extension(f"{NAME}._C", sources=[])],
            cmdclass={
                "build_py": BuildModules,
                "build_ext": BuildNative,
                "bdist_wheel": WheelWithBill,
                "sdist": SdistWithSources,
            },
            options={"build": {"build_base": staging}},
        )
        return made


def _find_modules() -> dict[str, Any]:
    """Return setuptools' settings for the project's own package, unless `packages` is set."""
    told = read_pyproject(PYPROJECT).get("tool", {}).get("setuptools", {})
    if "packages" in told:
        return {}
    where = PACKAGE.parent.relative_to(ROOT).as_posix()
    found: dict[str, Any] = {"packages": find_packages(where, include=[NAME, f"{NAME}.*"])}
    if where != ".":
        found["package_dir"] = {"": where}
    if "package-data" not in told:
        found["package_data"] = {"": ["*.json", "*.pyi", "py.typed"]}
    return found


def main(args: Sequence[str] | None = None) -> None:
    """Run setuptools as `setup.py` does."""
    pack(*(sys.argv[1:] if args is None else args))
