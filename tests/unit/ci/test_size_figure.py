"""The picture of sizes: every byte of a wheel belongs to one part of one target."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ci.size_figure import PARTS, PTX, REST, count_bytes, draw, sum_parts
from flash_dist.bench.plot import require_matplotlib
from flash_dist.bench.style import STYLE

ROLES = {"f": "fwd", "b": "bwd_dkdv", "d": "decode_wide", "m": "mla"}


def make_image(arch: str, packed: int, kind: str = "sass", **code: int) -> SimpleNamespace:
    kernels = [SimpleNamespace(name=name, code_size=size) for name, size in code.items()]
    entry = SimpleNamespace(arch=arch, kind=kind, compressed_size=packed)
    return SimpleNamespace(entry=entry, kernels=kernels)


def make_contents() -> Any:  # noqa: ANN401 - in the place of WheelContents
    kernels = [SimpleNamespace(symbol=name, role=role) for name, role in ROLES.items()]
    images = [
        make_image("sm_80", 3_000_000, f=100, b=200),
        make_image("sm_80", 500_000, d=30, m=20),
        make_image("sm_90a", 1_000_000, b=7),
        make_image("compute_80", 2_000_000, "ptx"),
    ]
    return SimpleNamespace(manifest=SimpleNamespace(kernels=kernels), images=images, size=8_000_000)


def test_parts_of_each_target_add_up_to_the_wheel() -> None:
    found = count_bytes(make_contents())
    assert found == {
        "sm_80": pytest.approx({"forward": 1.0, "backward": 2.0, "decoding": 0.5}),
        "sm_90a": {"backward": 1.0},
        "compute_80": {PTX: 2.0},
        "": {REST: pytest.approx(1.5)},
    }
    sums = sum_parts(found)
    assert list(sums) == list(PARTS)
    assert sum(sums.values()) == pytest.approx(8.0)
    assert sums["backward"] == pytest.approx(3.0)


def test_a_bar_for_each_set_has_its_name_its_size_and_numbers_that_fit() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    plt = require_matplotlib()
    small = {**dict.fromkeys(PARTS, 0.0), "forward": 0.1, REST: 1.2}
    with plt.rc_context(STYLE):
        figure = draw({"all": sum_parts(count_bytes(make_contents())), "hopper": small}, plt)
    (axis,) = figure.axes
    assert [one.get_text() for one in axis.get_yticklabels()] == ["all 8.0", "hopper 1.3"]
    assert [one.get_text() for one in axis.texts] == ["1.0", "3.0", "0.5", "2.0", "1.5", "1.2"]
    plt.close(figure)
