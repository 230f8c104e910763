"""Every error of a table is one sentence, before anything is compiled."""

from __future__ import annotations

import copy
import datetime as dt
import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from flash_dist.toolkit.errors import KernelsError
from flash_dist.toolkit.make import declaration
from flash_dist.toolkit.make.declaration import Plain, Project, read_declaration
from flash_dist.toolkit.make.declared.keys import KEYS, DeclarationError
from flash_dist.toolkit.make.project import load_project
from flash_dist.toolkit.targets.archs import Arch, ArchSet
from tests.unit.made.projects import (
    PYPROJECT,
    TABLE,
    make_project,
    put,
    refuse,
    require_sentence,
    write,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def test_a_table_without_an_error_is_read_whole(tmp_path: Path) -> None:
    data = make_project(tmp_path)
    found = read_declaration(data, tmp_path)
    csrc = tmp_path / "csrc"
    assert found == Project(
        root=tmp_path,
        name="my_norms",
        version="0.1.0",
        torch_min="2.10",
        torch_tested_max="2.15",
        source_date_epoch=1767225600,
        dependencies=("numpy>=1.26",),
        sets=found.sets,
        binding=(csrc / "binding.cpp",),
        include=(csrc,),
        plain=(Plain(csrc / "scale.cu", (Arch(9, 0, "a"),), ("--use_fast_math",)),),
        table=csrc / "kernels.toml",
        host=(csrc / "host" / "rms.cpp",),
        spills=({"symbol": "*_bwd_*", "spill_bytes": 64, "reason": "measured"},),
        licenses=("LICENSE",),
    )
    assert data == PYPROJECT  # the change was undone
    assert found.wheel_version("13.0", "hopper") == "0.1.0+cu130.hopper"


def test_a_card_of_the_hub_is_a_file_of_the_project(tmp_path: Path) -> None:
    data = make_project(tmp_path, **{"hub_card.md": "Use it."})
    put(data, "hub_card", "hub_card.md")
    assert read_declaration(data, tmp_path).hub_card == tmp_path / "hub_card.md"
    put(data, "hub_card", "card.md")
    assert refuse(data, tmp_path).startswith('`hub_card` of [tool.kernels] names `"card.md"`')


@pytest.mark.parametrize(
    "place",
    [
        "package", "namespace", "torch_tested_max", "toolkit", "oldest_gpu", "binding", "include",
        "operators", "index", "source_date_epoch", "dependencies", "dispatch", "gates",
        "gates.wheel_mb", "gates.spills", "selftest", "sets.hopper.who", "sets.hopper.budget_mb",
        "sources.0.targets", "sources.0.flags", "dispatch.host", "dispatch.main_role",
    ],
)  # fmt: skip
def test_keys_with_a_default_are_optional(place: str, tmp_path: Path) -> None:
    data = make_project(tmp_path, **{"csrc/kernels.toml": ""} if place == "dispatch" else {})
    put(data, place, ...)
    if place == "include":
        put(data, "dispatch", ...)  # these headers belong to dispatch
    if place in {"include", "dispatch"}:
        put(data, "sets", {"all": "9.0a"})  # targets of the plain files
    read_declaration(data, tmp_path)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("version", "[tool.kernels] lacks `version`, a version such as `0.1.0`"),
        ("torch_min", "[tool.kernels] lacks `torch_min`, a release such as `2.10`"),
        ("sets", "[tool.kernels] names no arch set"),
        ("sources.0.files", "[[tool.kernels.sources]] lacks `files`, a list of paths"),
        ("dispatch.table", "[tool.kernels.dispatch] lacks `table`, a path"),
        ("selftest.cases", "[tool.kernels.selftest] lacks `cases`, a function of the package"),
        ("sets.hopper.archs", "[tool.kernels.sets.hopper] lacks `archs`"),
        ("gates.spills.0.symbol", "a table of `spills` of [tool.kernels.gates] lacks `symbol`"),
        ("gates.spills.0.spill_bytes", "lacks `spill_bytes`, a number of bytes above 0"),
        ("gates.spills.0.reason", "lacks `reason`, a line of text"),
        ("dispatch.axes.0.rule", "lacks `rule`, equal, holds, fits or last"),
        ("dispatch.axes.0.name", "lacks `name`, a name such as `hidden`"),
        ("dispatch.axes.0.words", "with the rule `equal` lacks `words`"),
        ("dispatch.axes.0.words.fp16.floor", "lacks `floor`, a compute capability"),
        ("/project.name", "`name` of [project] must be a name such as `my-norms`, which it lacks"),
        ("/project.dynamic", "`dynamic` of [project] must have version and dependencies, got `[]`"),
        ("/project.requires-python", "of [project] must be `>=3.10`, which it lacks"),
        ("/project", "pyproject.toml has no table [project]"),
        ("/tool.kernels", "has no table [tool.kernels]"),
        ("/tool", "has no table [tool.kernels]"),
    ],
    ids=lambda text: text.partition("`")[0] if " " in text else text,
)
def test_missing_keys_are_named(place: str, said: str, tmp_path: Path) -> None:
    data = make_project(tmp_path)
    put(data, place, ...)
    assert said in refuse(data, tmp_path)


