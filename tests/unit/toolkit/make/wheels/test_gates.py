from __future__ import annotations

import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from flash_dist.toolkit.audit.own import audit_contents
from flash_dist.toolkit.make.wheels.gates import (
    WheelBuildError,
    require_archs,
    require_package,
    require_served,
    run,
)
from flash_dist.toolkit.make.wheels.platform_tags import (
    PlatformTagError,
    platform_of,
    require_platform,
)
from flash_dist.toolkit.targets.archs import Arch, ArchSet
from tests.unit.toolkit.audit.test_own import make_contents

WHEEL = "flash_dist-0.1.0+cu130.hopper-py3-none-{}.whl"
PLATFORM = platform_of("x86_64")


def test_a_wheel_for_the_targets_that_were_asked_for_passes() -> None:
    result = audit_contents(make_contents())
    require_archs(result, ArchSet.parse("9.0a 8.0+PTX", name="any name"))


@pytest.mark.parametrize("asked", ["8.0+PTX", "8.0+PTX 9.0a 12.0", "8.0 9.0a"])
def test_a_sound_wheel_for_other_targets_is_refused(asked: str) -> None:
    result = audit_contents(make_contents())
    assert result
    sentence = r"is built for `8.0\+PTX;9.0a`, requested was[\s\S]*did not reach the compiler"
    with pytest.raises(WheelBuildError, match=sentence):
        require_archs(result, ArchSet.parse(asked))


def test_a_wheel_whose_gpus_lack_a_kernel_is_refused() -> None:
    manifest = audit_contents(make_contents()).contents.manifest
    require_served(manifest)
    ampere = Arch.parse("8.0")
    kept = tuple(k for k in manifest.kernels if k.family != "fwd" or k.target == ampere)
    with pytest.raises(WheelBuildError, match=r"compute capability 9\.0 has no kernel `fwd "):
        require_served(replace(manifest, kernels=kept))


def test_the_one_platform_tag_passes() -> None:
    require_platform(Path(WHEEL.format(PLATFORM)), PLATFORM)


@pytest.mark.parametrize(
    "tags",
    [
        "linux_x86_64",
        "manylinux_2_34_x86_64",
        "manylinux_2_17_x86_64.manylinux_2_28_x86_64",
        "manylinux_2_28_aarch64",
    ],
)
def test_another_platform_tag_is_refused(tags: str) -> None:
    with pytest.raises(
        PlatformTagError, match="must have the platform tag `manylinux_2_28_x86_64`"
    ):
        require_platform(Path(WHEEL.format(tags)), PLATFORM)


def test_a_step_that_fails_is_named() -> None:
    with pytest.raises(
        WheelBuildError, match=r"python\S* -c raise SystemExit\(3\)` failed with exit code 3"
    ):
        run([sys.executable, "-c", "raise SystemExit(3)"], {})


def test_the_audit_step_ends_with_1_and_a_sentence_for_a_wrong_tag(tmp_path: Path) -> None:
    wheel = tmp_path / WHEEL.format("linux_x86_64")
    command = [
        sys.executable,
        "-m",
        "flash_dist.toolkit.make.wheels.gates",
        "--archs",
        "9.0a",
        "--platform",
        PLATFORM,
    ]
    done = subprocess.run(
        [*command, str(wheel)],
        cwd=Path(__file__).parents[5],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "has linux_x86_64" in done.stderr


def make_package(root: Path) -> dict[str, str]:
    files = {
        "flash_dist/__init__.py": "",
        "flash_dist/toolkit/cli/run.py": "1",
        "flash_dist/sets.json": "2",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return files


def pack(folder: Path, files: dict[str, str]) -> Path:
    path = folder / WHEEL.format(PLATFORM)
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_a_wheel_with_all_files_of_the_package_passes(tmp_path: Path) -> None:
    files = make_package(tmp_path)
    require_package(pack(tmp_path, {**files, "flash_dist/_build.json": "{}"}), {}, tmp_path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"flash_dist/toolkit/cli/run.py": None}, "flash_dist/toolkit/cli/run.py is missing"),
        ({"flash_dist/sets.json": "3"}, "flash_dist/sets.json differs"),
    ],
    ids=["missing", "another"],
)
def test_a_wheel_without_a_file_of_the_package_is_refused(
    change: dict[str, str | None], sentence: str, tmp_path: Path
) -> None:
    changed = {**make_package(tmp_path), **change}
    wheel = pack(tmp_path, {name: text for name, text in changed.items() if text is not None})
    with pytest.raises(WheelBuildError, match=sentence):
        require_package(wheel, {}, tmp_path)


def test_a_wheel_is_compared_with_sources_or_refused(tmp_path: Path) -> None:
    with pytest.raises(WheelBuildError, match="does not hold the package"):
        require_package(pack(tmp_path, {"flash_dist/__init__.py": ""}), {}, tmp_path)
