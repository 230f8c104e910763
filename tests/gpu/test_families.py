"""Two families of one role: the dispatcher tries the family for this target before the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch

from flash_dist import flash_attn_func
from flash_dist.toolkit.loading.library import select
from tests.gpu.running import require_smaller_plans

HOPPER: Final = (9, 0)
LIMIT: Final = "FLASH_DIST_SMEM_LIMIT"
SMALL: Final = "166911"  # bytes of shared memory, too few for the Hopper kernels

CODE: Final = """
import json, sys, torch
from flash_dist import flash_attn_func, last_variant
def run(expanded):
    torch.manual_seed(0)
    head_dim, head_dim_v = map(int, sys.argv[2:])
    sizes = (600, head_dim), (500, head_dim), (500, head_dim_v), (600, head_dim_v)
    shapes = [(2, rows, 4, columns) for rows, columns in sizes]
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


FORWARD: Final = {"fwd": "fwd"}
RECOMPUTED: Final = FORWARD | {"bwd_dkdv": "bwd_dkdv", "bwd_dq_recompute": "bwd_dq_recompute"}
STORED: Final = FORWARD | {"bwd_dkdv": "bwd_dkdv", "bwd_dq_gemm": "bwd_dq_gemm"}
FUSED: Final = {"fwd": "fwd_sm90", "bwd_fused": "bwd_fused_sm90"}
STORED_SM90: Final = {role: f"{name}_sm90" for role, name in STORED.items()}
RECOMPUTED_SM90: Final = RECOMPUTED | {"fwd": "fwd_sm90", "bwd_dkdv": "bwd_dkdv_sm90"}


@dataclass(frozen=True)
class Kind:
    """Families of the gradients of a head_dim: those for Hopper, and the general ones."""

    head_dim: int
    native: dict[str, str]  # role -> family
    general: dict[str, str]
    megabytes: str = "1536"  # MB of workspace
    head_dim_v: int | None = None  # None: head_dim


KINDS: Final = {
    "fused-32": Kind(32, FUSED, STORED),
    "fused": Kind(64, FUSED, STORED),
    "fused-96": Kind(96, FUSED, STORED),
    "fused-128": Kind(128, FUSED, STORED),
    "fused-192-128": Kind(192, FUSED, STORED, head_dim_v=128),
    "one-block": Kind(96, RECOMPUTED_SM90, RECOMPUTED, "0"),
    "pair": Kind(256, STORED_SM90, STORED),
}


@pytest.fixture(scope="module", params=list(KINDS.values()), ids=list(KINDS))
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:  # noqa: ANN401
    """Return results of native kernels, and results with little shared memory.

    The kinds select the backward: all gradients in one kernel, one block per key tile, or two
    blocks per key tile.
    """
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("Hopper's families are for compute capability 9.0")
    require_smaller_plans()
    kind: Kind = request.param
    results: dict[str, Any] = {"kind": kind}
    columns = kind.head_dim, kind.head_dim_v or kind.head_dim
    unlimited = {name: value for name, value in os.environ.items() if name != LIMIT}
    for name, environ in (("native", {}), ("short", {LIMIT: SMALL})):
        path = tmp_path_factory.mktemp(name) / "result.pt"
        done = subprocess.run(
            [sys.executable, "-c", CODE, str(path), *map(str, columns)],
            env={**unlimited, "FLASH_DIST_WORKSPACE_MB": kind.megabytes, **environ},
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
ROLES: Final = {*STORED, *RECOMPUTED, *FUSED}


def of_roles(families: dict[str, str]) -> dict[str, str]:
    return {role: name for role, name in families.items() if role in ROLES}


def test_the_families_for_this_target_are_tried_first(runs: dict[str, Any]) -> None:
    assert of_roles(runs["native"]["found"]) == runs["kind"].native


def test_keys_that_are_one_memory_are_copied_for_the_families_of_this_target(
    runs: dict[str, Any],
) -> None:
    assert of_roles(runs["native"]["expanded"]) == runs["kind"].native


def test_the_general_families_serve_where_shared_memory_is_short(runs: dict[str, Any]) -> None:
    assert of_roles(runs["short"]["found"]) == runs["kind"].general


def test_both_agree_within_rounding(runs: dict[str, Any]) -> None:
    for ours, general in zip(runs["native"]["values"], runs["short"]["values"], strict=True):
        assert (ours - general).abs().max() <= 2**-6 * general.abs().max()


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(128, 128), (192, 128), (256, 256)], ids=["fused", "keys", "pair"]
)
def test_small_probabilities_keep_their_bits_where_they_are_rounded_first(
    head_dim: int, head_dim_v: int
) -> None:
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("Hopper's families are for compute capability 9.0")
    keys = 50_007  # 1 / keys = 335.497 * 2^-24 is subnormal in fp16: rounding error 1.5e-3
    q, k, v, dout = (
        torch.full((1, rows, 1, columns), value, dtype=torch.float16, device="cuda")
        for rows, columns, value in (
            (64, head_dim, 0.0),
            (keys, head_dim, 1.0),
            (keys, head_dim_v, 1.0),
            (64, head_dim_v, 1024.0),
        )
    )
    v.requires_grad_()
    (found,) = select(q.device.index, role="bwd_dkdv", dtype="fp16", head_dim=head_dim)
    if not found["chosen"]["family"].endswith("_sm90"):
        pytest.skip("this wheel has no code for 9.0a")
    (dv,) = torch.autograd.grad(flash_attn_func(q, k, v), v, dout)
    assert (dv.double() * keys / (64 * 1024) - 1).abs().max() < 2**-10
