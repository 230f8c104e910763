"""Packs what `toolkit/make/compile/native.py` compiles; pyproject.toml has all that is declarative.

`toolkit/make/building/plan.py` says which arch set. `backend.py` beside it is what pip and uv call,
and what calls this.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

sys.path.insert(0, str(Path(__file__).resolve().parent))

from flash_dist.toolkit.builds.linkage import runtime_requirements
from flash_dist.toolkit.builds.manifest import load_manifest
from flash_dist.toolkit.builds.published import load_archsets
from flash_dist.toolkit.make.building.plan import plan_this_build
from flash_dist.toolkit.make.command import told_in_a_sentence
from flash_dist.toolkit.make.compile.build_info import make_manifest
from flash_dist.toolkit.make.compile.native import NativeOptions, build_native
from flash_dist.toolkit.make.compile.sbom import write_sbom
from flash_dist.toolkit.make.project import ARCHSETS, build_folder, load_project, report_path
from flash_dist.toolkit.make.toolchain.cross import target_machine
from flash_dist.toolkit.make.toolchain.nvcc import find_toolchain
from flash_dist.toolkit.make.toolchain.preflight import read_host
from flash_dist.toolkit.make.toolchain.torch_headers import find_headers

PUBLISHED = load_archsets(ARCHSETS)


def choose_metadata() -> dict[str, Any]:
    """Return version and dependencies of the wheel; the sources are of no arch set."""
    project = load_project()
    if "sdist" in sys.argv:
        return {"version": project.version, "install_requires": project.dependencies}
    with told_in_a_sentence():
        plan = plan_this_build()
    return {
        "version": project.wheel_version(plan.toolkit, plan.archset.label),
        "install_requires": [*project.dependencies, *runtime_requirements(plan.toolkit)],
    }


class BuildNative(build_ext):
    """Builds the two libraries and the manifest in place of setuptools' one extension."""

    def run(self) -> None:
        """Compile, then copy into the package; what fails is told in a sentence."""
        with told_in_a_sentence():
            self.compile()

    def compile(self) -> None:
        """Call CMake and describe what came out."""
        toolchain = find_toolchain()
        headers = find_headers(build_folder() / "torch-headers")
        print(headers, flush=True)
        archset = plan_this_build().archset
        jobs = read_host(os.environ).jobs
        options = NativeOptions(archset, tuple(PUBLISHED.values()), toolchain, headers, jobs)
        build = build_native(options)
        package = Path(self.build_lib) / "flash_dist"
        package.mkdir(parents=True, exist_ok=True)
        for library in build.libraries:
            shutil.copy2(library, package)
        manifest = make_manifest(build, options, package)  # the modules are there: build_py ran
        (package / "_build.json").write_text(manifest.to_text(), encoding="utf-8")
        report = report_path(archset.label)
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(f"{build}\n", encoding="utf-8")


class WheelWithBill(bdist_wheel):
    """Adds the bill of materials, so that RECORD lists it like every other file."""

    def write_wheelfile(self, wheelfile_base: str, *args: str) -> None:
        """Write the bill where setuptools writes its last file before RECORD."""
        super().write_wheelfile(wheelfile_base, *args)
        dist_info = Path(wheelfile_base)
        print(f"packing {dist_info.name.removesuffix('.dist-info')}", flush=True)
        write_sbom(dist_info, load_manifest(dist_info.parent / "flash_dist"))


# A staging folder of its own: no module deleted since the last build comes back out of it, and
# nobody else who runs this file at the same time touches it.
with tempfile.TemporaryDirectory(prefix="flash_dist-") as staging:
    setup(
        **choose_metadata(),
        verbose=False,  # warnings, but no line for each file, which `-v` shows
        ext_modules=[Extension("flash_dist._C", sources=[], py_limited_api=True)],
        cmdclass={"build_ext": BuildNative, "bdist_wheel": WheelWithBill},
        options={
            "bdist_wheel": {"py_limited_api": "cp310", "plat_name": f"linux_{target_machine()}"},
            "build": {"build_base": staging},
        },
    )
