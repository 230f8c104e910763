"""Axes and tables that kernels can be generated from."""

from __future__ import annotations

import copy
import sys
from typing import TYPE_CHECKING, Any

import pytest

from flash_dist.toolkit.make import declaration
from flash_dist.toolkit.make.declaration import read_declaration
from flash_dist.toolkit.make.declared.dispatch import read_axes, read_table, require_main_role
from flash_dist.toolkit.make.declared.keys import KEYS, DeclarationError
from flash_dist.toolkit.make.kernels.table import Family
from flash_dist.toolkit.targets.axes import AXES as OWN_AXES
from flash_dist.toolkit.targets.axes import Axes
from tests.unit.made.projects import AXES, TABLE, make_project, put, refuse, require_sentence, write

if TYPE_CHECKING:
    from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DTYPE, HIDDEN, PLAN = AXES
FP16 = {"fp16": {"floor": "7.5"}}


def test_axes_are_read_in_order() -> None:
    assert read_axes(AXES) == Axes.from_json(AXES)
    assert read_axes([]) == Axes(())


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ([DTYPE, DTYPE], "axes must have different names"),
        ([PLAN, {**PLAN, "name": "more"}], "one may be `fits`"),
        ([{**HIDDEN, "rule": "Holds"}], 'must be equal, holds, fits or last, got `"Holds"`'),
        ([{**HIDDEN, "name": "Hidden"}], 'must be a name such as `hidden`, got `"Hidden"`'),
        ([{**HIDDEN, "name": "role"}], "is named `role`, which records of kernels have"),
        ([{**HIDDEN, "name": "target"}], "is named `target`, which records of kernels have"),
        ([{**HIDDEN, "name": "header"}], "is named `header`, which records of kernels have"),
        ([{**HIDDEN, "symbol": "d"}], 'must be a spelling such as `d{}`, got `"d"`'),
        ([{**HIDDEN, "symbol": "{}{}"}], "must be a spelling such as `d{}`"),
        ([{**HIDDEN, "words": FP16}], "with the rule `holds` cannot have `words`"),
        ([{**DTYPE, "words": {}}], "with the rule `equal` lacks `words`"),
        ([{**DTYPE, "words": {"half": {"floor": "7.5"}}}], "a word of an axis looks like `bf16`"),
        ([{**DTYPE, "words": {"fp16": "7.5"}}], 'word `"fp16"` of axis `dtype` of'),
        ([{**DTYPE, "words": {"fp16": {"floor": 7.5}}}], "a compute capability such as `8.0`, got"),
        (
            [{**DTYPE, "words": {"fp16": {"floor": "7.5", "part_of": "fp32"}}}],
            'of `axes` of [tool.kernels.dispatch] must be another word, got `"fp32"`',
        ),
        ([DTYPE, {**DTYPE, "name": "kind"}], "has the word `fp16` 2 times"),
        ([{**HIDDEN, "default": "rows"}], "the default of axis `hidden` must be an axis `holds`"),
        ([{**DTYPE, "default": "hidden"}], "must be an axis `holds` before it"),
        (
            [{"name": "height", "rule": "holds"}, {"name": "width", "rule": "holds"}],
            "spells `width` after `height` as `{}`",
        ),
        ([{"name": f"n{i}", "rule": "holds", "symbol": "a{}"} for i in range(9)], "at most 8 axes"),
        (["hidden"], "a table of `axes` of [tool.kernels.dispatch] must be a table, got"),
    ],
    ids=lambda given: given[:40] if isinstance(given, str) else None,
)
def test_axes_that_cannot_be_told_apart_are_refused(axes: list[object], said: str) -> None:
    with pytest.raises(DeclarationError) as caught:
        read_axes(axes)
    require_sentence(caught.value)
    assert said in str(caught.value)


def judge(root: Path, text: str) -> tuple[str, ...]:
    path = write(root / "csrc/kernels.toml", text)
    write(root / "csrc/rms.cuh")
    return read_table(path, read_axes(AXES), root, (root / "csrc",))


def test_a_table_has_the_roles_of_its_families(tmp_path: Path) -> None:
    assert judge(tmp_path, TABLE) == ("rms",)


def change(old: str, new: str) -> str:
    assert old in TABLE, old
    return TABLE.replace(old, new)


