"""Doctor's answers for libraries on GPUs that are not here, compared with NVIDIA's documents.

rules.toml has the rules with their sources, rules.py applies them; neither knows this package. A
cell is a library on a GPU under a driver and environment variables.
"""

from __future__ import annotations

from itertools import combinations, pairwise, product
from typing import TYPE_CHECKING, Final

import pytest

from tests.unit.truth.cells import (
    DRIVERS,
    FOREIGN,
    GPUS,
    VARIABLES,
    ask,
    choose,
    make_foreign,
    read_sets,
    write_library,
)
from tests.unit.truth.rules import RULES, Case, Library, Number, judge

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tests.unit.truth.cells import Answer

LIBRARIES: Final = (*read_sets(), *FOREIGN)
OLDEST: Final = (7, 5)  # supported by flash_dist's kernels
each_library = pytest.mark.parametrize("one", LIBRARIES, ids=lambda one: str(one.name))


def disagree(
    path: Path, one: Library, driver: int, name: str, gpus: tuple[Number, ...] = GPUS
) -> list[str]:
    """Return the cells where doctor and the rules differ in whether code runs, how, or why not."""
    _, answers = ask(path, gpus, driver, VARIABLES[name])
    return compare(one, driver, name, gpus, answers)


def compare(
    one: Library, driver: int, name: str, gpus: tuple[Number, ...], answers: Iterable[Answer]
) -> list[str]:
    """Return the differences between doctor's answers and the rules."""
    variables = VARIABLES[name]
    found = []
    for gpu, answer in zip(gpus, answers, strict=True):
        outcome = judge(one, Case(gpu, driver, variables))
        reason_fits = answer.obstacle in (outcome.obstacles or {""})
        if answer.how != outcome.how or not reason_fits:
            obstacles = " or ".join(sorted(outcome.obstacles)) or "nothing in its way"
            found.append(
                f"{one.name} ({', '.join(map(str, one.images))}) on {gpu[0]}.{gpu[1]}, driver "
                f"{driver}, {name}: by the rules {outcome.how} ({obstacles}), doctor says "
                f"{answer.how} ({answer.said})"
            )
    return found


def pick_cells(one: Library) -> Iterable[tuple[int, str]]:
    """Return a third of the drivers for a library, each with other variables."""
    names = tuple(VARIABLES)
    first = LIBRARIES.index(one)
    drivers = DRIVERS[first % 3 :: 3]
    return ((driver, names[(first + place) % len(names)]) for place, driver in enumerate(drivers))


def test_there_are_some_thousand_cells_and_no_name_twice() -> None:
    assert len({one.name for one in LIBRARIES}) == len(LIBRARIES)
    picked = {(one.name, *cell) for one in LIBRARIES for cell in pick_cells(one)}
    assert len(picked) * len(GPUS) > 5000
    assert {name for _, _, name in picked} == set(VARIABLES)
    assert {driver for _, driver, _ in picked} == set(DRIVERS)


@each_library
def test_doctor_says_what_the_documents_say(one: Library, tmp_path: Path) -> None:
    path = write_library(tmp_path, one)
    found = [line for cell in pick_cells(one) for line in disagree(path, one, *cell)]
    assert not found, "\n".join(found)


@pytest.mark.slow
@each_library
def test_doctor_says_so_in_every_cell(one: Library, tmp_path: Path) -> None:
    path = write_library(tmp_path, one)
    cells = product(DRIVERS, VARIABLES)
    found = [line for cell in cells for line in disagree(path, one, *cell)]
    assert not found, "\n".join(found)


def test_a_gpu_has_the_same_verdict_beside_another_as_alone(tmp_path: Path) -> None:
    one = next(one for one in LIBRARIES if one.name == "all")
    path = write_library(tmp_path, one)
    assert not [line for gpu in GPUS for line in disagree(path, one, 580, "nothing-set", (gpu,))]
    for pair in pairwise(GPUS):
        assert not disagree(path, one, 580, "nothing-set", pair)


@pytest.mark.slow
@each_library
def test_pairs_have_the_results_of_their_gpus_and_the_worst_exit_status(
    one: Library, tmp_path: Path
) -> None:
    path = write_library(tmp_path, one)
    for pair in combinations(GPUS, 2):
        status, answers = ask(path, pair, 580, VARIABLES["nothing-set"])
        assert not compare(one, 580, "nothing-set", pair, answers)
        is_unserved = one.images and any(answer.how == "no" for answer in answers)
        assert status == (1 if is_unserved else 0), (pair, answers)


@pytest.mark.parametrize("driver", DRIVERS)
def test_select_names_a_set_where_the_documents_let_one_run(driver: int) -> None:
    able = [gpu for gpu in GPUS if gpu >= OLDEST]
    wrong = []
    for machine, gpus in product(("x86_64", "aarch64"), (*zip(able, strict=True), *pairwise(able))):
        serving = {
            one.name
            for one in read_sets()
            if one.machine == machine
            and all(judge(one, Case(gpu, driver)).how in {"native", "jit"} for gpu in gpus)
        }
        chosen = choose(gpus, driver, machine)
        if chosen not in serving and (serving or chosen):
            wrong.append(f"{machine}, {gpus}: {chosen} of {serving}")
    assert not wrong, "\n".join(wrong)


def test_a_wrong_rule_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = make_foreign("turing", "sm_75", "11.8")
    path = write_library(tmp_path, one)
    assert not disagree(path, one, 470, "nothing-set")
    monkeypatch.setitem(RULES["minor"]["first"], "11", 495)
    (line,) = disagree(path, one, 470, "nothing-set")
    assert line.startswith(
        "turing (sm_75) on 7.5, driver 470, nothing-set: by the rules no (minor)"
    )


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_every_rule_says_where_nvidia_writes_it(rule: dict[str, str]) -> None:
    assert rule["says"].endswith(".")
    places = [word for word in rule["source"].split() if word.startswith("https:")]
    assert places
    assert all(place.startswith("https://docs.nvidia.com/") for place in places)
