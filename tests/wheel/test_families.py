"""Families for one target only, as an installed wheel and its readers report them."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any, Final

import pytest

import flash_dist
from flash_dist.toolkit.errors import ExtensionError
from flash_dist.toolkit.loading.library import select
from flash_dist.toolkit.machine.installed import read_embedded
from flash_dist.toolkit.product import KERNELS
from flash_dist.toolkit.targets.axes import KernelKey
from flash_dist.toolkit.targets.devices import Device
from flash_dist.toolkit.targets.verdict import Build, Situation, judge_kernel

LIBRARY: Final = Path(flash_dist.__file__).parent / KERNELS
SPECIFIC: Final = "flash_dist_fwd_sm90_bf16_d128_smem227_sm90a"
LARGER: Final = "flash_dist_fwd_sm90_bf16_d128_smem226_sm90a"  # the plan of SCORED
SCORED: Final = "flash_dist_fwd_scored_sm90_bf16_d128_smem226_sm90a"
GENERAL: Final = "flash_dist_fwd_bf16_d128_smem163_sm90a"


@pytest.fixture(scope="module")
def variants() -> list[dict[str, Any]]:
    """Return the library's description of its variants."""
    loaded = ctypes.CDLL(str(LIBRARY))
    loaded.flash_dist_variants_json.restype = ctypes.c_int64
    size = loaded.flash_dist_variants_json(None, ctypes.c_int64(0)) + 1
    buffer = ctypes.create_string_buffer(size)
    assert loaded.flash_dist_variants_json(buffer, ctypes.c_int64(size)) == size - 1
    found = list(json.loads(buffer.value))
    if SPECIFIC not in {one["symbol"] for one in found}:
        pytest.skip("this wheel has no code for 9.0a")
    return found


def test_the_library_tells_roles_and_families_apart(variants: list[dict[str, Any]]) -> None:
    families = {one["symbol"]: (one["role"], one["family"]) for one in variants}
    assert families[SPECIFIC] == ("fwd", "fwd_sm90")
    assert families[SCORED] == ("fwd", "fwd_scored_sm90")
    assert families[GENERAL] == ("fwd", "fwd")


def test_what_is_embedded_is_one_role_with_its_families(variants: list[dict[str, Any]]) -> None:
    build = Build("test", read_embedded(LIBRARY, None))
    assert len(build.variants) == len(variants)
    key = KernelKey("fwd", ("bf16",), (128, 128))
    keys = {one.key for one in build.variants}
    assert key in keys
    assert all("_sm" not in role for role, *_ in keys)
    for limit, symbol in ((232448, SPECIFIC), (231424, LARGER), (166912, GENERAL)):
        verdict = judge_kernel(key, build, Situation(Device(9, 0), smem_limit=limit))
        assert verdict.variant is not None
        assert verdict.variant.symbol == symbol


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ({"colour": "red"}, "a question must name role or an axis of a kernel, got `colour=red`"),
        ({"dtype": "fp8"}, "dtype must be one that kernels are built for, got `fp8`"),
    ],
)
def test_a_question_about_kernels_names_their_axes(axes: dict[str, str], said: str) -> None:
    with pytest.raises(ExtensionError, match=said):
        select(0, role="fwd", **axes)
