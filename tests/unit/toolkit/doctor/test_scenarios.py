"""Doctor on machines from practice: status, ids and exit status of the whole examination."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.doctor.examine import RARE_CHECKS, Examination, examine
from tests.unit.made.scenarios import PLACE, SCENARIOS, load

if TYPE_CHECKING:
    from flash_dist.toolkit.doctor.record import Record
    from tests.unit.made.scenarios import Scenario

each_scenario = pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)


def look(record: Record) -> Examination:
    results = examine(record.environment, selftest=record, choice=record.choice)
    return Examination(record.environment, tuple(results), record.choice, record.origin)


def read_text(examination: Examination) -> str:
    return "\n".join(
        line
        for result in examination.results
        for line in (result.summary, *result.details, result.fix)
    )


@each_scenario
def test_doctor_finds_what_is_there_and_nothing_else(scenario: Scenario) -> None:
    examination = look(scenario.record)
    found = tuple((one.name, one.status, one.id) for one in examination.results if one.id)
    assert found == scenario.found
    assert {one.status for one in examination.results if not one.id} <= {"ok"}
    assert examination.exit_code() == scenario.exit_code


@each_scenario
def test_the_output_names_the_cause_and_the_step(scenario: Scenario) -> None:
    text = read_text(look(scenario.record))
    for words in scenario.says:
        assert words in text


@each_scenario
def test_its_sentences_read_well(scenario: Scenario) -> None:
    for result in look(scenario.record).results:
        assert result.status != "fail" or result.fix
        for line in (result.summary, *result.details, result.fix):
            assert not line.endswith((".", " ", ":", ","))
            assert "None" not in line
            assert line.count("`") % 2 == 0
            assert line.count("(") == line.count(")")
        assert "  " not in result.summary + result.fix
        assert 0 < len(result.summary) < 240


@each_scenario
def test_it_becomes_json(scenario: Scenario) -> None:
    data = json.loads(json.dumps(look(scenario.record).to_json()))
    assert data["exit_code"] == scenario.exit_code
    host = data["environment"]["host"]
    assert host is not None
    assert {"libcuda", "container", "jit_cache", "nvml", "device_files"} <= set(host)


def test_every_rare_check_speaks_on_some_machine() -> None:
    heard = {name for scenario in SCENARIOS.values() for name, _, _ in scenario.found}
    silent = [name for name, _ in RARE_CHECKS if name not in heard]
    assert not silent, "no machine of tests/unit/made/scenarios.py makes it speak: add one"


def test_every_recorded_machine_stands_in_the_table() -> None:
    told = [scenario.record for scenario in SCENARIOS.values()]
    assert not [path.stem for path in PLACE.iterdir() if load(path.stem) not in told]


def test_a_host_that_was_not_looked_at_is_no_finding() -> None:
    record = load("ptx-without-the-jit-compiler")
    examination = look(replace(record, environment=replace(record.environment, host=None)))
    assert {result.id for result in examination.results} <= {"", "selftest-not-run"}


def test_a_what_if_judges_the_variables_of_the_jit() -> None:
    record = load("ptx-without-the-jit-compiler")
    off = {"CUDA_CACHE_DISABLE": "1"}
    imagined = replace(record.environment, host=None, what_if=True, variables=off)
    examination = look(replace(record, environment=imagined))
    assert [one.id for one in examination.results if one.id] == ["jit-cache-disabled"]
