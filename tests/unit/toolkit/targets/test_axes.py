"""Named axes of kernels: symbols, records and the choice of a size follow the declaration."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flash_dist.toolkit.errors import KernelsError
from flash_dist.toolkit.make.project import PRODUCT_FILE
from flash_dist.toolkit.targets.axes import (
    AXES,
    Axes,
    AxesError,
    KernelKey,
    Place,
    name_kernel,
    name_sizes,
    smallest_size,
)

# Axes of another package: two word axes, one size, no shared-memory plans.
NORMS = Axes.from_json(
    [
        {"name": "dtype", "rule": "equal", "words": {"fp16": {"floor": "7.5"}}},
        {"name": "weight", "rule": "equal", "words": {"w8": {"floor": "8.9", "part_of": "fp16"}}},
        {"name": "columns", "rule": "holds", "symbol": "c{}"},
        {"name": "residual", "rule": "last"},
    ]
)
NONE = Axes.from_json([])


def test_the_axes_are_those_of_the_file_and_round_trip() -> None:
    data = json.loads(PRODUCT_FILE.read_text(encoding="utf-8"))["axes"]
    assert Axes.from_json(data) == AXES
    for axes in (AXES, NORMS, NONE):
        assert Axes.from_json(json.loads(json.dumps(axes.to_json()))) == axes


@pytest.mark.parametrize(
    ("axes", "symbol", "family", "place"),
    [
        (AXES, "x_fwd_bf16_d64_smem64_sm90a", "fwd", Place(("bf16",), (64, 64), 64)),
        (AXES, "x_mla_sm90_bf16_d576v512_sm90a", "mla_sm90", Place(("bf16",), (576, 512), 0)),
        (AXES, "x_bwd_delta_fp32_d128_compute80", "bwd_delta", Place(("fp32",), (128, 128), 0)),
        (NORMS, "x_rms_fp16_w8_c4096_sm89", "rms", Place(("fp16", "w8"), (4096,), 0)),
        (NONE, "x_scale_sm120f", "scale", Place((), (), 0)),
    ],
)
def test_a_symbol_is_read_as_it_is_spelled(
    axes: Axes, symbol: str, family: str, place: Place
) -> None:
    assert axes.read_symbol(symbol, "x_") == (family, place)
    target = symbol.rpartition("_")[2]
    assert "_".join(filter(None, ["x", family, axes.spell(place), target])) == symbol


@pytest.mark.parametrize("symbol", ["y_fwd_bf16_d64_sm90", "x_fwd_bf16_sm90", "x_fwd_d64_sm90", ""])
def test_a_symbol_of_others_is_not_read(symbol: str) -> None:
    assert AXES.read_symbol(symbol, "x_") is None


def test_a_family_tells_its_role_and_whether_it_comes_last() -> None:
    told = {name: (AXES.role_of(name), AXES.comes_last(name)) for name in ("fwd", "fwd_sm90")}
    assert told == {"fwd": ("fwd", False), "fwd_sm90": ("fwd", False)}
    assert AXES.role_of("fwd_scored_sm90") == NORMS.role_of("fwd_residual_sm90") == "fwd"
    assert AXES.comes_last("fwd_scored_sm90")
    assert NORMS.role_of("fwd_scored_sm90") == "fwd_scored"
    assert not NONE.comes_last("fwd_scored_sm90")


def test_values_stand_in_json_by_the_names_of_their_axes() -> None:
    place = Place(("fp16", "w8"), (64,), 0)
    values: dict[str, Any] = {"dtype": "fp16", "weight": "w8", "columns": 64}
    assert NORMS.describe(place) == values
    assert NORMS.place(values) == place
    key = AXES.read_key({"role": "fwd", "dtype": "bf16", "head_dim": 192, "head_dim_v": 128})
    assert key == KernelKey("fwd", ("bf16",), (192, 128))
    assert name_kernel(key) == "fwd bf16 192/128"
    assert AXES.place({"dtype": "bf16", "head_dim": 64}) == Place(("bf16",), (64, 64), 0)


@pytest.mark.parametrize(
    ("values", "error", "said"),
    [
        ({"dtype": "bf16"}, KeyError, "head_dim"),
        ({"dtype": 16, "head_dim": 64}, TypeError, "`dtype` must be str, got 16"),
        ({"dtype": "bf16", "head_dim": True}, TypeError, "`head_dim` must be int, got True"),
        ({"dtype": "bf16", "head_dim": "64"}, TypeError, "`head_dim` must be int, got '64'"),
    ],
)
def test_values_that_do_not_fit_are_refused(
    values: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        AXES.place(values)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([{"name": f"a{n}", "rule": "holds"} for n in range(9)], "at most 8 axes, got 9"),
        ([{"name": "a", "rule": "holds"}] * 2, r"different names.*got a \(holds\), a \(holds\)"),
        ([{"name": n, "rule": "fits"} for n in "ab"], r"one may be `fits`.*a \(fits\), b \(fits\)"),
        ([{"name": "a", "rule": "near"}], "must be equal, holds, fits or last, got 'near'"),
        ([{"name": "(a", "rule": "holds"}], r"looks like `head_dim`, got `\(a`"),
        ([{"name": "a", "rule": "holds", "symbol": "{}{}"}], r"as in `d\{\}`, got `\{\}\{\}`"),
        ([{"name": "a", "rule": "holds", "default": "b"}], "must be an axis `holds` before it"),
        (
            [{"name": "a", "rule": "equal", "words": {"B": {"floor": "8.0"}}}],
            "like `bf16`, got `B`",
        ),
        ([{"name": "a", "rule": "equal", "words": {"b1": {"floor": "x"}}}], "like `8.6`, got `x`"),
        ([{"name": "a", "rule": "holds", "floors": {"8": "x"}}], "like `8.6`, got `x`"),
        ([{"name": "a", "rule": "holds", "floors": {"-8": "8.0"}}], "need numbers .*got `-8`"),
        ([{"name": "a", "rule": "fits", "floors": {"8": "8.0"}}], "rule `holds`, got rule `fits`"),
    ],
)
def test_axes_that_make_no_sense_are_refused(data: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(KernelsError, match=said):
        Axes.from_json(data)


HOLDS = {"rule": "holds"}


@pytest.mark.parametrize(
    ("data", "hint"),
    [
        ([{"name": f"a{n}", **HOLDS} for n in range(9)], "leave out an axis on which all kernels"),
        ([{"name": "a", **HOLDS}] * 2, "rename one of the axes `a`"),
        ([{"name": n, "rule": "fits"} for n in "ab"], "several axes may be `equal` or `holds`"),
        ([{"name": "a", **HOLDS, "default": "b"}, {"name": "b", **HOLDS}], "leave it out: no axis"),
        ([{"name": "a", **HOLDS}, {"name": "b", **HOLDS, "default": "c"}], "name `a`"),
    ],
)
def test_axes_that_do_not_go_together_are_refused_with_a_hint(
    data: list[dict[str, Any]], hint: str
) -> None:
    with pytest.raises(AxesError) as caught:
        Axes.from_json(data)
    assert str(caught.value.hint).startswith(hint)


def test_keys_of_a_newer_writer_are_left_alone() -> None:
    word = {"floor": "7.5", "newer": 1}
    data = [{"name": "dtype", "rule": "equal", "words": {"fp16": word}, "newer": True}]
    assert list(Axes.from_json(data).words) == ["fp16"]


def test_the_smallest_sizes_that_hold_a_call_serve_it() -> None:
    sizes = [(64, 64), (128, 128), (160, 160), (192, 128)]
    assert smallest_size(sizes, (80, 64)) == (128, 128)
    assert smallest_size(sizes, (160, 128)) == (192, 128)
    assert smallest_size(sizes, (256, 64)) is None
    assert smallest_size([()], ()) == ()
    assert [name_sizes(one) for one in ((64, 64), (192, 128), (8,), ())] == [
        "64",
        "192/128",
        "8",
        "",
    ]


def test_a_floor_holds_from_its_number_on() -> None:
    floors = {"1000": "9.0", "384": "8.0"}
    (axis,) = Axes.from_json([{"name": "a", "rule": "holds", "floors": floors}]).every
    found = [str(axis.floor_of(number)) for number in (383, 384, 999, 1000)]
    assert found == ["0.0", "8.0", "8.0", "9.0"]
    assert axis.to_json()["floors"] == {"384": "8.0", "1000": "9.0"}