SECOND = TABLE.partition("[[family]]")[2].replace("rows = [", "targets = ['9.0a']\nrows = [")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "`csrc/kernels.toml` lacks `smem_plans`"),
        ("[smem_plans]\n0 = 1", "`csrc/kernels.toml` lacks `family`"),
        ("family = 3", "must be a list of tables, got `3`"),
        ("family = []\n[smem_plans]\n0 = 1", "must be a list of tables, got `[]`"),
        ("]", "cannot read `csrc/kernels.toml`: "),
        (change("smem_plans", "smem_plan"), 'unknown key `"smem_plan"`'),
        (change("0 = 49152", "0 = '48K'"), 'must be bytes by KB, got `0 = "48K"`'),
        (change("0 = 49152", "0 = 0"), "must be bytes by KB, got `0 = 0`"),
        (change("0 = 49152", "0 = true"), "must be bytes by KB, got `0 = true`"),
        (change("0 = 49152", "none = 1"), "must be bytes by KB, got `none = 1`"),
        (change("0 = 49152\n", ""), "has the plan 0, and `smem_plans` has 99"),
        (change("plan = 99", "plan = 163"), "has the plan 163, and `smem_plans` has 0, 99"),
        (change("[defaults]", "[default]"), "did you mean `defaults`?"),
        (change('dtype = ["fp16", "bf16"]', 'dtype = ["fp8"]'), "must be among fp16, bf16, got"),
        (change('dtype = ["fp16", "bf16"]', 'dtype = "fp16"'), "must be a list of words, got"),
        (change('dtype = ["fp16", "bf16"]', "dtype = []"), "must be a list of words, got `[]`"),
        (change('dtype = ["fp16", "bf16"]', "dtype = [3]"), "must be among fp16, bf16, got `3`"),
        (change('dtype = ["fp16", "bf16"]', 'dtype = ["fp16", "fp16"]'), "with one twice"),
        (change('dtype = ["fp16", "bf16"]', ""), "must be a list of words, which it lacks"),
        (change('dtype = ["fp16", "bf16"]', "dtypes = []"), "did you mean `dtype`?"),
        (change('name = "rms"', 'name = "Rms"'), "must be a name such as `rms`, got"),
        (change('name = "rms"', ""), "a [[family]] of `csrc/kernels.toml` lacks `name`"),
        (change('kernel = "rms_block"', ""), "family `rms` of `csrc/kernels.toml` lacks `kernel`"),
        (change('kernel = "rms_block"', 'kernel = "a b"'), "must be a name of C++ such as"),
        (change('kernel = "rms_block"', "kernel = 3"), "must be a name of C++ such as"),
        (change('header = "rms.cuh"', 'header = "no.cuh"'), "which is in none of `csrc`"),
        (change('kernel = "rms_block"', 'kernel = "a"\nrefuse = "b"'), "mean `refuses`?"),
        (
            change('kernel = "rms_block"', 'kernel = "a"\ntargets = ["9"]'),
            "must be targets such as",
        ),
        (change('kernel = "rms_block"', 'kernel = "a"\nleaves_half_filled = 1'), "true or false"),
        (change("hidden = 1024, plan = 99", "hidden = 256, plan = 0"), "two rows for fp16 256 0"),
        (change("hidden = 1024", "hidden = '1024'"), "`hidden` of row 2 of family `rms` of"),
        (change("hidden = 1024", "hidden = 0"), "must be a number above 0, got `0`"),
        (change("hidden = 1024", "hidden = -1"), "must be a whole number from 0 to 999999, got"),
        (change("hidden = 1024", "hidden = 1000000"), "must be a whole number from 0 to 999999"),
        (change("hidden = 1024", "hiden = 1024"), "`hidden` of row 2 of family `rms` of"),
        (change("warps = 8", "warps = 1.5"), "`warps` of row 2 of family `rms` of"),
        (change("warps = 8", "warps = true"), "must be a whole number from"),
        (change("warps = 8", "warps = 4294967296"), "must be a whole number from"),
        (change("warps = 8", '"a b" = 8'), 'has a constant `"a b"`, which is no name of C++'),
        (change("rows = [", "rows = [3, "), "must be a list of tables, got `3` in it"),
        (f"own_headers = 'no.py'\n{TABLE}", "`own_headers` of `csrc/kernels.toml` names"),
        (f"own_headers = '../../no.py'\n{TABLE}", "`own_headers` of `csrc/kernels.toml` must name"),
        (f"stand_ins = {{ rms = ['no'] }}\n{TABLE}", "must be lists of roles by role, got"),
        (f"stand_ins = {{ rms = 'rms' }}\n{TABLE}", "must be lists of roles by role, got"),
        (f"stand_ins = {{ no = ['rms'] }}\n{TABLE}", "hint: the roles are rms"),
        (f"{TABLE}\n[[family]]{SECOND}", "has two rows for fp16 256 0"),
    ],
    ids=lambda text: text[-50:].replace("\n", " "),
)
def test_a_table_that_no_kernel_comes_of_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(DeclarationError) as caught:
        judge(tmp_path, text)
    require_sentence(caught.value)
    assert said in str(caught.value)


