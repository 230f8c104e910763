"""A family for one target only, compiled for real: what the library and its readers say of it."""

from __future__ import annotations

import ctypes
import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from flash_dist.builds.package import KERNELS
from flash_dist.machine.installed import read_embedded
from flash_dist.targets.devices import Device
from flash_dist.targets.verdict import Build, Situation, judge_kernel
from tests.families.build import build
from tests.readers.tools import needs

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    needs("nvcc"),
    pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed"),
]

SPECIFIC = "flash_dist_fwd_sm90_bf16_d64_smem99_sm90a"
GENERAL = "flash_dist_fwd_bf16_d64_smem64_sm90a"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("family")) / KERNELS


def read_variants(library: Path) -> list[dict[str, Any]]:
    loaded = ctypes.CDLL(str(library))
    loaded.flash_dist_variants_json.restype = ctypes.c_int64
    buffer = ctypes.create_string_buffer(1 << 20)
    assert 0 < loaded.flash_dist_variants_json(buffer, ctypes.c_int64(len(buffer))) < len(buffer)
    return list(json.loads(buffer.value))


def test_the_library_tells_roles_and_families_apart(library: Path) -> None:
    forward = {v["symbol"]: v["family"] for v in read_variants(library) if v["role"] == "fwd"}
    assert forward == {SPECIFIC: "fwd_sm90", GENERAL: "fwd"}


def test_what_is_embedded_is_one_role_with_two_families(library: Path) -> None:
    build = Build("test", read_embedded(library, None))
    assert {v.family for v in build.variants if v.role == "fwd"} == {"fwd", "fwd_sm90"}
    key = ("fwd", "bf16", 64, 64)
    assert key in build.keys
    assert all("_sm" not in role for role, *_ in build.keys)
    for limit, symbol in ((232448, SPECIFIC), (65536, GENERAL)):
        verdict = judge_kernel(key, build.variants, Situation(Device(9, 0), smem_limit=limit))
        assert verdict.variant is not None
        assert verdict.variant.symbol == symbol
