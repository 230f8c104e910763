"""The toolkit that made an image, according to the image, and the drivers that load it."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.audit.options import AuditOptions
from flash_dist.toolkit.audit.release import audit_release
from flash_dist.toolkit.checks.library_verdict import judge_library
from flash_dist.toolkit.gpucode.cubin import read_cubin_kernels
from flash_dist.toolkit.gpucode.fatbin import open_fatbin
from flash_dist.toolkit.targets.archs import Arch
from flash_dist.toolkit.targets.compatibility import Origin, judge
from flash_dist.toolkit.targets.devices import Device, Driver
from flash_dist.toolkit.targets.verdict import Situation
from tests.unit.made.fatbin_builder import (
    PTX,
    SASS,
    Kernel,
    Part,
    container,
    cubin,
    entry,
    library,
    ptx,
)

if TYPE_CHECKING:
    from pathlib import Path

TOOLS = (
    b"NVIDIA Corp\0" + bytes(24) + b"\0ptxas\0Cuda compilation tools, release 13.0, V13.0.88\0"
    b"Build cuda_13.0.r13.0/compiler.36424714_0\0-arch sm_80 -m 64 \0"
)


def cuinfo(number: int) -> bytes:
    return struct.pack("<III12sHHHH", 12, 8, 1000, b"NVIDIA Corp\0", 2, 80, number, 0)


def note(name: str, data: bytes) -> Part:
    return Part(f".note.nv.{name}", data, kind=7)


@pytest.mark.parametrize(
    ("image", "told"),
    [
        (cubin(Kernel("k"), more=(note("tkinfo", TOOLS), note("cuinfo", cuinfo(130)))), "13.0.88"),
        (cubin(Kernel("k"), more=(note("cuinfo", cuinfo(129)),)), "12.9"),
        (cubin(Kernel("k", cuda=118)), "11.8"),
        (cubin(Kernel("k", cuda=7)), None),
        (cubin(Kernel("k"), more=(note("tkinfo", b"release 13.0"),)), None),
        (cubin(Kernel("k"), more=(note("cuinfo", cuinfo(129)[:-3]),)), None),
        (cubin(Kernel("k")), None),
    ],
    ids=["text", "number", "attribute", "too-small", "cut-text", "cut-number", "silent"],
)
def test_a_cubin_tells_its_toolkit(image: bytes, told: str | None) -> None:
    (kernel,) = read_cubin_kernels(image, Arch(8, 0))
    assert kernel.toolkit == told


def hows(path: Path, images: bytes, driver: str, *devices: str) -> list[str]:
    path.write_bytes(library(images))
    with open_fatbin(path) as fatbin:
        report = fatbin.told()
    situations = [Situation(Device.parse(one), Driver.parse(driver)) for one in devices]
    return [judge_library(report, one).how for one in situations]


def test_code_of_cuda_13_is_for_its_drivers_on_every_gpu(tmp_path: Path) -> None:
    """The headers of 10.0 and 12.0 do not tell the toolkit; the header of 9.0 does."""
    image = cubin(Kernel("k", cuda=130))
    images = container(*[entry(SASS, number, image, isa=(1, 8)) for number in (90, 100, 120)])
    gpus = ("9.0", "10.0", "12.0")
    assert hows(tmp_path / "lib.so", images, "570", *gpus) == ["no"] * 3
    assert hows(tmp_path / "lib.so", images, "580", *gpus) == ["native"] * 3


def test_code_of_cuda_12_is_not_for_drivers_of_cuda_11(tmp_path: Path) -> None:
    told = container(entry(SASS, 80, cubin(Kernel("k", cuda=128)), isa=(1, 7)))
    beside = container(
        entry(SASS, 80, cubin(Kernel("k")), isa=(1, 7)), entry(PTX, 80, ptx("k"), isa=(8, 7))
    )
    for images in (told, beside):
        assert hows(tmp_path / "lib.so", images, "470", "8.0") == ["no"]
        assert hows(tmp_path / "lib.so", images, "525", "8.0") == ["native"]


def test_a_fatbin_that_does_not_tell_counts_as_the_others_of_its_file(tmp_path: Path) -> None:
    silent = container(entry(SASS, 80, cubin(), isa=(1, 7)))
    told = container(entry(SASS, 80, cubin(Kernel("k", cuda=128)), isa=(1, 7)))
    assert hows(tmp_path / "lib.so", silent, "470", "8.0") == ["native"]
    assert hows(tmp_path / "lib.so", silent + told, "470", "8.0") == ["no"]


@pytest.mark.parametrize(
    ("device", "oldest", "newest_without"),
    [("10.0", "570", "565"), ("12.0", "570", "565"), ("10.3", "575", "570"), ("9.0", "520", "515")],
)
def test_a_driver_older_than_the_gpu_runs_nothing(
    device: str, oldest: str, newest_without: str
) -> None:
    gpu, unknown = Device.parse(device), Origin(None)
    arch = Arch(gpu.major, gpu.minor)
    assert judge(arch, gpu, Driver.parse(oldest), unknown).how == "native"
    verdict = judge(arch, gpu, Driver.parse(newest_without), unknown)
    assert verdict.how == "no"
    assert verdict.reason.startswith(
        f"a GPU of compute capability {device} needs driver {oldest} or newer"
    )


def test_audit_holds_the_toolkit_against_the_oldest_driver(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(library(container(entry(SASS, 80, cubin(Kernel("k", cuda=128))))))
    asked = AuditOptions(min_driver="470").parse()
    (problem,) = audit_release(path, asked).problems
    assert "code built with CUDA 12.8 needs driver 525 or newer" in str(problem)
    assert audit_release(path, AuditOptions(min_driver="525").parse()).problems == ()
