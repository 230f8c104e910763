from __future__ import annotations

from dataclasses import replace

import pytest

from ci.build.choose import choose_sets, toolkits_of
from flash_dist.errors import ArchError
from flash_dist.targets.archs import ArchSet

PUBLISHED = {
    name: ArchSet.parse(archs, name=name, label=name)
    for name, archs in {"hopper": "9.0a", "all": "7.5;8.0+PTX"}.items()
}


def test_without_a_name_everything_published_is_built() -> None:
    choice = choose_sets([], {}, PUBLISHED, "13.0")
    assert [one.name for one in choice.sets] == ["hopper", "all"]
    assert "TORCH_CUDA_ARCH_LIST not set" in str(choice)


def test_a_named_set_wins_over_the_variable_and_the_line_says_so() -> None:
    choice = choose_sets(["hopper"], {"TORCH_CUDA_ARCH_LIST": "7.5"}, PUBLISHED, "13.0")
    assert [one.name for one in choice.sets] == ["hopper"]
    assert "named on the command line; TORCH_CUDA_ARCH_LIST = `7.5` is not used" in str(choice)


@pytest.mark.parametrize(
    ("text", "name", "archs"),
    [
        ("7.5 8.6", "sm75.sm86", "7.5;8.6"),
        ("8.6;7.5", "sm75.sm86", "7.5;8.6"),
        ("Ampere", "sm80.sm86.compute86", "8.0;8.6+PTX"),
    ],
)
def test_the_variable_is_one_set_named_after_its_content(text: str, name: str, archs: str) -> None:
    choice = choose_sets([], {"TORCH_CUDA_ARCH_LIST": text}, PUBLISHED, "13.0")
    assert [(one.name, one.label, str(one)) for one in choice.sets] == [(name, name, archs)]
    assert "TORCH_CUDA_ARCH_LIST" in choice.reason


def test_a_set_named_twice_is_built_once() -> None:
    choice = choose_sets(["all", "hopper", "all"], {}, PUBLISHED, "13.0")
    assert [one.name for one in choice.sets] == ["all", "hopper"]


def test_an_unknown_set_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(ArchError, match="did you mean `hopper`"):
        choose_sets(["hoper"], {}, PUBLISHED, "13.0")


def test_an_arch_that_the_toolkit_cannot_compile_is_named_with_the_way_on() -> None:
    environ = {"TORCH_CUDA_ARCH_LIST": "5.2 7.5"}
    with pytest.raises(ArchError, match=r"sm_52[\s\S]*--skip-unsupported"):
        choose_sets([], environ, PUBLISHED, "13.0")
    choice = choose_sets(["--skip-unsupported"], environ, PUBLISHED, "13.0")
    assert [(one.name, one.label) for one in choice.sets] == [("sm75", "sm75")]


OLDER = {**PUBLISHED, "old": replace(ArchSet.parse("9.0a", name="old"), toolkit="12.4")}


def test_without_a_toolkit_each_set_is_judged_by_its_own() -> None:
    newer = replace(ArchSet.parse("10.3", name="new"), toolkit="12.9")
    both = {"new": newer, "old": replace(ArchSet.parse("9.0a", name="old"), toolkit="12.4")}
    assert choose_sets([], {}, both).sets == tuple(both.values())
    with pytest.raises(ArchError, match=r"CUDA 12\.4 cannot compile `sm_103`"):
        choose_sets([], {}, both, "12.4")


def test_each_set_is_judged_by_the_toolkit_of_its_major() -> None:
    choice = choose_sets(["old", "hopper"], {}, OLDER, "13.1")
    assert [one.name for one in choice.sets] == ["old", "hopper"]
    newer = {"new": replace(ArchSet.parse("10.0", name="new"), toolkit="12.4")}
    with pytest.raises(ArchError, match=r"CUDA 12\.4 cannot compile `sm_100`"):
        choose_sets(["new"], {}, newer, "13.1")


@pytest.mark.parametrize(
    ("names", "toolkits"),
    [([], ["13.0", "12.4"]), (["old"], ["12.4"]), (["--skip-unsupported", "all"], ["13.0"])],
)
def test_a_build_brings_the_toolkits_that_its_sets_ask_for(
    names: list[str], toolkits: list[str]
) -> None:
    assert toolkits_of(names, {}, OLDER) == toolkits
    assert toolkits_of([], {"TORCH_CUDA_ARCH_LIST": "8.0"}, OLDER) == ["13.0"]
