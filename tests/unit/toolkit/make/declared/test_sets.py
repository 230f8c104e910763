"""Arch sets must be compilable, and have different versions."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from flash_dist.toolkit.audit.signatures import PROVENANCE
from flash_dist.toolkit.builds.published import load_archsets, load_picks
from flash_dist.toolkit.make.declared.keys import DeclarationError
from flash_dist.toolkit.make.declared.sets import RESERVED, read_sets, read_targets
from flash_dist.toolkit.make.release.channels import CHANNELS
from flash_dist.toolkit.make.release.index import DEFAULT, PACKAGES
from flash_dist.toolkit.targets.archs import Arch
from tests.unit.made.projects import require_sentence, write

if TYPE_CHECKING:
    from pathlib import Path

    from flash_dist.toolkit.targets.archs import ArchSet


def read(root: Path, sets: object, **own: object) -> dict[str, ArchSet]:
    return load_archsets(read_sets({"sets": sets, **own}, root))


def refuse(root: Path, sets: object, **own: object) -> str:
    with pytest.raises(DeclarationError) as caught:
        read_sets({"sets": sets, **own}, root)
    require_sentence(caught.value)
    return str(caught.value)


def test_a_list_of_targets_is_a_set_by_itself(tmp_path: Path) -> None:
    (found,) = read(tmp_path, {"All-GPUs": "8.0+PTX;9.0a"}, gates={"wheel_mb": 4}).values()
    assert (found.name, found.label, str(found)) == ("All-GPUs", "allgpus", "8.0+PTX;9.0a")
    assert (found.who, found.toolkit, found.machine) == ("All-GPUs", "13.0", "x86_64")
    assert found.budget_bytes == 4_000_000


def test_a_table_says_more_of_a_set(tmp_path: Path) -> None:
    told = {
        "archs": "7.5 8.0;9.0a",
        "toolkit": "12.4",
        "who": "old drivers",
        "label": "old",
        "budget_mb": 2.5,
    }
    (found,) = read(tmp_path, {"cuda12": told}, toolkit="13.1").values()
    assert (found.label, found.toolkit, found.who) == ("old", "12.4", "old drivers")
    assert (str(found), found.budget_bytes) == ("7.5;8.0;9.0a", 2_500_000)
    (plain,) = read(tmp_path, {"all": "9.0a"}, toolkit="13.1").values()
    assert (plain.toolkit, plain.budget_bytes) == ("13.1", None)


def test_a_set_for_another_cpu_is_chosen_there_alone(tmp_path: Path) -> None:
    sets = {
        "hopper": "9.0a",
        "all": "8.0;9.0a",
        "arm": {"archs": "9.0a;11.0", "machine": "aarch64"},
    }
    source = read_sets({"sets": sets}, tmp_path)
    assert load_archsets(source)["arm"].machine == "aarch64"
    assert {one.name for one in load_picks(source).values()} == {"all"}
    assert {one.name for one in load_picks(source, "aarch64").values()} == {"arm"}


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ({}, "names no arch set"),
        ({"all": "9.5"}, "unknown architecture `9.5` in arch set `all`"),
        ({"all": "8.0;banana"}, "malformed architecture `banana` in arch set `all`"),
        ({"all": "8.0,9.0"}, "must be a TORCH_CUDA_ARCH_LIST such as `8.0+PTX;9.0a`"),
        ({"all": ";"}, "no architecture in arch set `all`"),
        ({"all": "9.0b"}, "malformed architecture `9.0b`"),
        ({"all": "sm_90+PTX"}, "malformed architecture `sm_90+PTX`"),
        ({"all": "native"}, "malformed architecture `native`"),
        ({"all": "7.0"}, "CUDA 13.0 cannot compile `sm_70` of arch set `all` (`7.0`)"),
        ({"all": "10.7"}, "CUDA 13.0 cannot compile `sm_107` of arch set `all`"),
        ({"old": {"archs": "10.0", "toolkit": "12.4"}}, "CUDA 12.4 cannot compile `sm_100`"),
        ({"all": {"archs": "9.0a", "toolkit": "11.8"}}, "CUDA 12.0 or newer, got CUDA 11.8"),
        ({"all": {"archs": "9.0a", "toolkit": "99.0"}}, "CUDA 99.0, which is newer than any that"),
        ({"all": {"archs": "9.0a", "machine": "arm64"}}, "must be `x86_64` or `aarch64`, got"),
        (
            {"arm": {"archs": "9.0a", "machine": "aarch64", "toolkit": "12.4"}},
            "`arm` is for aarch64 and CUDA 12.4; for aarch64 it must be CUDA 13.0 or newer",
        ),
        ({"all": {"archs": "9.0a", "label": "with-dash"}}, "must be 1 to 10 characters a-z or 0-9"),
        ({"---": "9.0a"}, "an arch set has a name such as `hopper`"),
        ({"": "9.0a"}, 'an arch set has a name such as `hopper`, got `""`'),
        ({"../up": "9.0a"}, "an arch set has a name such as `hopper`"),
        ({"a/b": "9.0a"}, "an arch set has a name such as `hopper`"),
        ({"a b": "9.0a"}, "an arch set has a name such as `hopper`"),
        ({"--native": "9.0a"}, "an arch set has a name such as `hopper`"),
        ({"é": "9.0a"}, "an arch set has a name such as `hopper`"),
        ({"index": "9.0a"}, "such as `hopper`, which conda, hub, index, packages, "),
        ({"hopper-9.0": "9.0a"}, "an arch set has a name such as `hopper`"),
    ],
    ids=str,
)
def test_a_set_that_cannot_be_built_is_refused(
    sets: dict[str, Any], said: str, tmp_path: Path
) -> None:
    assert said in refuse(tmp_path, sets)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("blackwell-data", "blackwell-desk"),
        ("hopper", "Hopper"),
        ("a-b", "ab"),
        ("hopper", {"archs": "9.0a", "label": "hopper"}),
        ("hopper", {"archs": "8.0", "label": "hopper", "toolkit": "13.2"}),
        ("hopper", {"archs": "9.0a", "label": "hopper", "machine": "aarch64"}),
    ],
    ids=str,
)
def test_two_sets_whose_wheels_have_one_version_are_refused(
    one: str, other: str | dict[str, Any], tmp_path: Path
) -> None:
    name = other if isinstance(other, str) else "second"
    sets = {one: "9.0a", name: "8.0" if isinstance(other, str) else other}
    said = refuse(tmp_path, sets)
    assert f"arch sets `{one}` and `{name}` have one label, `" in said
    assert said.endswith(f"hint: give `{name}` a `label` of its own")


def test_one_label_may_have_two_cuda_majors(tmp_path: Path) -> None:
    sets = {"all": "9.0a", "old": {"archs": "9.0a", "label": "all", "toolkit": "12.4"}}
    assert {one.label for one in read(tmp_path, sets).values()} == {"all"}


def test_a_label_is_made_of_the_letters_and_digits_of_a_name(tmp_path: Path) -> None:
    assert read(tmp_path, {"9_-": "9.0a"})["9_-"].label == "9"
    assert read(tmp_path, {"Turing_to_Hopper": "9.0a"})["Turing_to_Hopper"].label == "turingtoho"


def test_no_set_has_the_name_of_another_folder() -> None:
    assert {*CHANNELS, DEFAULT, PACKAGES, PROVENANCE} == set(RESERVED)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot read arch sets from"),
        ("[]", "is not an object"),
        ('{"set": []}', "is not an object"),
        ('{"set": {}}', "defines no arch set"),
        ('{"set": {"all": {"archs": "9.0a"}}}', "lacks budget_mb, label, toolkit, who"),
        ('{"set": {"all": 3}}', "lacks archs, budget_mb, label, toolkit, who"),
        ('{"set": {"../all": {SET, "budget_mb": 9}}}', "an arch set has a name such as `hopper`"),
        ('{"set": {"all": {SET, "budget_mb": Infinity}}}', "cannot read arch sets"),
        ('{"set": {"all": {SET, "budget_mb": NaN}}}', "cannot read arch sets"),
        ('{"set": {"all": {SET, "budget_mb": 0}}}', "is a number of MB, got `0`"),
        ('{"set": {"all": {SET, "budget_mb": 9}}}', "lacks pip for x86_64"),
        ('{"set": {"all": {SET, "budget_mb": 9}}, "picks": 3}', "is not an object"),
        ('{"set": {"all": {SET, "budget_mb": 9}}, "picks": {"x86_64": 3}}', "must be objects"),
        (
            '{"set": {"all": {SET, "budget_mb": 9}}, "picks": {"x86_64": {"pip": "none"}}}',
            "which is none of all",
        ),
        ('{"set": {"all": {SET, "budget_mb": 9}}, "proof": {"sm_90a": "x"}}', "proof of `sm_90a`"),
    ],
    ids=lambda text: text[-40:],
)
def test_a_file_of_sets_is_judged(text: str, said: str, tmp_path: Path) -> None:
    one = '"label": "all", "archs": "9.0a", "who": "H100", "toolkit": "13.0"'
    write(tmp_path / "sets.json", text.replace("SET", one))
    assert said in refuse(tmp_path, "sets.json")


def test_a_file_of_sets_is_taken_as_it_is(tmp_path: Path) -> None:
    told = {"label": "all", "archs": "9.0a", "who": "H100", "toolkit": "13.0", "budget_mb": 9}
    picks = {"x86_64": {"pip": "all", "conda": "all"}}
    text = json.dumps({"set": {"all": told}, "picks": picks})
    path = write(tmp_path / "sets.json", text)
    assert read_sets({"sets": "sets.json"}, tmp_path) == path
    assert "there is no such file" in refuse(tmp_path, "other.json")


@pytest.mark.parametrize(
    ("texts", "archs"),
    [
        ([], ()),
        (["9.0a"], (Arch(9, 0, "a"),)),
        (["sm_90a", "9.0a", "8.0"], (Arch(8, 0), Arch(9, 0, "a"))),
        (["compute_90"], (Arch(9, 0, ptx=True),)),
    ],
    ids=str,
)
def test_targets_are_read_once_and_in_order(texts: list[str], archs: tuple[Arch, ...]) -> None:
    assert read_targets(texts, "`targets`") == archs


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("9.0b", "did you mean `9.0"),
        ("9.5", "did you mean `"),
        ("9.0+PTX", "`compute_90` is PTX of 9.0"),
        ("Hopper", ""),
        ("banana", "known are 3.5, 3.7, 5.0"),
        ("8.0;9.0", ""),
        ("1.0", ""),
    ],
)
def test_a_target_that_nothing_compiles_is_refused(text: str, hint: str) -> None:
    with pytest.raises(DeclarationError) as caught:
        read_targets([text], "`targets` of [[tool.kernels.sources]]")
    require_sentence(caught.value)
    assert f'must be targets such as `9.0a`, got `"{text}"`' in caught.value.message
    assert hint in str(caught.value.hint)
