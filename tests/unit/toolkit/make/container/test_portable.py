from __future__ import annotations

import json
import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.errors import KernelsError
from flash_dist.toolkit.make.container.engine import identify_image
from flash_dist.toolkit.make.container.image import CONTAINERS_CONF
from flash_dist.toolkit.make.container.portable import (
    IMAGE,
    audit_command,
    build_all,
    cibuildwheel_environ,
    digest_inputs,
    find_unchanged,
    note_wheel,
)
from flash_dist.toolkit.make.container.settings import PASSED
from flash_dist.toolkit.make.toolchain.cross import TARGETS
from flash_dist.toolkit.make.wheels.gates import read_arguments
from flash_dist.toolkit.make.wheels.platform_tags import MANYLINUX
from flash_dist.toolkit.targets.archs import ArchSet

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

ARM = replace(ArchSet.parse("9.0a"), machine="aarch64")
HOPPER = replace(ArchSet.parse("9.0a", name="hopper", label="hopper"), budget_bytes=3_400_000)
LOCAL = "localhost/fatwheel-manylinux_2_28:1"


def environ_of(environ: Mapping[str, str] = {}, archset: ArchSet = HOPPER) -> dict[str, str]:
    return cibuildwheel_environ(archset, environ, "podman", published=archset is HOPPER)


def test_a_published_set_travels_by_its_name_and_another_as_a_list() -> None:
    named = environ_of({"TORCH_CUDA_ARCH_LIST": "7.5"})
    assert (named["FLASH_DIST_ARCH_SET"], named["TORCH_CUDA_ARCH_LIST"]) == ("hopper", "")
    listed = environ_of(archset=ArchSet.parse("7.5;8.6+PTX"))
    assert (listed["FLASH_DIST_ARCH_SET"], listed["TORCH_CUDA_ARCH_LIST"]) == ("", "7.5;8.6+PTX")


def test_variables_that_a_build_reads_enter_the_container() -> None:
    for archset in (HOPPER, ARM):
        environ = {"PIP_FIND_LINKS": "/wheels", **TARGETS["aarch64"].environ()}
        chosen = environ_of(environ, archset).keys() - {IMAGE, "CONTAINERS_CONF"}
        set_here = {name for name in chosen if not name.startswith("CIBW_")}
        assert set_here <= set(PASSED)


def test_the_compiler_of_this_machine_stays_out_and_a_cross_compiler_enters() -> None:
    assert "CXX" not in environ_of({"CXX": "clang++-19"})
    assert environ_of()["FLASH_DIST_MACHINE"] == "x86_64"
    crossed = environ_of(TARGETS["aarch64"].environ(), ARM)
    assert crossed["CXX"] == "aarch64-linux-gnu-g++"
    assert crossed["FLASH_DIST_MACHINE"] == "aarch64"


def test_a_wheel_for_another_cpu_is_built_in_our_own_image_and_not_run_there() -> None:
    crossed = environ_of(TARGETS["aarch64"].environ(), ARM)
    assert (crossed[IMAGE], crossed["CIBW_TEST_SKIP"]) == (LOCAL, "*")
    assert "CIBW_TEST_SKIP" not in environ_of()
    assert "--platform manylinux_2_28_aarch64" in audit_command(ARM)


def test_an_image_of_an_older_recipe_is_reported_before_anything_is_built(tmp_path: Path) -> None:
    podman = tmp_path / "podman"
    podman.write_text("#!/bin/sh\necho 4.3.1\n")  # prints a version, as podman does
    podman.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/bin", IMAGE: LOCAL}
    with pytest.raises(KernelsError, match=r"by an older recipe[\s\S]*nox -s image"):
        build_all(["hopper"], environ)


def test_the_image_is_the_public_one_unless_another_is_named() -> None:
    assert environ_of()[IMAGE] == MANYLINUX
    assert environ_of({IMAGE: ""})[IMAGE] == MANYLINUX
    assert environ_of({IMAGE: "quay.io/mine"})[IMAGE] == "quay.io/mine"


def test_podman_reads_our_settings_for_the_local_image_alone() -> None:
    assert "CONTAINERS_CONF" not in environ_of()
    assert environ_of({IMAGE: LOCAL})["CONTAINERS_CONF"] == str(CONTAINERS_CONF)
    own = environ_of({IMAGE: LOCAL, "CONTAINERS_CONF": "/mine.conf"})
    assert own["CONTAINERS_CONF"] == "/mine.conf"


def test_a_setting_of_the_user_takes_the_place_of_ours() -> None:
    assert environ_of({"CIBW_BEFORE_ALL": "true"})["CIBW_BEFORE_ALL"] == "true"
    assert environ_of()["CIBW_BEFORE_ALL"].endswith("-m flash_dist.toolkit.make.container.setup")


