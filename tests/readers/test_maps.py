"""Requests to the driver for a tensor's map, and tensors that have none."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pytest

from ci.places import SOURCES
from flash_dist.toolkit.make.kernels.generate import render_product
from tests.readers.tools import include, needs, run

pytestmark = needs("nvcc")

HERE: Final = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Tensor:
    """A view of 16-bit elements: strides of batch, row, head_kv and head_group."""

    rows: int = 100
    columns: int = 80
    members: int = 2
    heads_kv: int = 3
    batches: int = 4
    strides: tuple[int, int, int, int] = (48000, 480, 160, 80)
    offset: int = 0  # byte offset of the tensor
    has_encoder: int = 1

    def __str__(self) -> str:
        axes = (self.members, self.heads_kv, self.batches)
        numbers = (self.has_encoder, self.rows, self.columns, *axes, 64, self.offset)
        return " ".join(map(str, (*numbers, *self.strides)))


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("maps")
    (folder / "product.h").write_text(render_product(), encoding="utf-8")
    out = folder / "maps"
    sources = (HERE / "maps.cpp", SOURCES / "host" / "maps.cpp")
    flags = "-Xcompiler=-Wall,-Wextra,-Werror"
    run("nvcc", "-std=c++17", "-O1", flags, "-cudart=none", *include(folder), *sources, "-o", out)
    return out


def ask(program: Path, tensor: Tensor) -> dict[str, Any]:
    done = subprocess.run(
        [str(program)], input=f"{tensor}\n", capture_output=True, text=True, check=True
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_view_is_five_axes_with_strides_in_bytes(program: Path) -> None:
    assert ask(program, Tensor()) == {
        "status": 0,
        "steps": [1, 1, 1],
        "sizes": [80, 100, 2, 3, 4],
        "strides": [960, 160, 320, 96000],
        "box": [64, 64, 1, 1, 1],
    }


def test_an_axis_that_is_the_same_memory_throughout_has_size_1_and_coordinate_0(
    program: Path,
) -> None:
    answer = ask(program, Tensor(strides=(0, 480, 0, 80)))
    assert answer["sizes"] == [80, 100, 2, 1, 1]
    assert answer["steps"] == [1, 0, 0]
    assert answer["strides"] == [960, 160, 160, 160]


def test_the_stride_of_an_axis_of_size_1_is_of_no_account(program: Path) -> None:
    one = Tensor(rows=1, members=1, heads_kv=1, batches=1, strides=(3, 5, 2**41, -1))
    answer = ask(program, one)
    assert answer["sizes"] == [80, 1, 1, 1, 1]
    assert answer["steps"] == [0, 0, 0]
    assert answer["strides"] == [160] * 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"offset": 8}, "begins at no multiple of 16 bytes"),
        ({"rows": 0}, "empty"),
        ({"batches": 0}, "empty"),
        ({"strides": (48000, 0, 160, 80)}, "all the same memory"),
        ({"strides": (48000, 484, 160, 80)}, "no multiple of 16 bytes"),
        ({"strides": (2**39, 480, 160, 80)}, "not below 2^40 bytes"),
        ({"strides": (-48000, 480, 160, 80)}, "shorter than a row"),
        ({"strides": (48000, 72, 160, 80)}, "shorter than a row"),
        ({"has_encoder": 0}, "the driver has no cuTensorMapEncodeTiled"),
    ],
)
def test_a_tensor_without_a_map_is_told_why(
    program: Path, change: dict[str, Any], words: str
) -> None:
    assert words in ask(program, replace(Tensor(), **change))["problem"]


def test_strides_just_below_the_limit_are_served(program: Path) -> None:
    assert ask(program, Tensor(strides=(2**39 - 8, 480, 160, 80)))["status"] == 0
