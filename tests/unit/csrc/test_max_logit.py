"""The kernels that find the largest score of each head, in a dry run of a described GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Final

import pytest

from ci.dry_run.build import build_package
from ci.dry_run.plans import find_torch
from flash_dist.toolkit.make.project import ROOT
from flash_dist.toolkit.targets.archs import Arch
from tests.unit.made.planner import require_compiler

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

CALLS: Final = """
import json, torch
from ci.dry_run import child
from flash_dist.toolkit.loading.library import recorded_plans
kept = child.use_kernels_of_gpus()
ops = torch.ops.flash_dist
CAUSAL, DENSE = [0, -1, 0, 1], (None, None, 0, 0)

def run(
    size=(128, 128), seqlen=(4096, 4096), dtype=torch.bfloat16, packed=DENSE, softcap=0.0
):
    axes = () if packed[0] is not None else (1,)
    q, k = (torch.empty(*axes, n, 16, size[0], dtype=dtype) for n in seqlen)
    v = torch.empty(*axes, seqlen[1], 16, size[1], dtype=dtype)
    call = q, k, v, None, CAUSAL, *packed, 0.25, False, softcap
    with recorded_plans() as plans:
        results = ops.attention_max_logit(*call)
    with recorded_plans() as without:
        ops.attention(*call)
    assert results[2].shape == (16,)
    return [[one["kernel"] for one in x if "kernel" in one] for x in (plans, without)]

def ends(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)

ONE = ends(0, 2048, 4096)
print(json.dumps({name: eval(name) for name in NAMES}))
"""

# The kernels of each call, and those of the call without max_logit.
HOPPER: Final = {
    "run()": (["fwd_max_logit_sm90_bf16_d128"], ["fwd_sm90_bf16_d128"]),
    "run((64, 64))": (["fwd_max_logit_sm90_bf16_d64"], ["fwd_sm90_bf16_d64"]),
    "run((192, 128))": (["fwd_max_logit_sm90_bf16_d192v128"], ["fwd_sm90_bf16_d192v128"]),
    "run((256, 256))": (["fwd_max_logit_sm90_bf16_d256"], ["fwd_sm90_bf16_d256"]),
    "run((512, 512))": (["fwd_sm90_bf16_d512", "max_logit_bf16"], ["fwd_sm90_bf16_d512"]),
    "run((96, 96))": (["fwd_sm90_bf16_d96", "max_logit_bf16"], ["fwd_sm90_bf16_d96"]),
    "run((64, 64), (64, 64))": (["fwd_max_logit_sm90_bf16_d64"], ["fwd_sm90_bf16_d64"]),
    "run(dtype=torch.float16)": (["fwd_sm90_fp16", "max_logit_fp16"], ["fwd_sm90_fp16"]),
    "run(dtype=torch.float32)": (["fwd_fp32", "max_logit_fp32"], ["fwd_fp32"]),
    "run(softcap=30.0)": (["fwd_scored_sm90", "max_logit_bf16"], ["fwd_scored_sm90"]),
    "run(packed=(ONE, ONE, 2048, 2048))": (["fwd_max_logit_sm90"], ["fwd_sm90"]),
    # A sequence may have few queries: a separate kernel then computes such sequences.
    "run(packed=(ONE, ends(0, 2048, 4096), 2048, 2048))": (
        ["decode", "decode_fold", "fwd_max_logit_sm90", "max_logit_bf16"],
        ["decode", "decode_fold", "fwd_sm90"],
    ),
    "run(seqlen=(3, 4096))": (
        ["decode", "decode_fold", "max_logit_bf16"],
        ["decode", "decode_fold"],
    ),
}
GENERAL: Final = {
    "run()": (["fwd_bf16_d128", "max_logit_bf16_d512"], ["fwd_bf16_d128"]),
    "run(dtype=torch.float32)": (["fwd_fp32", "max_logit_fp32"], ["fwd_fp32"]),
}
SETTINGS: Final = {"9.0": ("90", "9.0a", "132", "232448"), "8.0": ("80", "8.0", "108", "166912")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_compiler()
    archs = [Arch.parse(one[1]) for one in SETTINGS.values()]
    return build_package(tmp_path_factory.mktemp("max_logit"), archs, find_torch())


@pytest.mark.parametrize(("capability", "calls"), [("9.0", HOPPER), ("8.0", GENERAL)], ids=SETTINGS)
def test_kernels_of_the_same_tiles_find_it_and_others_leave_it(
    folder: Path, capability: str, calls: dict[str, tuple[list[str], list[str]]]
) -> None:
    number, _, sm_count, smem_limit = SETTINGS[capability]
    described = {
        "DRY_RUN_CAPABILITY": number,
        "DRY_RUN_SM_COUNT": sm_count,
        "DRY_RUN_SMEM_LIMIT": smem_limit,
        "PYTHONPATH": f"{folder}:{ROOT}",
        "PYTHONSAFEPATH": "1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CALLS.replace("NAMES", repr(list(calls)))],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **described},
    )
    ran = json.loads(done.stdout)
    for name, want in calls.items():
        for symbols, families in zip(ran[name], want, strict=True):
            starts = [f"flash_dist_{one}" for one in families]
            assert all(map(str.startswith, symbols, starts)), (name, symbols, families)
            assert len(symbols) == len(starts), (name, symbols, families)
