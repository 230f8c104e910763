"""Two families of one role: the one for this target is tried first, the other remains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, Final

import pytest
import torch

from flash_dist import flash_attn_func, last_variant

HOPPER: Final = (9, 0)
SMALL: Final = "166911"  # bytes of shared memory: too few for any kernel of Hopper's families

CODE: Final = """
import json, sys, torch
from flash_dist import flash_attn_func, last_variant
def run(expanded):
    torch.manual_seed(0)
    shapes = [(2, n, 4, int(sys.argv[2])) for n in (600, 500, 500, 600)]
    q, k, v, dout = (torch.randn(shape).to("cuda", torch.bfloat16) for shape in shapes)
    if expanded:  # all keys are the same memory
        k = k[:, :1].expand(shapes[1])
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = flash_attn_func(q, k, v, causal=True)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    families = {role: one["family"] for role, one in last_variant().items()}
    return families, [x.double().cpu() for x in (out, *grads)]
found, values = run(False)
expanded, _ = run(True)
torch.save({"found": found, "expanded": expanded, "values": values}, sys.argv[1])
"""


@pytest.fixture(
    scope="module", params=[64, 128, 96, 256], ids=["fused", "fused-128", "one-block", "pair"]
)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:  # noqa: ANN401
    """What ran natively, and where shared memory is short.

    Of the backward: all gradients by one kernel, keys of one block, and of two.
    """
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("Hopper's families are for compute capability 9.0")
    results: dict[str, Any] = {"head_dim": request.param}
    for name, environ in (("native", {}), ("short", {"FLASH_DIST_SMEM_LIMIT": SMALL})):
        path = tmp_path_factory.mktemp(name) / "result.pt"
        done = subprocess.run(
            [sys.executable, "-c", CODE, str(path), str(request.param)],
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        results[name] = torch.load(path)
    if "fwd_sm90" not in json.dumps(results["native"]["found"]):
        pytest.skip("this wheel has no code for 9.0a")
    return results


pytestmark = pytest.mark.gpu
GENERAL: Final = {"fwd": "fwd", "bwd_dkdv": "bwd_dkdv", "bwd_dq_gemm": "bwd_dq_gemm"}
CHAIN: Final = {role: f"{name}_sm90" for role, name in GENERAL.items()}
FUSED: Final = {"fwd": "fwd_sm90", "bwd_fused": "bwd_fused_sm90"}


def of_roles(families: dict[str, str]) -> dict[str, str]:
    return {role: families[role] for role in GENERAL}


def test_the_families_for_this_target_are_tried_first(runs: dict[str, Any]) -> None:
    found = runs["native"]["found"]
    wanted = FUSED if runs["head_dim"] in {64, 128} else CHAIN
    assert {role: found[role] for role in found if role in {*CHAIN, *FUSED}} == wanted


def test_the_general_families_serve_tensors_without_a_map(runs: dict[str, Any]) -> None:
    assert of_roles(runs["native"]["expanded"]) == GENERAL


def test_the_general_families_serve_where_shared_memory_is_short(runs: dict[str, Any]) -> None:
    assert of_roles(runs["short"]["found"]) == GENERAL
    assert "bwd_fused" not in runs["short"]["found"]


def test_both_agree_within_rounding(runs: dict[str, Any]) -> None:
    for ours, general in zip(runs["native"]["values"], runs["short"]["values"], strict=True):
        assert (ours - general).abs().max() <= 2**-6 * general.abs().max()


@pytest.mark.parametrize("head_dim", [128, 256], ids=["fused", "pair"])
def test_small_probabilities_keep_their_bits_where_they_are_rounded_first(head_dim: int) -> None:
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("Hopper's families are for compute capability 9.0")
    keys = 50_007  # 1 / keys is 335.497 * 2^-24: rounded to fp16, a subnormal number, 1.5e-3 off
    q, k, v, dout = (
        torch.full((1, rows, 1, head_dim), value, dtype=torch.float16, device="cuda")
        for rows, value in ((64, 0.0), (keys, 1.0), (keys, 1.0), (64, 1024.0))
    )
    v.requires_grad_()
    out = flash_attn_func(q, k, v)
    if last_variant()["fwd"]["family"] != "fwd_sm90":
        pytest.skip("this wheel has no code for 9.0a")
    (dv,) = torch.autograd.grad(out, v, dout)
    assert (dv.double() * keys / (64 * 1024) - 1).abs().max() < 2**-10
