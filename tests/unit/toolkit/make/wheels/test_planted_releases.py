"""The checks at the end of a build, `make/wheels/gates.py`, reject every kind of faulty wheel.

An unstable symbol needs a compiler: `tests/readers/test_gates.py`.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from flash_dist.toolkit.builds.manifest import TargetInfo
from flash_dist.toolkit.builds.published import published_sets
from flash_dist.toolkit.make.compile.build_info import hash_sources
from flash_dist.toolkit.make.project import ROOT, find_installed, load_project
from flash_dist.toolkit.make.wheels import gates
from flash_dist.toolkit.make.wheels.fingerprints import recordings_of
from flash_dist.toolkit.targets.archs import ArchSet
from tests.unit.made.names import KERNELS
from tests.unit.made.whole_wheel import (
    INFO,
    NAME,
    PLATFORM,
    WHEEL,
    make_declared,
    make_record,
    write_whole_wheel,
)
from tests.unit.made.whole_wheel import make_files as make_small_files
from tests.unit.toolkit.builds.test_manifest import make_kernel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from flash_dist.toolkit.builds.manifest import Manifest

    Files = dict[str, bytes]
    Judge = Callable[..., tuple[int, str]]

METADATA = f"{INFO}/METADATA"
EVIL = {"flash_dist/evil.py": b"import os\n"}


PACKAGE = {
    path.relative_to(ROOT).as_posix(): path.read_bytes()
    for path in find_installed(ROOT / "flash_dist")
    if path.name != "_build.json"
}


RECORDINGS = {f"flash_dist/{name}": data for name, data in recordings_of(make_declared()).items()}


def make_files(*args: Any, **options: Any) -> Files:  # noqa: ANN401
    """Return the files of a wheel with the package's files from the sources."""
    return {**make_small_files(*args, **options), **PACKAGE, **RECORDINGS}


def declare(archs: str = "9.0a", **changes: Any) -> Manifest:  # noqa: ANN401
    """Return the manifest of a wheel of this source for a list of targets."""
    project = load_project()
    archset = ArchSet.parse(archs, name="hopper", label="hopper")
    fresh = replace(
        make_declared(),
        arch_set=archset,
        archsets=published_sets(),
        flags=("-O3", "--compress-mode=size", *archset.gencode_flags),
        kernels=tuple(make_kernel(str(arch)) for arch in archset.archs),
        targets=tuple(TargetInfo(arch, "assembled") for arch in archset.archs),
        sources=hash_sources(),
        torch_min=project.torch_min,
        torch_tested_max=project.torch_tested_max,
        files=tuple(name.removeprefix("flash_dist/") for name in PACKAGE),
    )
    return replace(fresh, **changes)


