"""The arch set chosen for some GPUs."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from packaging.version import Version

from flash_dist.toolkit.builds.published import published_sets
from flash_dist.toolkit.indexes.selection import (
    Candidate,
    candidates_of,
    describe_lack,
    make_build,
    select,
)
from flash_dist.toolkit.targets.advice import sets_for
from flash_dist.toolkit.targets.archs import ArchSet
from flash_dist.toolkit.targets.devices import KNOWN_DEVICES, Device, Driver
from flash_dist.toolkit.targets.verdict import FLOOR

R580 = Driver.parse("580")
# Fixed sizes, so that the choice between equal sets does not change with a release.
MEGABYTES = {
    "turing-ampere-ada": 9.5,
    "hopper": 3.8,
    "blackwell": 4.2,
    "all": 12.8,
    "cuda12": 10.0,
}
CANDIDATES = tuple(
    replace(one, size=int(MEGABYTES[one.name] * 1e6)) for one in candidates_of(published_sets())
)


def devices(text: str) -> list[Device]:
    return [Device.parse(one) for one in text.split(",")]


def chosen_name(gpus: str, driver: Driver | None = R580) -> str | None:
    selection = select(devices(gpus), driver, CANDIDATES)
    return selection.chosen.candidate.name if selection.chosen else None


@pytest.mark.parametrize(
    ("gpus", "name"),
    [
        ("7.5", "turing-ampere-ada"),  # native code, as in `cuda12`, and smaller
        ("8.6", "turing-ampere-ada"),
        ("7.5,8.6,8.9", "turing-ampere-ada"),
        ("9.0", "hopper"),
        ("9.0,9.0,9.0", "hopper"),
        ("10.3,12.1", "blackwell"),
        ("8.6,9.0", "cuda12"),  # native code, as in `all`, and smaller
        ("7.5,9.0", "cuda12"),
        ("9.0,13.0", "all"),  # SASS for 9.0; a smaller set has only PTX for both
        ("8.6,9.0,12.0", "all"),
        ("7.5,9.0,12.0", "all"),
        ("8.7", "all"),  # integrated GPU: PTX of 8.0 runs, SASS of 8.6 is not promised
        ("11.0", "turing-ampere-ada"),  # both would use the JIT
    ],
)
def test_the_smallest_of_the_sets_that_serve_all_gpus_best(gpus: str, name: str) -> None:
    assert chosen_name(gpus) == name


@pytest.mark.parametrize("gpu", ["8.0", "9.0", "10.0", "11.0", "12.0", "12.1"])
def test_arm_machines_get_machine_code_of_their_set(gpu: str) -> None:
    chosen = select(devices(gpu), R580, candidates_of(published_sets(), "aarch64")).chosen
    assert chosen is not None
    how = "same-major" if gpu == "12.1" else "native"  # DGX Spark runs the code of 12.0
    assert (chosen.candidate.name, chosen.verdicts[0].how) == ("arm", how)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_no_other_set_serves_a_pair_of_gpus_better(machine: str) -> None:
    """Compare by the number of GPUs served, then with SASS, then with native code; then by size."""
    candidates = candidates_of(published_sets(), machine)
    able = [*(device for device in KNOWN_DEVICES if device >= FLOOR), Device(13, 0)]
    for pair in (*combinations(able, 1), *combinations(able, 2)):
        selection = select(pair, R580, candidates)
        figures = {
            judged.candidate.name: (
                sum(bool(one) and one.how != "unverified" for one in judged.verdicts),
                sum(one.how in {"native", "family", "same-major"} for one in judged.verdicts),
                sum(one.how == "native" for one in judged.verdicts),
                -(judged.candidate.size or 0),
            )
            for judged in selection.candidates
        }
        best = max(figures.values())
        if selection.chosen is None:
            assert best[0] < len(pair)
        else:
            assert figures[selection.chosen.candidate.name] == best, pair


def test_doctor_names_the_same_set() -> None:
    able = [device for device in KNOWN_DEVICES if device >= FLOOR]
    for group in (*combinations(able, 1), *combinations(able, 2), *combinations(able, 3)):
        named = sets_for(group, [one for one in published_sets() if one.machine == "x86_64"])
        chosen = select(group, None, CANDIDATES).chosen
        assert (chosen.candidate.name if chosen else None) == (named[0].name if named else None)


def test_a_driver_that_loads_nothing_is_the_reason() -> None:
    selection = select(devices("9.0"), Driver.parse("470"), CANDIDATES)
    assert selection.chosen is None
    assert "needs driver 525 or newer, not driver 470" in selection.driver_refusal
    assert selection.needed == 525
    assert select(devices("9.0"), R580, CANDIDATES).driver_refusal == ""


@pytest.mark.parametrize("driver", ["525", "535.104", "550", "575"])
@pytest.mark.parametrize("gpus", ["7.5", "8.0,8.6,8.9", "9.0", "7.5,9.0"])
def test_an_older_driver_gets_what_the_older_toolkit_made(gpus: str, driver: str) -> None:
    assert chosen_name(gpus, Driver.parse(driver)) == "cuda12"
    assert chosen_name(f"{gpus},12.0", Driver.parse(driver)) is None


def test_a_gpu_that_no_build_serves_does_not_hide_the_set_for_the_others() -> None:
    selection = select(devices("7.0,9.0"), R580, CANDIDATES)
    assert selection.chosen is not None
    assert selection.chosen.candidate.name == "hopper"
    assert selection.unservable == (Device(7, 0),)
    assert not selection
    assert select(devices("7.0"), R580, CANDIDATES).chosen is None


def test_smaller_sets_are_listed_with_their_missing_code() -> None:
    selection = select(devices("8.6,9.0,12.0"), R580, CANDIDATES)
    lacks = {one.candidate.name: describe_lack(one, selection.chosen) for one in selection.smaller}
    assert lacks == {
        "cuda12": "no code for 12.0",
        "hopper": "no code for 8.6, 12.0",
        "blackwell": "no code for 8.6, 9.0",
        "turing-ampere-ada": "only PTX through the JIT for 9.0, 12.0",
    }
    assert select(devices("9.0"), R580, CANDIDATES).smaller == ()


def make_candidate(archs: str, version: str, size: int | None = None) -> Candidate:
    targets = ArchSet.parse(archs).archs
    return Candidate(archs, make_build(archs, targets, "13.0"), size, Version(version))


def test_a_set_without_code_for_a_dtype_does_not_serve() -> None:
    # PTX of 7.5 has no bfloat16, and the other target is for another chip
    selection = select(devices("8.6"), None, [make_candidate("7.5+PTX;9.0a", "1.0")])
    assert selection.chosen is None
    assert describe_lack(selection.smaller[0], None) == "code for some dtypes only for 8.6"


def test_a_smaller_set_is_not_said_to_serve_as_well_what_it_gets_to_by_the_jit_alone() -> None:
    selection = select(devices("9.0,13.0"), R580, CANDIDATES)
    assert chosen_name("9.0,13.0") == "all"
    lacks = {one.candidate.name: describe_lack(one, selection.chosen) for one in selection.smaller}
    assert lacks["turing-ampere-ada"] == "only PTX through the JIT for 9.0"


def test_the_newest_version_that_serves_wins_and_previews_come_last() -> None:
    offered = [
        make_candidate("9.0a", "0.1+cu130.hopper", 1),
        make_candidate("9.0a", "0.3rc1+cu130.hopper", 1),
        make_candidate("8.0;9.0a", "0.2+cu130.all", 9),
        make_candidate("9.0a", "0.2+cu130.hopper", 2),
        make_candidate("8.0", "0.4+cu130.sm80", 1),
    ]
    chosen = select(devices("9.0"), None, offered).chosen
    assert chosen is not None
    assert str(chosen.candidate.version) == "0.2+cu130.hopper"


def test_without_all_sizes_the_number_of_targets_decides() -> None:
    offered = [
        make_candidate("8.0;9.0a", "1", 1),
        make_candidate("9.0a", "1"),
    ]
    chosen = select(devices("9.0"), None, offered).chosen
    assert chosen is not None
    assert chosen.candidate.name == "9.0a"