@pytest.mark.parametrize(
    ("place", "key", "near"),
    [
        ("", "verison", "version"),
        ("", "torch-min", "torch_min"),
        ("", "torch", "torch_min"),
        ("", "arch_sets", "sets"),
        ("", "gpus", "its keys are version, package"),
        ("", "oldest", "oldest_gpu"),
        ("", "source", "sources"),
        ("sources.0.", "flag", "flags"),
        ("sources.0.", "target", "targets"),
        ("sources.0.", "path", "its keys are files, targets, flags"),
        ("dispatch.", "tables", "table"),
        ("dispatch.", "axis", "axes"),
        ("gates.", "spill", "spills"),
        ("gates.", "wheel_bytes", "wheel_mb"),
        ("gates.spills.0.", "bytes", "spill_bytes"),
        ("selftest.", "case", "cases"),
        ("sets.hopper.", "arch", "archs"),
        ("sets.hopper.", "cuda", "its keys are archs, who"),
        ("dispatch.axes.0.", "role", "rule"),
        ("dispatch.axes.0.words.fp16.", "flor", "floor"),
        ("sources.0.", "", "its keys are"),
    ],
    ids=str,
)
def test_an_unknown_key_is_named_with_the_one_that_was_meant(
    place: str, key: str, near: str, tmp_path: Path
) -> None:
    data = make_project(tmp_path)
    put(data, f"{place}{key}" if key else f"{place}a key", "x")
    said = refuse(data, tmp_path)
    assert f'has an unknown key `"{key or "a key"}"`' in said
    assert said.partition("\n\n")[2].startswith(
        f"hint: {near}" if " " in near else f"hint: did you mean `{near}`?"
    )


# Values of every TOML type. Each key must reject those of other kinds.
ODD: dict[str, Any] = {
    "empty text": "",
    "a line break": "a\nb",
    "a control character": "a\x1bb",
    "a word": "banana",
    "a long text": "x" * 300,
    "zero": 0,
    "a number": 3,
    "a negative number": -1,
    "a number of 5000 digits": 10**5000,
    "a fraction": 1.5,
    "infinity": float("inf"),
    "no number": float("nan"),
    "true": True,
    "an empty list": [],
    "a list of an empty text": [""],
    "a list of lists": [["a"]],
    "a list of tables": [{"a": 1}],
    "an empty table": {},
    "a table": {"a": {"b": 1}},
    "a date": dt.date(2026, 1, 1),
}


def list_places(data: object, place: str = "") -> Iterator[str]:
    """Yield the place of each value, in every table and list."""
    items: Any = data.items() if isinstance(data, dict) else []
    items = enumerate(data) if isinstance(data, list) else items
    for key, value in items:
        yield f"{place}{key}"
        yield from list_places(value, f"{place}{key}.")


