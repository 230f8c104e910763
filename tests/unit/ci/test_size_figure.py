"""The picture of sizes: every byte of a wheel belongs to one part of one target."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from ci.size_figure import PARTS, PTX, REST, count_bytes, draw, sum_parts
from flash_dist.bench.plot import require_matplotlib
from flash_dist.bench.style import STYLE

ROLES = {"f": "fwd", "b": "bwd_dkdv", "d": "decode_wide", "m": "mla"}


DENSE = random.Random(0).randbytes(7_000_000)  # noqa: S311 - it only must not compress


def make_image(
    arch: str, place: tuple[int, int], kind: str = "sass", **code: int
) -> SimpleNamespace:
    kernels = [SimpleNamespace(name=name, code_size=size) for name, size in code.items()]
    begin, end = place
    entry = SimpleNamespace(arch=arch, kind=kind, payload_offset=begin, compressed_size=end - begin)
    return SimpleNamespace(entry=entry, kernels=kernels, library="lib.so")


def make_contents() -> Any:  # noqa: ANN401 - in the place of WheelContents
    kernels = [SimpleNamespace(symbol=name, role=role) for name, role in ROLES.items()]
    images = [
        make_image("sm_80", (0, 3_000_000), f=100, b=200),
        make_image("sm_80", (3_000_000, 3_500_000), d=30, m=20),
        make_image("sm_90a", (3_500_000, 4_500_000), b=7),
        make_image("compute_80", (4_500_000, 6_500_000), "ptx"),
    ]
    return SimpleNamespace(manifest=SimpleNamespace(kernels=kernels), images=images, size=8_000_000)


def test_parts_of_each_target_add_up_to_the_wheel() -> None:
    found = count_bytes(make_contents(), {"lib.so": DENSE})
    wanted = {
        "sm_80": {"forward": 1.0, "backward": 2.0, "decoding": 0.5},
        "sm_90a": {"backward": 1.0},
        "compute_80": {PTX: 2.0},
        "": {REST: 1.5},
    }
    assert found.keys() == wanted.keys()
    assert all(found[one] == pytest.approx(wanted[one], abs=0.01) for one in wanted)
    sums = sum_parts(found)
    assert list(sums) == list(PARTS)
    assert sum(sums.values()) == pytest.approx(8.0)
    assert sums["backward"] == pytest.approx(3.0, abs=0.01)


def test_an_image_takes_what_the_wheels_compression_leaves_of_it() -> None:
    found = count_bytes(make_contents(), {"lib.so": bytes(7_000_000)})
    assert found[""][REST] == pytest.approx(8.0, abs=0.02)


def test_a_bar_for_each_set_has_its_name_its_size_and_numbers_that_fit() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    plt = require_matplotlib()
    found = count_bytes(make_contents(), {"lib.so": DENSE})
    small = {**dict.fromkeys(PARTS, 0.0), "forward": 0.1, REST: 1.2}
    with plt.rc_context(STYLE):
        figure = draw({"all": sum_parts(found), "hopper": small}, plt)
    (axis,) = figure.axes
    assert [one.get_text() for one in axis.get_yticklabels()] == ["all 8.0", "hopper 1.3"]
    assert [one.get_text() for one in axis.texts] == ["1.0", "3.0", "0.5", "2.0", "1.5", "1.2"]
    plt.close(figure)
