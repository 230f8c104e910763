"""Our own wheels before installation: judged kernel by kernel, as after installation."""

from __future__ import annotations

import json
import zipfile
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from flash_dist.toolkit.binaries.wheel import Wheel, read_chunks
from flash_dist.toolkit.targets.archs import ArchSet
from tests.unit.made.builds import make_variants
from tests.unit.made.fatbin_builder import PTX, SASS, Kernel, container, cubin, entry, library, ptx
from tests.unit.made.wheels import make_manifest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from flash_dist.toolkit.binaries.budget import Budget
    from flash_dist.toolkit.targets.archs import Arch
    from tests.unit.made.command import Cli

TURING = ArchSet.parse("7.5+PTX")
NAME = "flash_dist 0.1.0+cu130.sm75.compute75"
KERNELS, MANIFEST = "flash_dist/libflash_dist_kernels.so", "flash_dist/_build.json"


def make_images(arch: Arch) -> bytes:
    """Return a container for each kernel of a target, as from separate sources."""
    symbols = [variant.symbol for variant in make_variants(arch)]
    if arch.ptx:
        return b"".join(container(entry(PTX, arch.number, ptx(symbol))) for symbol in symbols)
    images = (entry(SASS, arch.number, cubin(Kernel(one)), isa=(1, 8)) for one in symbols)
    return b"".join(container(image) for image in images)


@pytest.fixture
def files() -> dict[str, bytes]:
    """Return the files of a wheel for 7.5, with PTX."""
    code = library(b"".join(map(make_images, TURING.archs)))
    return {KERNELS: code, MANIFEST: make_manifest(TURING, "0.1.0").to_text().encode()}


def write_wheel(tmp_path: Path, files: dict[str, bytes]) -> str:
    path = tmp_path / "flash_dist-0.1.0.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)
    return str(path)


def judge(cli: Cli, path: str, gpus: str, driver: str = "580") -> list[dict[str, Any]]:
    _, out, _ = cli.run("doctor", "--wheel", path, "--gpu", gpus, "--driver", driver, "--json")
    checks = json.loads(out)["checks"]
    return [check for check in checks if check["gpu"] is not None]


def test_a_mixed_pair_is_told_what_each_gpu_runs_and_what_the_build_lacks(
    tmp_path: Path, files: dict[str, bytes], cli: Cli
) -> None:
    old, new = judge(cli, write_wheel(tmp_path, files), "7.5,8.6")
    assert (old["status"], new["status"], new["id"]) == ("ok", "warn", "dtype-not-built")
    assert old["summary"] == f"{NAME} on compute capability 7.5: native code (sm_75)"
    assert new["summary"] == (
        f"{NAME} on compute capability 8.6: PTX through the JIT (compute_75); "
        "this build has no bf16 kernels"
    )
    assert "turing-ampere-ada" in new["fix"]
    assert new["data"]["targets"] == ["compute_75"]


def test_a_wheel_is_opened_once_and_each_member_unpacked_once(
    tmp_path: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    path = write_wheel(tmp_path, {**files, "flash_dist/_C.so": library(b"")})
    opened, unpacked = Counter[str](), Counter[str]()
    make = Wheel.__init__

    def count_wheel(self: Wheel, path: str, archive: zipfile.ZipFile, budget: Budget) -> None:
        opened[path] += 1
        make(self, path, archive, budget)

    def count_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Iterator[bytes]:
        unpacked[info.filename] += 1
        return read_chunks(archive, info)

    monkeypatch.setattr(Wheel, "__init__", count_wheel)
    monkeypatch.setattr("flash_dist.toolkit.binaries.wheel.read_chunks", count_member)
    (found,) = judge(cli, path, "7.5")
    assert found["status"] == "ok"
    assert opened == {path: 1}
    assert unpacked == dict.fromkeys([*files, "flash_dist/_C.so"], 1)


def test_the_driver_that_the_toolkit_needs_is_asked_for(
    tmp_path: Path, files: dict[str, bytes], cli: Cli
) -> None:
    path = write_wheel(tmp_path, files)
    (refused,) = judge(cli, path, "7.5", "570")
    assert (refused["status"], refused["id"]) == ("fail", "driver-too-old")
    assert "CUDA 13.0 needs driver 580 or newer, not driver 570" in refused["summary"]


def test_a_folder_with_the_installed_files_is_judged_alike(
    tmp_path: Path, files: dict[str, bytes], cli: Cli
) -> None:
    (tmp_path / "flash_dist").mkdir()
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    (found,) = judge(cli, str(tmp_path), "7.5")
    assert found["summary"] == f"{NAME} on compute capability 7.5: native code (sm_75)"


def test_without_its_manifest_it_is_judged_by_its_code_and_that_is_said(
    tmp_path: Path, files: dict[str, bytes], cli: Cli
) -> None:
    path = write_wheel(tmp_path, {**files, MANIFEST: b"{}"})
    (found,) = judge(cli, path, "8.6")
    assert found["summary"].startswith(f"{KERNELS} on compute capability 8.6: PTX through the JIT")
    assert any("judged without its manifest" in line for line in found["details"])
    (refused,) = judge(cli, path, "7.5", "570")
    assert "code built with CUDA 13.0 needs driver 580" in refused["summary"]
    assert refused["fix"].startswith("install NVIDIA driver 580 or newer")


def test_a_library_of_another_project_with_that_name_is_judged_as_any(
    tmp_path: Path, cli: Cli
) -> None:
    other = library(container(entry(SASS, 80, cubin(Kernel("alpha")))))
    (found,) = judge(cli, write_wheel(tmp_path, {KERNELS: other}), "8.0")
    assert found["summary"].endswith("native code (sm_80) in its one fatbin")


def test_other_libraries_beside_ours_may_have_nothing_for_a_gpu_that_ours_serves(
    tmp_path: Path, files: dict[str, bytes], cli: Cli
) -> None:
    other = library(container(entry(SASS, 90, cubin(Kernel("alpha")), suffix="a")))
    found = judge(cli, write_wheel(tmp_path, {**files, "other.so": other}), "7.5")
    assert [one["status"] for one in found] == ["ok", "warn"]


def test_a_wheel_whose_kernels_cannot_be_read_fails(
    tmp_path: Path, files: dict[str, bytes], cli: Cli
) -> None:
    binding = {"flash_dist/_C.so": library(b"")}
    path = write_wheel(tmp_path, files | binding | {KERNELS: files[KERNELS][:5000]})
    out = cli("doctor", "--wheel", path, "--gpu", "7.5", "--json", status=1).out
    checks = json.loads(out)["checks"]
    found = [(check["status"], check["id"]) for check in checks if check["name"] == "library"]
    assert found == [("fail", "library-unread")]  # and no finding about libraries without GPU code
