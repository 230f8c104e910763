"""The settings of cibuildwheel: contents of the container, and paths of each step."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.make.container import settings
from flash_dist.toolkit.make.container.settings import PASSED, cibuildwheel_settings
from flash_dist.toolkit.make.project import ROOT, load_project
from flash_dist.toolkit.make.wheels.platform_tags import MANYLINUX

if TYPE_CHECKING:
    from pathlib import Path


def test_the_container_asks_for_the_tag_that_is_released() -> None:
    words = shlex.split(cibuildwheel_settings()["CIBW_REPAIR_WHEEL_COMMAND"])
    assert words[:3] == ["python", "-m", "flash_dist.toolkit.make.wheels.repair"]
    assert words[words.index("--plat") + 1] == MANYLINUX


def test_every_file_that_a_step_names_is_in_the_project() -> None:
    words = [word for text in cibuildwheel_settings().values() for word in text.split()]
    named = [word.removeprefix("{project}/") for word in words if word.startswith("{project}/")]
    assert "ci/install_tests/cpu_call.py" in named
    assert all((ROOT / name).is_file() for name in named)


def test_the_variables_of_the_package_bear_its_name() -> None:
    own = {name for name in PASSED if name.startswith("FLASH_DIST_")}
    names = ("ARCH_SET", "BUILD_DIR", "MACHINE", "TEST_TORCH")
    assert own == {f"FLASH_DIST_{name}" for name in names}
    assert cibuildwheel_settings()["CIBW_ENVIRONMENT_PASS"].split() == list(PASSED)


def test_a_container_takes_no_object_from_a_cache() -> None:
    assert "CCACHE_DISABLE=1" in cibuildwheel_settings()["CIBW_ENVIRONMENT"].split()
    assert not [name for name in PASSED if name.startswith("CCACHE_")]


def test_the_wheel_is_tried_without_a_toolkit_beside_it() -> None:
    found = cibuildwheel_settings()
    assert found["CIBW_TEST_ENVIRONMENT"] == "PYTHONPATH="
    assert "smoke_test.py flash_dist flash_dist.toolkit {project}/" in found["CIBW_TEST_COMMAND"]


@pytest.mark.parametrize(
    ("groups", "wanted"),
    [({}, None), ({"test": ["pytest"]}, "test"), ({"docs": ["sphinx"]}, None)],
    ids=["none", "test", "another"],
)
def test_a_folder_of_tests_gets_pytest_and_the_group_of_tests(
    groups: dict[str, list[str]],
    wanted: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "some tests").mkdir()
    project = replace(load_project(), tests=(tmp_path / "some tests",))
    monkeypatch.setattr(settings, "ROOT", tmp_path)
    monkeypatch.setattr(settings, "load_project", lambda: project)
    monkeypatch.setattr(settings, "read_pyproject", lambda _: {"dependency-groups": groups})
    found = cibuildwheel_settings()
    assert shlex.split(found["CIBW_TEST_COMMAND"])[-1] == "{project}/some tests"
    assert (found["CIBW_TEST_REQUIRES"], found.get("CIBW_TEST_GROUPS")) == ("pytest", wanted)


def test_a_program_needs_no_package_of_a_group() -> None:
    assert not {"CIBW_TEST_REQUIRES", "CIBW_TEST_GROUPS"} & cibuildwheel_settings().keys()