@pytest.fixture
def judge(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Judge:
    """Run the audit step on a wheel, without other projects' tools, which run last."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def run(wheel: Path, *, archs: str = "9.0a", budget: int = 100_000_000) -> tuple[int, str]:
        words = ["--archs", archs, "--budget", str(budget), "--platform", PLATFORM, str(wheel)]
        monkeypatch.setattr(sys, "argv", ["flash_dist.toolkit.make.wheels.gates", *words])
        return gates.main(), capsys.readouterr().err

    return run


def test_a_sound_wheel_gets_as_far_as_the_tools_of_others(judge: Judge, tmp_path: Path) -> None:
    wheel = write_whole_wheel(tmp_path, make_files(declare()))
    status, said = judge(wheel)
    assert (status, said.partition(",")[0]) == (1, "error: `torch-abi-audit` is not installed")


NINE, TWO = "9.0a", "9.0a;10.0"
BINARIES = {
    "declared and absent": (make_files(declare(TWO)), TWO, "sm_100 is declared but not embedded"),
    "neither declared nor there": (make_files(declare()), TWO, f"requested was `{TWO}`"),
    "nothing": (make_files(declare(), ()), NINE, "sm_90a is declared but not embedded"),
    "extra": (
        make_files(declare(), ("sm_90a", "sm_80")),
        NINE,
        "(sass, sm_80) is not of the arch set",
    ),
    "extra and declared": (
        make_files(declare(TWO), ("sm_90a", "sm_100")),
        NINE,
        f"requested was `{NINE}`",
    ),
    "another": (make_files(declare(), ("sm_90",)), NINE, "(sass, sm_90) is not of the arch set"),
}


@pytest.mark.parametrize(("files", "asked", "sentence"), BINARIES.values(), ids=BINARIES.keys())
def test_an_arch_that_is_missing_or_extra_is_refused(
    judge: Judge, tmp_path: Path, files: Files, asked: str, sentence: str
) -> None:
    status, said = judge(write_whole_wheel(tmp_path, files), archs=asked)
    assert status == 1
    assert sentence in said


@pytest.mark.parametrize(
    "tag", ["linux_x86_64", "manylinux_2_39_x86_64", "manylinux_2_34_aarch64", "any"]
)
def test_a_wrong_platform_tag_is_refused(judge: Judge, tmp_path: Path, tag: str) -> None:
    name = NAME.replace(PLATFORM, tag)
    status, said = judge(write_whole_wheel(tmp_path, make_files(declare()), name=name))
    assert (status, said.count(f"must have the platform tag `{PLATFORM}`")) == (1, 1)


@pytest.mark.parametrize("tag", ["linux_x86_64", "manylinux_2_39_x86_64", ""])
def test_a_wheel_that_was_renamed_is_refused(judge: Judge, tmp_path: Path, tag: str) -> None:
    files = make_files(declare(), platform=tag)
    status, said = judge(write_whole_wheel(tmp_path, files if tag else {**files, WHEEL: b""}))
    assert status == 1
    assert "was renamed: its file WHEEL has the tags" in said


def test_a_changed_byte_is_refused(judge: Judge, tmp_path: Path) -> None:
    files = make_files(declare())
    changed = {**files, METADATA: files[METADATA].replace(b"3.10", b"3.11")}
    status, said = judge(write_whole_wheel(tmp_path, changed, make_record(files)))
    assert status == 1
    assert "files of the wheel differ from its RECORD" in said


def test_a_byte_changed_in_the_finished_file_is_refused(judge: Judge, tmp_path: Path) -> None:
    wheel = write_whole_wheel(tmp_path, make_files(declare()))
    data = wheel.read_bytes()
    place = data.index(b"Requires-Python: >=3.10\n")
    wheel.write_bytes(data[:place] + b"r" + data[place + 1 :])
    status, said = judge(wheel)
    assert status == 1
    assert f"error: `{METADATA}`" in said
    assert "is broken" in said


@pytest.mark.parametrize(("data", "what"), [(b"", "differs"), (None, "is missing")])
def test_a_package_of_other_sources_is_refused(
    judge: Judge, tmp_path: Path, data: bytes | None, what: str
) -> None:
    name = "attention/batched.py"
    built = declare()
    if data is None:
        built = replace(built, files=tuple(one for one in built.files if one != name))
    files = {**make_files(built), f"flash_dist/{name}": data}
    kept = {name: content for name, content in files.items() if content is not None}
    status, said = judge(write_whole_wheel(tmp_path, kept))
    assert status == 1
    assert f"does not hold the package: flash_dist/attention/batched.py {what}" in said


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("flash_dist/evil.py", "flash_dist/evil.py is not among the files that flash_dist/_build"),
        ("flash_dist.pth", "flash_dist.pth is no file of this package"),
        ("torch/__init__.py", "torch/__init__.py is no file of this package"),
        ("./flash_dist/__init__.py", "./flash_dist/__init__.py is no file of this package"),
    ],
)
def test_a_file_that_is_not_in_the_sources_is_refused(
    judge: Judge, tmp_path: Path, name: str, sentence: str
) -> None:
    files = {**make_files(declare()), name: b"import os\n"}
    status, said = judge(write_whole_wheel(tmp_path, files))
    assert status == 1
    assert sentence in said


def test_a_file_that_is_not_in_the_sources_is_refused_though_the_build_lists_it(
    judge: Judge, tmp_path: Path
) -> None:
    built = declare()
    files = {**make_files(replace(built, files=(*built.files, "evil.py"))), **EVIL}
    status, said = judge(write_whole_wheel(tmp_path, files))
    assert status == 1
    assert "does not hold the package: flash_dist/evil.py is not in the sources" in said


def test_a_wheel_with_recordings_of_other_sets_is_refused(judge: Judge, tmp_path: Path) -> None:
    wheel = write_whole_wheel(tmp_path, {**make_files(declare()), **PACKAGE})
    assert "flash_dist/fingerprints.json differs" in judge(wheel)[1]


def test_a_wheel_over_budget_is_refused(judge: Judge, tmp_path: Path) -> None:
    wheel = write_whole_wheel(tmp_path, make_files(declare()))
    size = wheel.stat().st_size
    assert "torch-abi-audit" in judge(wheel, budget=size)[1]
    status, said = judge(wheel, budget=size - 1)
    assert status == 1
    assert f"the wheel has {size:,} bytes, the budget is {size - 1:,}" in said


STALE = {
    "kernels": ({"kernels": (make_kernel(registers=255),)}, "registers, the manifest says 255"),
    "sources": ({"sources": "0" * 64}, "differs in the hash of the C++ and CUDA files"),
    "sets": ({"archsets": published_sets()[:1]}, "differs in the published sets"),
    "torch": ({"torch_min": "2.9"}, "differs in the torch versions"),
    "version": ({"package_version": "0.0.9+cu130.hopper"}, "have different versions"),
}


@pytest.mark.parametrize(("changes", "sentence"), STALE.values(), ids=STALE.keys())
def test_a_stale_manifest_is_refused(
    judge: Judge, tmp_path: Path, changes: dict[str, Any], sentence: str
) -> None:
    status, said = judge(write_whole_wheel(tmp_path, make_files(declare(**changes))))
    assert status == 1
    assert sentence in said


def test_a_manifest_of_before_the_libraries_were_linked_anew_is_refused(
    judge: Judge, tmp_path: Path
) -> None:
    """RECORD is right and the kernels are equal; the bill of materials has the older bytes."""
    files = make_files(declare())
    linked = {**files, KERNELS: files[KERNELS] + b"\0"}
    status, said = judge(write_whole_wheel(tmp_path, linked))
    assert status == 1
    assert "the bill of materials does not match this wheel" in said
