"""Libraries of any project on GPUs: the image that the driver takes from each container."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.checks.library_verdict import LibraryVerdict, judge_library
from flash_dist.toolkit.cli import main
from flash_dist.toolkit.gpucode.fatbin import read_fatbin
from flash_dist.toolkit.targets.devices import Device, Driver
from flash_dist.toolkit.targets.verdict import Situation
from tests.unit.made.fatbin_builder import (
    LTO,
    PTX,
    SASS,
    Kernel,
    container,
    cubin,
    entry,
    library,
    ptx,
)

if TYPE_CHECKING:
    from pathlib import Path

    from flash_dist.toolkit.gpucode.images import FatbinReport
    from tests.unit.made.command import Cli

CUBIN, TEXT = cubin(Kernel("alpha")), ptx("alpha")


def sass(number: int, suffix: str = "", codec: str = "none") -> bytes:
    return entry(SASS, number, CUBIN, suffix=suffix, codec=codec)


def text(number: int, isa: tuple[int, int] = (9, 0)) -> bytes:
    return entry(PTX, number, TEXT, isa=isa)


def read(tmp_path: Path, *containers: bytes, relocatable: tuple[bytes, ...] = ()) -> FatbinReport:
    path = tmp_path / "lib.so"
    linked = b"".join(containers) or None
    path.write_bytes(library(linked, b"".join(relocatable) or None))
    return read_fatbin(path)


def judge(
    report: FatbinReport, device: str, driver: str = "580", environ: dict[str, str] | None = None
) -> LibraryVerdict:
    situation = Situation.of(Device.parse(device), Driver.parse(driver), environ or {})
    return judge_library(report, situation)


# images of one container, GPU, driver -> how, target
TABLE = [
    ((sass(75), sass(80)), "8.6", "580", "same-major", "sm_80"),
    ((sass(80), sass(86)), "8.6", "580", "native", "sm_86"),
    ((sass(80), text(80)), "9.0", "580", "jit", "compute_80"),
    ((sass(80), sass(90, "a")), "9.0", "580", "native", "sm_90a"),
    ((sass(80), sass(90, "a")), "10.0", "580", "no", "None"),
    ((sass(80),), "8.7", "580", "unverified", "sm_80"),
    ((sass(100, "f"),), "10.3", "580", "family", "sm_100f"),
    ((text(80, (9, 0)),), "9.0", "535", "no", "None"),
    ((text(80, (8, 2)),), "9.0", "535", "jit", "compute_80"),
    ((sass(86, codec="zstd"),), "8.6", "535", "no", "None"),
    ((sass(86, codec="zstd"),), "8.6", "550", "native", "sm_86"),
    ((entry(LTO, 80, CUBIN),), "8.0", "580", "no", "None"),
    # code version 1.8 is CUDA 13's, except for sm_100 and newer, where 12.8 also wrote it
    ((entry(SASS, 75, CUBIN, isa=(1, 8)),), "7.5", "575", "no", "None"),
    ((entry(SASS, 75, CUBIN, isa=(1, 8)),), "7.5", "580", "native", "sm_75"),
    ((entry(SASS, 75, CUBIN, isa=(1, 7)),), "7.5", "525", "native", "sm_75"),
    ((entry(SASS, 100, CUBIN, isa=(1, 8)),), "10.0", "570", "native", "sm_100"),
]


@pytest.mark.parametrize(("images", "device", "driver", "how", "target"), TABLE)
def test_the_driver_takes_the_image_that_fits_best(  # noqa: PLR0913, PLR0917 - a row of the table
    tmp_path: Path, images: tuple[bytes, ...], device: str, driver: str, how: str, target: str
) -> None:
    verdict = judge(read(tmp_path, container(*images)), device, driver)
    (found,) = verdict.containers
    assert (found.how, str(found.arch)) == (how, target)
    assert bool(verdict) == (how != "no")


def test_each_container_is_judged_by_itself(tmp_path: Path) -> None:
    report = read(tmp_path, container(sass(80), sass(90, "a")), container(sass(90, "a")))
    verdict = judge(report, "8.6")
    assert verdict
    assert [one.how for one in verdict.containers] == ["same-major", "no"]
    assert verdict.counts == {("same-major", "sm_80"): 1}
    assert verdict.obstacle == ""


def test_code_that_the_driver_refuses_is_an_obstacle_but_code_for_other_gpus_is_none(
    tmp_path: Path,
) -> None:
    report = read(tmp_path, container(sass(86, codec="zstd"), sass(90, "a", codec="zstd")))
    assert "zstd needs driver 550" in judge(report, "8.6", "535").obstacle
    assert judge(report, "12.0", "535").obstacle == ""
    forced = judge(report, "8.6", environ={"CUDA_FORCE_PTX_JIT": "1"})
    assert "CUDA_FORCE_PTX_JIT is set" in forced.obstacle


def test_relocatable_code_counts_only_if_every_object_has_some(tmp_path: Path) -> None:
    objects = (container(sass(80), text(80)), container(sass(80), text(80)))
    linked = container(sass(80))
    whole = judge(read(tmp_path, linked, relocatable=objects), "9.0")
    assert (whole.how, whole.counts) == ("jit", {("jit", "compute_80"): 1})
    broken = (objects[0], container(sass(80)))
    assert not judge(read(tmp_path, linked, relocatable=broken), "9.0")
    native = judge(read(tmp_path, linked, relocatable=broken), "8.0")
    assert native.how == "native"


def test_objects_that_were_never_linked_are_judged_as_they_are(tmp_path: Path) -> None:
    report = read(tmp_path, relocatable=(container(sass(80)), container(sass(90))))
    assert [one.how for one in judge(report, "9.0").containers] == ["no", "native"]


@pytest.fixture
def two(tmp_path: Path) -> str:
    """Return a folder with a library for 7.5 and 8.x, and one for 9.0 alone."""
    (tmp_path / "a.so").write_bytes(library(container(sass(75), sass(80))))
    (tmp_path / "b.so").write_bytes(library(container(sass(90, "a"))))
    (tmp_path / "plain.so").write_bytes(library())
    return str(tmp_path)


def test_only_a_gpu_that_no_library_has_code_for_is_a_failure(two: str, cli: Cli) -> None:
    out = cli("doctor", "--wheel", two, "--gpu", "7.5,8.6", "--driver", "580").out
    assert "a.so on compute capability 7.5: native code (sm_75) in its one fatbin" in out
    assert "b.so on compute capability 8.6: no code that it can load, built for SASS sm_90a" in out
    assert "others have code for it" in out
    assert "plain.so" not in out
    out = cli("doctor", "--wheel", two, "--gpu", "12.0", status=1).out
    assert "fix: install a build for compute capability 12.0" in out


def test_a_library_with_code_in_some_containers_is_a_warning(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(library(container(sass(80)) + container(sass(90, "a"))))
    document = json.loads(cli("doctor", "--wheel", path, "--gpu", "8.6", "--json").out)
    result = document["checks"][-1]
    assert (result["status"], result["id"], result["gpu"]) == ("warn", "library-partly", 0)
    assert "nothing in 1 of 2 fatbins" in result["summary"]
    assert result["data"]["ways"] == [{"how": "same-major", "target": "sm_80", "containers": 1}]
    assert main(["doctor", "--strict", "--wheel", str(path), "--gpu", "8.6"]) == 1


def test_nothing_to_judge_is_reported(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "plain.so").write_bytes(library())
    out = cli("doctor", "--wheel", tmp_path, "--gpu", "8.6").out
    assert "no GPU code for NVIDIA in 1 library: kernels" in out


def test_libraries_that_cannot_be_read_are_nothing_checked(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "torn.so").write_bytes(library(container(sass(80)))[:200])
    out = cli("doctor", "--wheel", tmp_path, "--gpu", "8.6", status=3).out
    assert "nothing could be checked (exit status 3)" in out


def test_a_package_that_is_not_installed_is_an_error(cli: Cli) -> None:
    err = cli("doctor", "--package", "no-such-package", "--gpu", "8.6", status=2).err
    assert "`no-such-package` is not installed" in err
