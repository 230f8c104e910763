from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from flash_dist.toolkit.errors import ArchError
from flash_dist.toolkit.machine.libcuda import imagine_cuda
from flash_dist.toolkit.make.building.choose import choose_sets, list_of_gpus, toolkits_of
from flash_dist.toolkit.targets.archs import Arch, ArchSet
from flash_dist.toolkit.targets.devices import Device

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


@pytest.mark.parametrize(
    ("listed", "old"),
    [
        ("Pascal", "`sm_60`, `sm_61`, `compute_61`"),
        ("3.5", "`sm_35`"),
        ("Kepler+Tesla", "`sm_37`"),
        ("7.0;8.6", "`sm_70`"),
        ("compute_72 9.0a", "`compute_72`"),
    ],
)
def test_a_list_for_older_gpus_is_told_where_support_begins(listed: str, old: str) -> None:
    with pytest.raises(ArchError) as caught:
        choose_sets([], {"TORCH_CUDA_ARCH_LIST": listed}, PUBLISHED, "13.0")
    message = f"flash_dist starts at 7.5, `TORCH_CUDA_ARCH_LIST = {listed}` asks for {old}"
    assert caught.value.message == message
    assert caught.value.hint


@pytest.mark.parametrize("listed", ["9.0", "Hopper", "8.6;9.0+PTX", "9.0 12.0"])
def test_a_list_without_the_suffix_of_hopper_is_told_what_it_lacks(listed: str) -> None:
    told = str(choose_sets([], {"TORCH_CUDA_ARCH_LIST": listed}, PUBLISHED, "13.0"))
    assert "warning: sm_90 has none of the kernels that are only for sm_90a: `9.0a` builds" in told
    for spelled in (f"{listed};9.0a", "9.0a", "90a", "8.6"):
        choice = choose_sets([], {"TORCH_CUDA_ARCH_LIST": spelled}, PUBLISHED, "13.0")
        assert not choice.notes


def test_native_is_what_serves_the_gpus_here(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = imagine_cuda([Device(9, 0), Device(6, 1), Device(8, 6), Device(9, 0)], None)
    assert str(list_of_gpus((Arch(9, 0, "a"),), lambda: cuda)) == "8.6;9.0a"
    monkeypatch.setattr("flash_dist.toolkit.machine.libcuda.LIBRARY", "libcuda.so.of-nobody")
    with pytest.raises(ArchError, match=r"`native`, and there is no GPU here to build for \(lib"):
        choose_sets([], {"TORCH_CUDA_ARCH_LIST": "native"}, PUBLISHED, "13.0")


def test_torch_names_no_list_that_is_not_known_here() -> None:
    source = ast.parse(Path(cpp_extension.__file__).read_text("utf-8"))
    (named,) = (
        ast.literal_eval(node.value.args[0])
        for node in ast.walk(source)
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "named_arches"
        and isinstance(node.value, ast.Call)
    )
    for name, archs in named:
        assert ArchSet.parse(name).archs == ArchSet.parse(archs).archs, name
