from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ci.gates import WheelBuildError, require_archs, run
from ci.platform_tags import PlatformTagError, require_platform
from ci.portable import PLATFORM
from flash_dist.archs import ArchSet
from flash_dist.audit import audit_contents
from tests.unit.test_audit import make_contents

WHEEL = "flash_dist-0.1.0+cu130.hopper-cp310-abi3-{}.whl"


def test_a_wheel_for_the_targets_that_were_asked_for_passes() -> None:
    result = audit_contents(make_contents())
    require_archs(result, ArchSet.parse("9.0a 8.0+PTX", name="any name"))


@pytest.mark.parametrize("asked", ["8.0+PTX", "8.0+PTX 9.0a 12.0", "8.0 9.0a"])
def test_a_sound_wheel_for_other_targets_is_refused(asked: str) -> None:
    result = audit_contents(make_contents())
    assert result
    sentence = r"is built for `8.0\+PTX;9.0a`, asked for was[\s\S]*did not reach the compiler"
    with pytest.raises(WheelBuildError, match=sentence):
        require_archs(result, ArchSet.parse(asked))


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
    command = [sys.executable, "-m", "ci.gates", "--archs", "9.0a", "--platform", PLATFORM]
    done = subprocess.run(
        [*command, str(wheel)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "has linux_x86_64" in done.stderr