def test_arguments_for_the_engine_are_the_users() -> None:
    text = "docker; create_args: --network=host"
    assert environ_of({"CIBW_CONTAINER_ENGINE": text})["CIBW_CONTAINER_ENGINE"] == text
    assert environ_of()["CIBW_CONTAINER_ENGINE"] == "podman"


def test_folders_of_wheels_are_found_from_inside_and_addresses_stay() -> None:
    chosen = environ_of({"PIP_FIND_LINKS": "/wheels https://example.org/simple"})
    assert chosen["PIP_FIND_LINKS"] == "/host/wheels https://example.org/simple"
    assert chosen["UV_FIND_LINKS"] == "/host/wheels,https://example.org/simple"
    assert "UV_FIND_LINKS" not in environ_of()


def test_the_audit_step_knows_what_was_asked_for_outside() -> None:
    command = shlex.split(audit_command(HOPPER).format(wheel="/x/some.whl"))
    assert command[:3] == [sys.executable, "-m", "flash_dist.toolkit.make.wheels.gates"]
    args = read_arguments(command[3:])
    assert (args.archs, args.budget, args.platform) == ("9.0a", 3_400_000, "manylinux_2_28_x86_64")
    assert str(args.wheel) == "/x/some.whl"


def test_without_an_engine_the_way_out_is_named(tmp_path: Path) -> None:
    with pytest.raises(KernelsError, match=r"no container engine answers[\s\S]*--native"):
        build_all(["hopper"], {"PATH": str(tmp_path)})


ENVIRON = {"FLASH_DIST_ARCH_SET": "hopper", "CIBW_TEST_SKIP": "", "PATH": "/bin", "LANG": "C"}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    (folder / "csrc").mkdir(parents=True)
    (folder / "csrc" / "fwd.cu").write_text("kernel")
    (folder / "setup.py").write_text("setup()")
    return folder


def test_the_same_sources_image_and_settings_are_the_same_inputs(tree: Path) -> None:
    before = digest_inputs(tree, "sha256:1", ENVIRON)
    (tree / "setup.py").touch()
    elsewhere = {**ENVIRON, "PATH": "/usr/bin", "LANG": "de_DE"}  # not for the container
    assert digest_inputs(tree, "sha256:1", elsewhere) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: (tree / "csrc" / "fwd.cu").write_text("other"),
        lambda tree: (tree / "csrc" / "new.cu").write_text(""),
        lambda tree: (tree / "setup.py").unlink(),
        lambda tree: (tree / "setup.py").rename(tree / "csrc" / "setup.py"),
    ],
    ids=["other text", "a new file", "one file less", "moved"],
)
def test_another_source_is_another_input(tree: Path, change: Callable[[Path], object]) -> None:
    before = digest_inputs(tree, "sha256:1", ENVIRON)
    change(tree)
    assert digest_inputs(tree, "sha256:1", ENVIRON) != before


def test_another_image_or_setting_is_another_input(tree: Path) -> None:
    before = digest_inputs(tree, "sha256:1", ENVIRON)
    assert digest_inputs(tree, "sha256:2", ENVIRON) != before
    for name in ("FLASH_DIST_ARCH_SET", "CIBW_TEST_SKIP", "TORCH_CUDA_ARCH_LIST"):
        assert digest_inputs(tree, "sha256:1", {**ENVIRON, name: "other"}) != before, name


def test_a_wheel_is_found_that_was_noted_with_these_inputs(tmp_path: Path) -> None:
    note, wheel = tmp_path / "notes" / "hopper.json", tmp_path / "a.whl"
    wheel.write_bytes(b"wheel")
    assert find_unchanged(note, "inputs", tmp_path) is None
    note_wheel(note, "inputs", wheel)
    assert find_unchanged(note, "inputs", tmp_path) == wheel
    assert find_unchanged(note, "other inputs", tmp_path) is None


def test_a_wheel_that_was_changed_renamed_or_removed_since_is_not(tmp_path: Path) -> None:
    note, wheel = tmp_path / "hopper.json", tmp_path / "a.whl"
    wheel.write_bytes(b"wheel")
    note_wheel(note, "inputs", wheel)
    wheel.write_bytes(b"whee1")
    assert find_unchanged(note, "inputs", tmp_path) is None
    wheel.write_bytes(b"wheel")
    wheel.rename(tmp_path / "b.whl")
    assert find_unchanged(note, "inputs", tmp_path) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"inputs": "inputs", "other": 1})])
def test_a_note_that_says_something_else_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "hopper.json").write_text(text)
    assert find_unchanged(tmp_path / "hopper.json", "inputs", tmp_path) is None


def test_an_image_is_known_by_its_id_and_until_it_is_here_by_its_name(tmp_path: Path) -> None:
    podman = tmp_path / "podman"
    podman.write_text('#!/bin/sh\n[ "$3" = here ] && echo 0123abcd\n')
    podman.chmod(0o755)
    assert identify_image(str(podman), "here", {}) == "0123abcd"
    assert identify_image(str(podman), "elsewhere", {}) == "elsewhere"