PLACES = [
    *list_places(PYPROJECT["tool"]["kernels"]),
    "/tool",
    "/tool.kernels",
    "/project",
    *(
        f"/project.{key}"
        for key in ("name", "requires-python", "dynamic", "scripts", "license-files")
    ),
]
# Combinations without an error: empty additions, and valid values.
FINE = {
    "namespace": {"a word"},
    "binding": {"an empty list"},
    "dependencies": {"an empty list"},
    "dependencies.0": {"a word", "a long text"},
    "sources.0.flags": {"an empty list"},
    "dispatch.host": {"an empty list"},
    "gates": {"an empty table"},
    "gates.wheel_mb": {"a number", "a fraction"},
    "gates.spills": {"an empty list"},
    "gates.spills.0.symbol": {"a word", "a long text"},
    "gates.spills.0.spill_bytes": {"a number"},
    "gates.spills.0.reason": {"a word", "a long text"},
    "sets.hopper.who": {"a word", "a long text"},
    "sets.hopper.budget_mb": {"a number", "a fraction"},
    "dispatch.axes.2.name": {"a word"},
    "/project.scripts": {"an empty table"},
    "/project.license-files": {"an empty list"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project that no test changes."""
    root = tmp_path_factory.mktemp("project")
    make_project(root)
    return root


@pytest.mark.parametrize("place", PLACES)
def test_a_value_of_another_type_is_refused_in_a_sentence(place: str, folder: Path) -> None:
    accepted = set()
    for name, value in ODD.items():
        data = copy.deepcopy(PYPROJECT)
        put(data, place, value)
        try:
            read_declaration(data, folder)
        except DeclarationError as error:
            require_sentence(error)
        else:
            accepted.add(name)
    assert accepted == FINE.get(place, set())


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("version", "v1.0", 'must be a version such as `0.1.0`, got `"v1.0"`'),
        ("version", "01.0", "must be a version such as `0.1.0`, got"),
        ("version", "1.0+cu130", "must be a version such as `0.1.0`, got"),
        ("version", "1!2.0", "must be a version such as `0.1.0`, got"),
        ("version", "1.0-rc1", "must be a version such as `0.1.0`, got"),
        ("version", 1.0, "must be a version such as `0.1.0`, got the number `1.0`"),
        ("torch_min", "2.10.1", "`torch_min` of [tool.kernels] must be a release such as `2.10`"),
        ("torch_min", ">=2.10", "must be a release such as `2.10`, got"),
        ("torch_min", 2.1, "must be a release such as `2.10`, got the number `2.1`"),
        ("torch_min", "2.9", "must be 2.10 or newer, got `2.9`"),
        ("torch_tested_max", "2.9", "must be `torch_min`, 2.10, or newer, got `2.9`"),
        ("toolkit", "13", 'must be a release of CUDA such as `13.0`, got `"13"`'),
        ("toolkit", "13.0.1", "must be a release of CUDA such as `13.0`, got"),
        ("toolkit", "cu130", "must be a release of CUDA such as `13.0`, got"),
        ("index", "example.org/wheels", "must be an address that starts with https://"),
        ("source_date_epoch", 0, "from 315532800 (1980) to 4354819199 (2107)"),
        ("source_date_epoch", 315532799, "which a zip file can hold, got `315532799`"),
        ("source_date_epoch", 4354819200, "which a zip file can hold, got `4354819200`"),
        ("source_date_epoch", "2026-01-01", 'got `"2026-01-01"`'),
        ("gates.wheel_mb", "10", 'must be a number of MB above 0, got `"10"`'),
        ("binding", "csrc/binding.cpp", 'must be a list of paths, got `"csrc/binding.cpp"`'),
        ("sources.0.files", "csrc/*.cu", 'must be a list of paths, got `"csrc/*.cu"`'),
        (
            "sources",
            {"files": ["csrc/*.cu"]},
            "`sources` of [tool.kernels] must be a list of table",
        ),
        ("sources.0.flags", ['-DNAME="x"'], 'without `;`, `"`, `$` and a backslash'),
        ("sources.0.flags", ["-DLIST=a;b"], "without `;`"),
        ("sources.0.flags", ["64"], 'must begin with a flag of nvcc, got `"64"`'),
        ("operators", "my_norms/ops.py", "must be a module of the package such as `ops`"),
        ("operators", "ops:load", "must be a module of the package such as `ops`"),
        ("operators", "..ops", "must be a module of the package such as `ops`"),
        ("selftest.cases", "selftest", "must be a function of the package such as"),
        ("selftest.cases", "a..b:c", "must be a function of the package such as"),
        ("dependencies", ["torch>=2.10"], "and wheels require torch by `torch_min`"),
        ("dependencies", ["Torch"], "and wheels require torch by `torch_min`"),
        ("dependencies", ["numpy >>1"], 'must be requirements, got `"numpy >>1"`'),
        ("dependencies", [">=1"], 'must be requirements, got `">=1"`: it names no package'),
        ("/project.version", "0.1.0", '`version` of [project] must be dynamic, got `"0.1.0"`'),
        ("/project.dependencies", [], "`dependencies` of [project] must be dynamic, got `[]`"),
        ("/project.dynamic", ["version"], 'must have version and dependencies, got `["version"]`'),
        ("/project.requires-python", ">=3.9", 'must be `>=3.10`, got `">=3.9"`'),
        ("/project.requires-python", 3.11, "must be `>=3.10`, got `3.11`"),
        ("/project.optional-dependencies", {"x": ["numpy"]}, "must be left out, got `{"),
        ("/project.entry-points", 3, "must be tables of plug-ins, got `3`"),
        ("/project.entry-points", {"console_scripts": {}}, "must be tables of plug-ins, got `{"),
        ("/project.entry-points", {"x.y": {"a": 1}}, "`entry-points.x.y` of [project] must be a"),
        ("/project.gui-scripts", {"a": "my_norms:a"}, "must be left out, got `{"),
        ("/project.scripts", {"run": 3}, "must be a table of functions"),
        ("/project.license-files", ["/etc/passwd"], 'cannot name `"/etc/passwd"`'),
    ],
    ids=lambda given: str(given)[:24],
)
def test_errors_name_received_and_allowed_values(
    place: str, value: object, said: str, tmp_path: Path
) -> None:
    data = make_project(tmp_path)
    put(data, place, value)
    assert said in refuse(data, tmp_path)


@pytest.mark.parametrize("version", ["0.1.0", "1", "2026.10.1", "1.0a1", "1.0rc2.post1.dev3"])
def test_a_version_is_that_of_a_release(version: str, tmp_path: Path) -> None:
    data = make_project(tmp_path)
    put(data, "version", version)
    assert read_declaration(data, tmp_path).version == version


@pytest.mark.parametrize(
    "flag",
    [
        "-arch=sm_90", "-arch", "--gpu-architecture=sm_90", "-gencode", "-gencode=arch=compute_90",
        "--generate-code=arch=compute_90", "-code=sm_90", "-o", "-c", "-rdc=true", "-dc", "-dlto",
        "--relocatable-device-code=true",
    ],
)  # fmt: skip
def test_a_flag_that_the_build_decides_is_refused(flag: str, tmp_path: Path) -> None:
    data = make_project(tmp_path)
    put(data, "sources.0.flags", ["--use_fast_math", flag])
    assert f'cannot have `"{flag}"`, which the build decides' in refuse(data, tmp_path)


@pytest.mark.parametrize(
    "flags",
    [["-maxrregcount", "64"], ["-Xptxas", "-O2", "-Xptxas", "-v"], ["-DNAME=a b"], ["-ftz=true"]],
    ids=" ".join,
)
def test_other_flags_are_taken_as_they_are(flags: list[str], tmp_path: Path) -> None:
    data = make_project(tmp_path)
    put(data, "sources.0.flags", flags)
    assert read_declaration(data, tmp_path).plain[0].flags == tuple(flags)


def test_nothing_to_compile_is_refused(tmp_path: Path) -> None:
    data = make_project(tmp_path)
    put(data, "sources", ...)
    put(data, "dispatch", ...)
    assert "[tool.kernels] names nothing to compile" in refuse(data, tmp_path)


def test_a_file_is_in_one_table_of_sources(tmp_path: Path) -> None:
    data = make_project(tmp_path)
    put(data, "sources.1", {"files": ["csrc/scale.cu"]})
    assert "`csrc/scale.cu` is in two tables [[tool.kernels.sources]]" in refuse(data, tmp_path)


def test_a_file_is_of_the_binding_or_of_the_host_code(tmp_path: Path) -> None:
    data = make_project(tmp_path)
    put(data, "binding", ["csrc/**/*.cpp"])
    assert "`csrc/host/rms.cpp` is in `binding` and in `host`" in refuse(data, tmp_path)


def test_two_files_of_one_stem_are_refused(tmp_path: Path) -> None:
    data = make_project(tmp_path, **{"csrc/more/scale.cu": ""})
    put(data, "sources.0.files", ["csrc/**/*.cu"])
    assert (
        "2 files of CUDA have the name `scale`: `csrc/more/scale.cu` and `csrc/scale.cu`"
    ) in refuse(data, tmp_path)


def test_a_file_with_the_name_of_another_for_some_targets_is_refused(tmp_path: Path) -> None:
    data = make_project(tmp_path, **{"csrc/more/scale_sm90.cu": ""})
    put(data, "sources.1", {"files": ["csrc/more/*.cu"]})
    said = refuse(data, tmp_path)
    assert "have the name `scale_sm90`: `csrc/scale.cu` and `csrc/more/scale_sm90.cu`" in said


def test_a_set_may_have_no_target_below_the_oldest_gpu(tmp_path: Path) -> None:
    data = make_project(tmp_path)
    put(data, "oldest_gpu", "9.0")
    assert refuse(data, tmp_path) == (
        "arch set `all` has `sm_80`, and `oldest_gpu` of [tool.kernels] is 9.0\n\n"
        "hint: leave the target out, or lower `oldest_gpu`"
    )
    put(data, "oldest_gpu", "8.0")
    read_declaration(data, tmp_path)
    put(data, "oldest_gpu", "sm_80")
    assert "`oldest_gpu` of [tool.kernels] must be a compute capability such as `8.0`, got" in (
        refuse(data, tmp_path)
    )


def test_the_targets_of_one_chip_are_those_that_files_and_families_name(tmp_path: Path) -> None:
    family = TABLE.replace('name = "rms"', 'name = "rms"\ntargets = ["10.0f", "8.0"]')
    data = make_project(tmp_path, **{"csrc/kernels.toml": family})
    put(data, "sources.0.targets", ["9.0a", "8.0"])
    found = read_declaration(data, tmp_path)
    assert found.own_targets == (Arch(9, 0, "a"), Arch(10, 0, "f"))
    put(data, "sources.0.targets", ...)
    put(data, "dispatch", ...)
    assert read_declaration(data, tmp_path).own_targets == ()


def test_a_file_with_the_name_of_a_role_is_refused(tmp_path: Path) -> None:
    data = make_project(tmp_path, **{"csrc/rms.cu": ""})
    assert "`csrc/rms.cu` has the name of a role of the table" in refuse(data, tmp_path)


def test_two_files_with_a_kernel_of_one_c_name_are_refused(tmp_path: Path) -> None:
    text = 'extern "C" __global__ void scale_rows(float* x) {}\n'
    data = make_project(tmp_path, **{"csrc/scale.cu": text, "csrc/more.cu": text})
    said = refuse(data, tmp_path)
    assert "two files define the kernel `scale_rows`: `csrc/more.cu` and `csrc/scale.cu`" in said


def test_a_set_without_a_target_of_a_file_is_refused(tmp_path: Path) -> None:
    data = make_project(tmp_path)
    put(data, "sets.ampere", "8.0")
    said = refuse(data, tmp_path)
    assert "`csrc/scale.cu` is for sm_90a, and arch set `ampere` is `8.0`" in said


def test_a_list_of_the_environment_is_held_against_files_as_a_set_is(tmp_path: Path) -> None:
    found = read_declaration(make_project(tmp_path), tmp_path)
    found.require_targets(ArchSet.parse("8.0;9.0a"))
    with pytest.raises(DeclarationError, match=r"is for sm_90a, and arch set `custom` is `9\.0`"):
        found.require_targets(ArchSet.parse("9.0"))


def test_a_set_for_gpus_that_no_word_has_kernels_for_is_refused(tmp_path: Path) -> None:
    data = make_project(tmp_path)
    put(data, "oldest_gpu", ...)
    put(data, "sets.volta", {"archs": "7.0;9.0a", "toolkit": "12.8"})
    assert "`volta` has `sm_70`, and the axes have words from 7.5 on" in refuse(data, tmp_path)


def test_a_file_of_products_is_for_a_package_with_the_toolkit_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_project(tmp_path, **{"my_norms/product.json": json.dumps({"axes": []})})
    put(data, "product", "my_norms/product.json")
    monkeypatch.setattr(declaration, "IMPORTED_AS", "")
    said = refuse(data, tmp_path)
    assert 'names a file `product`, `"my_norms/product.json"`, which is for a package' in said


@pytest.mark.parametrize(
    ("suffix", "text", "said"),
    [
        ("toml", "[[exception]]\nsymbol = 3", "`symbol` of an [[exception]] of `spills.toml` must"),
        ("toml", "[[exception]]\nsymbol = 'a'", "of `spills.toml` lacks `spill_bytes`"),
        ("toml", "[[exceptions]]", 'has an unknown key `"exceptions"`'),
        ("toml", "exception = 3", "`exception` of `spills.toml` must be a list of tables, got `3`"),
        ("toml", "]", "cannot read `spills.toml`: "),
        ("json", "[]", "`spills.json` must be an object of JSON, got `[]`"),
        ("json", "{", "cannot read `spills.json`: "),
        ("json", '{"exception": [3]}', "must be a list of tables, got `3` in it"),
    ],
)
def test_a_file_of_spills_is_judged(suffix: str, text: str, said: str, tmp_path: Path) -> None:
    data = make_project(tmp_path, **{f"spills.{suffix}": text})
    put(data, "gates.spills", f"spills.{suffix}")
    assert said in refuse(data, tmp_path)


@pytest.mark.parametrize("told", ["banana", "-1", "0", "315532799", "1e9", "9" * 30, "१२३४५६७८९"])
def test_a_time_of_the_environment_that_no_zip_holds_is_refused(
    told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = read_declaration(make_project(tmp_path), tmp_path)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", told)
    with pytest.raises(DeclarationError, match="SOURCE_DATE_EPOCH must be a number") as caught:
        _ = found.epoch
    require_sentence(caught.value)


def test_the_time_of_the_environment_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = read_declaration(make_project(tmp_path), tmp_path)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1800000000")
    assert found.epoch == "1800000000"
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "")
    assert found.epoch == "1767225600"


def test_this_package_is_declared_without_an_error() -> None:
    assert load_project().name == "flash_dist"


def test_every_key_is_described() -> None:
    text = str(declaration.__doc__)
    kinds = ("kernels", "sources", "dispatch", "set", "gates", "selftest")
    assert {key for kind in kinds for key in KEYS[kind] if key not in text} == set()


@pytest.mark.parametrize(("kind", "key"), [(kind, key) for kind in KEYS for key in KEYS[kind]])
def test_an_example_is_accepted(kind: str, key: str) -> None:
    declared = KEYS[kind][key]
    if declared.example.startswith("[["):
        return
    value = tomllib.loads(f"key = {declared.example}")["key"]
    assert declared.find_fault(value) == ""


def test_an_error_of_the_table_is_one_of_the_toolkit() -> None:
    assert issubclass(DeclarationError, KernelsError)
    assert issubclass(DeclarationError, ValueError)  # backend.py catches ValueError


def test_a_table_of_another_folder_names_it(tmp_path: Path) -> None:
    write(tmp_path / "pyproject.toml")
    assert f"`{tmp_path / 'pyproject.toml'}` has no table" in refuse({}, tmp_path)
