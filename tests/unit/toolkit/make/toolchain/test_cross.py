"""Building for another CPU: its toolkit parts, and the target of a build."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from ci.install_tests.aarch64 import find_wheels
from flash_dist.toolkit.builds.published import load_archsets
from flash_dist.toolkit.errors import ArchError
from flash_dist.toolkit.make.building.choose import choose_sets, toolkits_of
from flash_dist.toolkit.make.locks import lock_path
from flash_dist.toolkit.make.toolchain.cross import (
    TARGETS,
    assemble_home,
    find_target,
    require_tools,
    run_tool,
    target_machine,
)
from flash_dist.toolkit.make.toolchain.install import install_toolkit
from flash_dist.toolkit.make.toolchain.nvcc import ToolchainError, glibc_version
from flash_dist.toolkit.make.wheels.artefacts import ArtefactError
from tests.unit.made.wheels import write_wheel

if TYPE_CHECKING:
    from pathlib import Path

ARM = TARGETS["aarch64"]
SETS = load_archsets()


def make_folder(folder: Path, content: str, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def make_toolkits(folder: Path) -> tuple[Path, Path]:
    toolkit, parts = folder / "x86" / "nvidia" / "cu13", folder / "arm" / "nvidia" / "cu13"
    libraries = ("lib/libcudart_static.a", "lib/libcudart.so.13")
    programs = ("bin/nvcc", "bin/crt/link.stub", "nvvm/bin/cicc")
    headers = ("include/cuda_runtime.h", "include/crt/host_config.h")
    make_folder(toolkit, "x86", *programs, *headers, "include/fatbinary_section.h", *libraries)
    make_folder(parts, "arm", *headers, *libraries)
    make_folder(folder / "x86", "", "nvidia_nvvm-13.0.88.dist-info/METADATA")
    return toolkit, parts


def test_programs_are_of_this_cpu_and_headers_and_libraries_of_the_other(tmp_path: Path) -> None:
    toolkit, parts = make_toolkits(tmp_path)
    assemble_home(toolkit, parts, ARM)
    for name in ("bin/nvcc", "bin/crt/link.stub", "nvvm/bin/cicc", "include/fatbinary_section.h"):
        assert (parts / name).read_text() == "x86"
    seen_by_nvcc = parts / "targets" / "sbsa-linux"
    for place in (parts, seen_by_nvcc):
        assert (place / "include" / "cuda_runtime.h").read_text() == "arm"
        assert (place / "include" / "crt" / "host_config.h").read_text() == "arm"
        assert (place / "lib" / "libcudart_static.a").read_text() == "arm"
    assert (parts / "lib64" / "libcudart.so").read_text() == "arm"
    assert (parts / "dist-info" / "nvidia_nvvm-13.0.88.dist-info").is_dir()


def test_the_toolkit_of_this_cpu_stays_as_it_is(tmp_path: Path) -> None:
    toolkit, parts = make_toolkits(tmp_path)
    before = sorted(path.relative_to(toolkit) for path in toolkit.rglob("*"))
    assemble_home(toolkit, parts, ARM)
    assemble_home(toolkit, parts, ARM)  # repeating it is allowed
    assert sorted(path.relative_to(toolkit) for path in toolkit.rglob("*")) == before
    files = (path for path in toolkit.rglob("*") if path.is_file())
    assert {path.read_text() for path in files} == {"x86"}


def test_a_toolkit_for_another_cpu_is_brought_once_and_beside_that_for_this_cpu(
    tmp_path: Path,
) -> None:
    asked: list[tuple[str, ...]] = []

    def install(place: Path, *words: str) -> None:
        asked.append((place.name, *words))
        toolkit, parts = make_toolkits(tmp_path / "packages")
        source = parts if "--platform" in words else toolkit
        shutil.copytree(source.parents[1], place)

    folder = tmp_path / "cuda-13.0"
    for _ in range(2):
        home = install_toolkit("13.0", folder, install, ARM, ARM.pip_options)
        assert (home / "bin" / "nvcc").read_text() == "x86"
        assert (home / "lib" / "libcudart_static.a").read_text() == "arm"
    assert home == tmp_path / "cuda-13.0-aarch64" / "nvidia" / "cu13"
    assert install_toolkit("13.0", folder, install) == folder / "nvidia" / "cu13"
    arm = str(lock_path("nvcc_aarch64"))
    assert asked == [
        ("cuda-13.0", "--require-hashes", "--requirement", str(lock_path("nvcc"))),
        ("cuda-13.0-aarch64", *ARM.pip_options, "--require-hashes", "--requirement", arm),
    ]


def test_a_toolkit_that_no_published_set_asks_for_is_brought_without_hashes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, ...]] = []

    def install(place: Path, *words: str) -> None:
        asked.append(words)
        shutil.copytree(make_toolkits(tmp_path / "packages")[0].parents[1], place)

    install_toolkit("13.2", tmp_path / "cuda-13.2", install)
    assert asked == [("cuda-toolkit[nvcc,cccl]==13.2.*",)]
    assert "CUDA 13.2 is not locked" in capsys.readouterr().out


def test_pip_is_told_every_tag_that_the_oldest_served_glibc_has() -> None:
    words = ARM.pip_options
    tags = {words[at + 1] for at, word in enumerate(words) if word == "--platform"}
    assert {"manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64"} <= tags
    assert "manylinux_2_29_aarch64" not in tags
    assert "--only-binary=:all:" in words


def test_missing_tools_are_reported_with_their_packages(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match=r"aarch64-linux-gnu-g\+\+ and qemu") as caught:
        require_tools(ARM, {"PATH": str(tmp_path)})
    assert "apt-get install g++-aarch64-linux-gnu qemu-user-static" in str(caught.value)


def test_a_variable_says_what_is_built_for() -> None:
    assert (target_machine({}), find_target({})) == ("x86_64", None)
    assert target_machine(ARM.environ()) == "aarch64"
    assert find_target(ARM.environ()) is ARM


def test_a_build_without_a_name_is_of_the_sets_for_its_cpu() -> None:
    here = {one.name for one in choose_sets([], {}, SETS).sets}
    there = {one.name for one in choose_sets([], ARM.environ(), SETS).sets}
    assert here == SETS.keys() - {"arm"}
    assert there == {"arm"}
    assert toolkits_of([], ARM.environ(), SETS) == ["13.0"]


@pytest.mark.parametrize(
    ("name", "environ", "session"),
    [("arm", {}, "build_arm -- arm"), ("hopper", ARM.environ(), "build_wheels -- hopper")],
    ids=["on x86_64", "on aarch64"],
)
def test_a_set_for_another_cpu_names_the_session_that_builds_it(
    name: str, environ: dict[str, str], session: str
) -> None:
    with pytest.raises(ArchError, match="this builds for") as caught:
        choose_sets([name], environ, SETS, "13.0")
    assert session in str(caught.value)


def test_a_cpu_without_a_set_is_reported_with_the_existing_sets() -> None:
    hopper = {"hopper": SETS["hopper"]}
    with pytest.raises(
        ArchError, match=r"is for aarch64, published are `hopper` \(x86_64\)"
    ) as told:
        choose_sets([], ARM.environ(), hopper, "13.0")
    assert told.value.hint == 'a set with `machine = "aarch64"` is built for it'
    with pytest.raises(ArchError, match="no arch set is for aarch64"):
        toolkits_of([], ARM.environ(), hopper)


def test_a_list_of_ones_own_is_for_the_cpu_of_the_build() -> None:
    environ = {"TORCH_CUDA_ARCH_LIST": "9.0a", **ARM.environ()}
    (one,) = choose_sets([], environ, SETS, "13.0").sets
    assert (one.name, one.machine) == ("sm90a", "aarch64")


def test_a_tool_that_fails_is_reported_with_its_output() -> None:
    with pytest.raises(ToolchainError, match=r"`sh` failed with exit code 3: no luck"):
        run_tool(["sh", "-c", "echo no luck >&2; exit 3"])
    with pytest.raises(ToolchainError, match="`no-such-tool` is not installed"):
        run_tool(["no-such-tool"])


def test_glibc_is_that_of_the_compilers_headers(tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    text = "#!/bin/sh\nprintf '#define __GLIBC__ 2\\n#define __GLIBC_MINOR__ 31\\n'\n"
    compiler.write_text(text)
    compiler.chmod(0o755)
    assert glibc_version({"CXX": str(compiler)}) == "2.31"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    assert glibc_version({"CXX": str(compiler)}) == ""


def test_only_wheels_of_that_cpu_are_tried(tmp_path: Path) -> None:
    write_wheel(tmp_path / "hopper", SETS["hopper"])
    with pytest.raises(ArtefactError, match=r"no wheel for aarch64[\s\S]*nox -s build_arm"):
        find_wheels(tmp_path)
    path = write_wheel(tmp_path / "arm", SETS["arm"])
    assert [one.path for one in find_wheels(tmp_path)] == [path]