def test_every_value_of_a_table_is_judged(tmp_path: Path) -> None:
    """A value of any other kind is accepted or refused with a sentence; nothing else is raised."""
    odd: list[object] = [None, True, 0, -1, 1.5, "x", "", [], [3], {}, {"a": 1}]
    data = tomllib.loads(TABLE)
    path = write(tmp_path / "csrc/kernels.toml")
    write(tmp_path / "csrc/rms.cuh")
    axes = read_axes(AXES)
    for place in [*list_places(data), "stand_ins", "own_headers"]:
        for value in odd:
            changed = copy.deepcopy(data)
            set_value(changed, place, value)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    "flash_dist.toolkit.make.declared.dispatch.read_toml_file",
                    lambda *_, found=changed: found,
                )
                try:
                    read_table(path, axes, tmp_path, (tmp_path / "csrc",))
                except DeclarationError as error:
                    require_sentence(error)


def list_places(data: object, place: str = "") -> list[str]:
    items: Any = list(data.items()) if isinstance(data, dict) else []
    items = enumerate(data) if isinstance(data, list) else items
    found = []
    for key, value in items:
        found += [f"{place}{key}", *list_places(value, f"{place}{key}.")]
    return found


def set_value(data: Any, place: str, value: object) -> None:  # noqa: ANN401 - tables and lists
    *before, last = place.split(".")
    for key in before:
        data = data[int(key)] if isinstance(data, list) else data[key]
    data[int(last) if isinstance(data, list) else last] = value


def test_a_main_role_is_one_of_the_table(tmp_path: Path) -> None:
    data = make_project(tmp_path)
    put(data, "dispatch.main_role", "rsm")
    said = refuse(data, tmp_path)
    assert "`main_role` of [tool.kernels.dispatch] is `rsm`, which no family" in said
    require_main_role("", ())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, '`table` of [tool.kernels.dispatch] names `"csrc/other.toml"`, and there is no'),
        ("]", "cannot read `csrc/other.toml`: "),
        ("\ufeff", "it begins with a byte order mark"),
        ("a = 1", "`csrc/other.toml` has an unknown key"),
    ],
    ids=["absent", "broken", "with a mark", "of something else"],
)
def test_an_unreadable_table_is_reported_with_the_declaration(
    text: str | None, said: str, tmp_path: Path
) -> None:
    data = make_project(tmp_path)
    put(data, "dispatch.table", "csrc/other.toml")
    if text is not None:
        write(tmp_path / "csrc/other.toml", text)
    assert said in refuse(data, tmp_path)


def test_errors_of_the_generator_appear_with_the_declaration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test uses the package of this process, because the generator uses this package's axes."""
    data = make_project(tmp_path)
    put(data, "sources", ...)
    put(data, "dispatch.axes", [axis.to_json() for axis in OWN_AXES.every])
    text = TABLE.replace("hidden", "head_dim").replace('name = "rms"', 'name = "sm"\nrole = "rms"')
    write(tmp_path / "csrc/kernels.toml", text)
    read_declaration(data, tmp_path)  # the declaration of another package
    monkeypatch.setattr(declaration, "NAME", "my_norms")
    said = refuse(data, tmp_path)
    assert "`csrc/kernels.toml`: a family that serves rms for all targets must be named rms" in said


def test_the_keys_of_a_family_are_those_that_the_generator_reads() -> None:
    assert set(Family.__dataclass_fields__) - {"words"} == set(KEYS["family"])
