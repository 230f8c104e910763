"""The checks at the end of a build pass our own wheel, and reject one with an unstable symbol."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.builds.contents import read_manifest
from flash_dist.toolkit.builds.published import load_archsets
from flash_dist.toolkit.builds.sbom import bill_name
from flash_dist.toolkit.make.compile.sbom import make_sbom
from flash_dist.toolkit.make.project import ARCHSETS
from tests.readers.test_wheels import DIST
from tests.unit.made.library_builder import Lab, needs_gcc
from tests.unit.made.names import BINDING, BINDING_NEEDS, KERNELS
from tests.unit.made.whole_wheel import make_record

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).resolve().parents[2]
WHEELS = sorted((DIST / "hopper").glob("*.whl"))  # the wheel of `nox -s small_wheel`
AUDITOR = "torch-abi-audit"
pytestmark = [
    pytest.mark.skipif(not WHEELS, reason="no wheel is in dist/, `nox -s small_wheel` builds one"),
    pytest.mark.skipif(shutil.which(AUDITOR) is None, reason=f"{AUDITOR} is not installed"),
    needs_gcc,
]
UNSTABLE = {
    "of Python": ("PyModule_GetDict", "has the symbol PyModule_GetDict of Python"),
    "of torch": ("_ZN2at4addmERKNS_6TensorES2_", r"`torch-abi-audit \S+ --check` failed"),
}


def judge(wheel: Path) -> subprocess.CompletedProcess[str]:
    """Run the audit step as cibuildwheel does, with the wheel's own platform tag."""
    archset = load_archsets(ARCHSETS)[WHEELS[0].parent.name]
    asked = ["--archs", str(archset), "--budget", str(archset.budget_bytes)]
    platform = wheel.stem.rpartition("-")[2]
    command = [
        sys.executable,
        "-m",
        "flash_dist.toolkit.make.wheels.gates",
        *asked,
        "--platform",
        platform,
        str(wheel),
    ]
    return subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)


def rewrite(wheel: Path, folder: Path, changes: Mapping[str, bytes], name: str = "") -> Path:
    """Write the wheel with other files and a RECORD that lists them."""
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if name[-1] != "/"}
    record = next(name for name in files if name.endswith(".dist-info/RECORD"))
    bill = next(name for name in files if name.endswith(f"/sboms/{bill_name('flash_dist')}"))
    files = {**files, **changes}
    hashes = {name: hashlib.sha256(files[name]).hexdigest() for name in (KERNELS, BINDING)}
    files[bill] = make_sbom(read_manifest(wheel), hashes).encode()
    del files[record]
    lines = make_record(files).decode().splitlines(keepends=True)[:-1]
    files[record] = "".join([*lines, f"{record},,\n"]).encode()
    path = folder / (name or wheel.name)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in files.items():
            archive.writestr(member, data)
    return path


def make_binding(lab: Lab, symbol: str) -> bytes:
    """Compile a binding that needs the same libraries as ours, and a symbol of Python or torch."""
    needed = tuple(lab.build(f"stubs/{name}", "") for name in sorted(BINDING_NEEDS))
    source = f"void* {symbol}(void*); void* flash_dist_call(void) {{ return {symbol}(0); }}"
    options = ("-Wl,-rpath,$ORIGIN", "-Wl,--disable-new-dtags")
    return lab.build("_C.so", source, *options, needs=needed).read_bytes()


def test_our_own_wheel_passes() -> None:
    done = judge(WHEELS[0])
    assert done.returncode == 0, done.stderr


def test_a_tag_of_an_older_glibc_than_the_code_needs_is_refused(tmp_path: Path) -> None:
    platform = WHEELS[0].stem.rpartition("-")[2]
    older = platform.replace(platform.partition("_x")[0], "manylinux_2_5")
    told = f"Wheel-Version: 1.0\nTag: py3-none-{older}\n".encode()
    info = "-".join(WHEELS[0].name.split("-")[:2]) + ".dist-info/WHEEL"
    name = WHEELS[0].name.replace(platform, older)
    done = judge(rewrite(WHEELS[0], tmp_path, {info: told}, name))
    assert done.returncode == 1
    assert re.search(r"the code needs glibc 2\.\d+, the file name promises 2\.5", done.stderr)


@pytest.mark.parametrize(("symbol", "sentence"), UNSTABLE.values(), ids=UNSTABLE.keys())
def test_an_unstable_symbol_is_refused(tmp_path: Path, symbol: str, sentence: str) -> None:
    binding = make_binding(Lab(tmp_path), symbol)
    done = judge(rewrite(WHEELS[0], tmp_path, {BINDING: binding}))
    assert done.returncode == 1
    assert re.search(sentence, done.stderr), done.stdout + done.stderr
