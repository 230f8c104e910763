"""Records of machines: reading returns exactly the written data."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_dist.toolkit.checks.environment import CheckChoice
from flash_dist.toolkit.doctor import plain
from flash_dist.toolkit.doctor.examine import examine
from flash_dist.toolkit.doctor.record import LARGEST, LINE, MOST_GPUS, Record
from flash_dist.toolkit.errors import UsageError
from flash_dist.toolkit.gpucode.images import FatbinReport
from flash_dist.toolkit.machine.torch_install import TorchCode
from flash_dist.toolkit.redaction import Redaction
from flash_dist.toolkit.targets.axes import NOWHERE
from flash_dist.toolkit.targets.fallbacks import Fallbacks
from flash_dist.toolkit.targets.verdict import Build, Variant
from tests.unit.made.builds import ALL
from tests.unit.made.scenarios import AMPERE, PLACE, SCENARIOS, make_machine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.made.scenarios import Scenario

SCHEMA = json.loads(Path(__file__).parents[4].joinpath("docs", "schema", "record.json").read_text())
NOTHING = Redaction()
TEXT = PLACE.joinpath("a-hidden-gpu.json").read_text()

each_scenario = pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)


def save(environment: Any, **more: Any) -> Record:  # noqa: ANN401 - fields of a record
    return Record("0.1.0", "2026-11-22 12:00 UTC", environment, **more)


def judge(record: Record) -> list[dict[str, Any]]:
    results = examine(record.environment, selftest=record, choice=record.choice)
    return [result.to_json() for result in results]


def read(text: str | bytes) -> Record:
    return Record.from_text(text, source="record.json")


def change(**changes: Any) -> str:  # noqa: ANN401 - any JSON
    return json.dumps({**json.loads(TEXT), **changes})


@each_scenario
def test_a_record_is_judged_as_the_machine_is(scenario: Scenario) -> None:
    text = scenario.record.to_text(NOTHING)
    assert judge(read(text)) == judge(scenario.record)
    assert read(text).to_text(NOTHING) == text


@each_scenario
def test_a_record_is_as_its_schema_says_and_can_be_read_by_people(scenario: Scenario) -> None:
    text = scenario.record.to_text(NOTHING)
    jsonschema.validate(json.loads(text), SCHEMA, cls=jsonschema.Draft202012Validator)
    assert max(map(len, text.splitlines())) <= 2 * LINE  # sentences are not shortened
    assert len(text.splitlines()) < 200


ASKS = (
    "builtins.open",
    "io.open",
    "os.stat",
    "os.listdir",
    "os.scandir",
    "os.access",
    "subprocess.Popen",
    "ctypes.CDLL",
    "platform.machine",
    "platform.python_version",
)


def test_judging_asks_nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [judge(scenario.record) for scenario in SCENARIOS.values()]

    def refuse(*_: object, **__: object) -> None:
        message = "a check asks the machine that it runs on"
        raise RuntimeError(message)

    with monkeypatch.context() as patched:
        for name in ASKS:
            patched.setattr(name, refuse)
        patched.setattr(os, "environ", {"CUDA_FORCE_PTX_JIT": "1", "CUDA_VISIBLE_DEVICES": "9"})
        after = [judge(scenario.record) for scenario in SCENARIOS.values()]
    assert after == before


def parts(kind: Any, seen: dict[str, type]) -> None:  # noqa: ANN401 - a type
    kind = plain._FOLDED.get(kind, kind)
    if not (isinstance(kind, type) and is_dataclass(kind)) or kind in plain._WORDS:
        for one in get_args(kind):
            parts(one, seen)
        return
    name = re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__.removeprefix("Folded")).lower()
    if name not in seen:
        seen[name] = kind
        for _, hint in plain._fields(kind):
            parts(hint, seen)


def test_the_schema_describes_every_field_of_everything_in_a_record() -> None:
    seen: dict[str, type] = {}
    parts(Record, seen)
    assert set(SCHEMA["$defs"]) == {*seen, "id", "target", "version"}
    for name, kind in seen.items():
        described = set(SCHEMA["$defs"][name]["properties"]) - {"version", "command"} | (
            {"version"} if name in {"torch", "torch_copy"} else set()
        )
        fields = {field.name for field, _ in plain._fields(kind)}
        if kind is Record:
            fields = fields - {"written_by"} | {"flash_dist"}
        assert described == fields, f"docs/schema/record.json describes others in `{name}`"


def test_code_of_a_build_and_of_torch_comes_back_as_it_is_judged() -> None:
    build = make_machine(ALL, AMPERE).installed.build
    assert build is not None
    odd = replace(build.variants[0], symbol="flash_dist_fwd_fp16_d64_odd")
    facts = Fallbacks({"bwd_fused": ("bwd_dkdv",)}, frozenset({"fwd_sm90"}))
    build = replace(build, variants=(*build.variants, odd), told_fallbacks=facts)
    again = plain.read(Build, plain.write(Build, build, str), "build")
    assert set(again.variants) == set(build.variants)
    assert replace(again, variants=build.variants) == build
    for scenario in SCENARIOS.values():
        code = scenario.environment.torch_code or TorchCode()
        for report in code.reports:
            data = plain.write(FatbinReport, report, str)
            assert plain.read(FatbinReport, data, "report") == report


def test_a_kernel_that_no_table_lists_comes_back() -> None:
    build = make_machine(ALL, AMPERE).installed.build
    assert build is not None
    scale = Variant.of("scale_kernel", "scale", NOWHERE, build.archs[0])
    data = plain.write(Build, replace(build, variants=(*build.variants, scale)), str)
    assert data["others"] == [
        {"symbol": "scale_kernel", "family": "scale", "arch": str(build.archs[0])}
    ]
    assert scale in plain.read(Build, data, "build").variants
    data["others"][0]["dtype"] = "fp16"
    with pytest.raises(plain.UnfitError, match="must have a value of the axis `head_dim`"):
        plain.read(Build, data, "build")


def test_a_record_tells_neither_names_nor_secrets() -> None:
    machine = make_machine(ALL, AMPERE)
    assert machine.host is not None
    said = (
        "see https://me:hunter2@example.org/x?token=abc123 of jdoe on box17, HF_TOKEN=abcdefgh1234"
    )
    machine = replace(
        machine,
        variables={"CUDA_CACHE_PATH": "/srv/jdoe/cache"},
        torch=replace(machine.torch, reason=said),
        files=replace(machine.files, folder="/home/jdoe/venv"),
    )
    text = save(machine).to_text(Redaction(("/home/jdoe",), ("jdoe",), ("box17",)))
    for word in ("jdoe", "box17", "hunter2", "abc123", "abcdefgh1234"):
        assert word not in text
    assert '"folder": "~/venv"' in text


def test_a_user_with_the_name_of_a_status_leaves_the_status_alone() -> None:
    machine = make_machine(ALL, AMPERE)
    names = ("ok", "recorded", "native", "writable", "sass", "tried")
    record = read(save(machine).to_text(Redaction(users=names, hosts=("zstd",))))
    assert record.environment.files.status == "recorded"
    assert [one["status"] for one in judge(record)] == [
        one["status"] for one in judge(save(machine))
    ]


def test_control_characters_are_written_as_visible_text() -> None:
    machine = replace(make_machine(ALL, AMPERE), system="De\x1b[2Jbian\udcff\n")
    text = save(machine).to_text(NOTHING)
    assert read(text).environment.system == "De\\x1b[2Jbian\\udcff\n"


IMAGE = {"kind": "sass"}
GOOD = {"status": "ok", "summary": "x"}
DEEP = "[" * 100_000 + "]" * 100_000
REFUSED: dict[str, tuple[str | bytes, str]] = {
    "nothing": ("", "Expecting value"),
    "another file": ('{"a": 1}', '"command": "doctor --save"'),
    "a list": ("[]", "an object"),
    "not UTF-8": (b"\xff\xfe{", "codec can't decode"),
    "cut short": (TEXT[: len(TEXT) // 2], "line"),
    "a later version": (change(version=2, flash_dist="9.0.0"), "2, written by flash_dist 9.0.0"),
    "no version": (change(version=None), "`version` must be 1"),
    "a version of words": (change(version="1"), "`version` must be 1"),
    "a key of a later version": (change(colour="red"), "`colour` is not known"),
    "no environment": (change(environment={}), "`environment.system` is missing"),
    "a wrong type": (TEXT.replace('"x86_64"', "64", 1), "`environment.machine` must be a text"),
    "a boolean for a number": (
        TEXT.replace('"sm_count": 82', '"sm_count": true', 1),
        "`environment.cuda.gpus[0].sm_count` must be a whole number",
    ),
    "a negative number": (TEXT.replace('"sm_count": 82', '"sm_count": -1', 1), "from 0 on"),
    "a huge number": (TEXT.replace('"sm_count": 82', f'"sm_count": {"9" * 30}', 1), "huge"),
    "a number of 5000 digits": (TEXT.replace('"index": 0', f'"index": {"9" * 5000}'), "4300"),
    "no word of a list": (TEXT.replace('"status": "ok"', '"status": "fine"', 1), "ok or absent"),
    "an id that is none": (change(selftest=[{**GOOD, "entry": "y"}]), "the id"),
    "a target that is none": (TEXT.replace('"sm_75"', '"sm_"', 1), "a target such as `sm_90a`"),
    "a kernel that is none": (TEXT.replace("fwd_fp16_d64_smem64", "fwd", 1), "must hold names"),
    "a toolkit that is none": (TEXT.replace('"toolkit": "13.0"', '"toolkit": "x"', 1), "a version"),
    "a time that is none": (change(recorded="now\u202e"), "`recorded`"),
    "a control character": (TEXT.replace("Debian", "De\\u001b[2Jbian", 1), "control characters"),
    "a raw control character": (TEXT.replace("Debian", "De\x1b[2Jbian", 1), "control character"),
    "half a character": (TEXT.replace("Debian", "\\ud800", 1), "control characters"),
    "NaN": (TEXT.replace('"sm_count": 82', '"sm_count": NaN', 1), "`NaN`"),
    "more than any number": (
        change(selftest=[{**GOOD, "data": {"seconds": "INF"}}]).replace(
            '"INF"', "1e999"
        ),
        "a finite number",
    ),
    "a key twice": (
        TEXT.replace('"version": 1', '"version": 1, "version": 1', 1),
        "duplicate key `version`",
    ),
    "deep": (DEEP, "deep"),
    "deep inside": (
        change(selftest=[{**GOOD, "data": {"a": "DEEP"}}]).replace(
            '"DEEP"', "[" * 500 + "]" * 500
        ),
        "deep",
    ),
    "large": (TEXT + " " * LARGEST, f"at most {LARGEST} bytes"),
    "many GPUs": (
        json.dumps({
            **json.loads(TEXT),
            "environment": {
                **json.loads(TEXT)["environment"],
                "cuda": {
                    "status": "ok",
                    "gpus": [{"index": n, "name": "x", "device": "9.0"} for n in range(65)],
                },
            },
        }),
        f"at most {MOST_GPUS}",
    ),
    "many kernels": (
        re.sub(r'"sm_75"', ", ".join(['"sm_75"'] * 5000), TEXT, count=1),
        "at most 10000 variants",
    ),
    "many images": (
        json.dumps({
            **json.loads(TEXT),
            "environment": {
                **json.loads(TEXT)["environment"],
                "torch_code": {
                    "reports": [
                        {"path": "x", "containers": [{"count": 10**15, "images": [IMAGE]}]}
                    ]
                },
            },
        }),
        "at most 200000 images",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "says"), REFUSED.values(), ids=REFUSED)
def test_a_file_that_is_no_record_is_refused_in_one_sentence(text: str | bytes, says: str) -> None:
    began = time.process_time()
    with pytest.raises(UsageError) as caught:
        read(text)
    assert says in caught.value.message
    assert caught.value.message.startswith("`record.json` is not a valid record")
    assert len(caught.value.message) < 400
    assert caught.value.hint
    assert time.process_time() - began < 5


def test_a_record_of_another_version_names_what_reads_it() -> None:
    with pytest.raises(UsageError) as caught:
        read(change(colour="red", flash_dist="9.0.0"))
    assert caught.value.hint == "flash_dist 9.0.0 wrote it and can read it"


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    LEAVES, lambda one: st.lists(one) | st.dictionaries(st.text(), one), max_leaves=4
)


def walk(data: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401 - any JSON
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in items:
        yield data, key
        if isinstance(value, (dict, list)):
            yield from walk(value)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(SCENARIOS)), st.integers(min_value=0), VALUES)
def test_a_record_with_anything_in_any_place_is_judged_or_refused(
    name: str,
    place: int,
    value: Any,  # noqa: ANN401 - any JSON
) -> None:
    data = json.loads(SCENARIOS[name].record.to_text(NOTHING))
    places = list(walk(data))
    within, key = places[place % len(places)]
    within[key] = value
    try:
        record = read(json.dumps(data))
    except UsageError:
        return
    assert "check-crashed" not in {one["id"] for one in judge(record)}


def test_a_check_that_nobody_looked_at_is_refused_by_name() -> None:
    record = replace(read(TEXT), choice=CheckChoice(skip=frozenset({"install", "selftest"})))
    assert record.narrow(CheckChoice()) == record.choice
    assert record.narrow(CheckChoice(only=frozenset({"gpu"}))).only == {"gpu"}
    with pytest.raises(UsageError, match=r"--only must name checks .*system, torch, build"):
        record.narrow(CheckChoice(only=frozenset({"install"})))


def test_a_gpu_whose_selftest_did_not_run_there_does_not_run_here() -> None:
    record = replace(read(TEXT), selftest=())
    proof = next(one for one in judge(record) if one["name"] == "selftest 0")
    assert (proof["status"], proof["id"]) == ("skip", "selftest-not-run")
    assert proof["summary"] == "not run: the record holds no selftest of this GPU"


def test_the_largest_record_is_judged_in_seconds() -> None:
    data = json.loads(TEXT)
    cuda = data["environment"]["cuda"]
    cuda["gpus"] = [{**cuda["gpus"][0], "index": n} for n in range(MOST_GPUS)]
    began = time.process_time()
    assert len(judge(read(json.dumps(data)))) > MOST_GPUS
    assert time.process_time() - began < 10
