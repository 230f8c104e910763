"""The binding's messages for invalid tensors, with the values allowed, and what it reads of others.

A dry run compiles the binding. It treats CPU tensors as tensors of GPU -1.
"""

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
from tests.unit.made.planner import require_compiler

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

CALLS: Final = """
import json, torch
from ci.dry_run import child
kept = child.use_kernels_of_gpus()
ops = torch.ops.flash_dist

def half(*shape):
    return torch.ones(shape, dtype=torch.float16)

def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)

Q, K, CACHE, BAND = half(2, 3, 4, 16), half(2, 6, 2, 16), half(4, 32, 2, 16), [0, -1, -1, 1]

def fwd(q=Q, k=K, v=K, mask=BAND, packed=(None, None, 0, 0), data=None):
    return ops.attention(q, k, v, data, mask, *packed, 0.25, False)

def scored(slopes=None, sinks=None, bias=None, softcap=0.0, match=False):
    packed = None, None, 0, 0
    last = softcap, slopes, sinks, match, bias
    return ops.attention(Q, K, K, None, BAND, *packed, 0.25, False, *last)

def decode(q=Q, k=CACHE, lengths=int32(3, 4), table=None, left=None, new=0, slopes=None):
    how = 0.25, -1, 0, 0, 0.0, slopes
    return ops.decode(q, k, CACHE, lengths, None, left, table, None, 0, new, *how)

def append(cos=None, sin=None):
    lengths = int32(3, 4)
    return ops.append(Q, CACHE, CACHE, K, K, lengths, None, None, cos, sin, False, False)

said = {}
for name in NAMES:
    try:
        eval(name)
    except RuntimeError as error:
        said[name] = str(error)
print(json.dumps(said))
"""

REFUSED: Final = {
    "fwd(q=Q[0])": "q must have 4 or 5 dimensions, got 3",
    "fwd(q=Q[:, :, :3])": "num_heads_kv must divide num_heads_q, got 2 (k) and 3 (q)",
    "fwd(k=K.float())": (
        "k must be float16 on cuda:-1, as q, got float32 [2, 6, 2, 16] on cuda:-1"
    ),
    "fwd(Q.int(), K.int(), K.int())": "q must be float16, bfloat16 or float32, got int32",
    "fwd(v=K[:, :5])": "v must have shape [2, 6, 2, 16], got [2, 5, 2, 16]",
    "fwd(mask=[0, -2, 3, 1])": (
        "mask must be [0, left, right, bottom_right] with left and right at least -1, "
        "got [0, -2, 3, 1]"
    ),
    "fwd(mask=[7])": "mask must begin with its kind, 0, 1 or 2, got [7]",
    "fwd(mask=[1])": "mask_data must be a tensor for a mask of kind 1, got None",
    "fwd(mask=[1], data=int32(0))": "mask must have 23 numbers, got 1",
    "fwd(Q[0], K[0], K[0], packed=(int32(0, 3), None, 3, 6))": (
        "cu_seqlens_q and cu_seqlens_k must be given together, got only cu_seqlens_q"
    ),
    "fwd(Q[0], K[0], K[0], packed=(int32(0, 3), int32(0), 3, 6))": (
        "cu_seqlens_k must be contiguous int32 [batch + 1], [2], on cuda:-1, "
        "got int32 [1] on cuda:-1"
    ),
    "scored(slopes=torch.ones(3))": "alibi_slopes must have shape [4] or [2, 4], got [3]",
    "scored(bias=half(2, 4, 3, 5))": (
        "bias must broadcast to [batch, num_heads_q, seqlen_q, seqlen_k], [2, 4, 3, 6], "
        "got [2, 4, 3, 5]"
    ),
    "scored(bias=half(3, 6))": (
        "bias must broadcast to [batch, num_heads_q, seqlen_q, seqlen_k], [2, 4, 3, 6], got [3, 6]"
    ),
    "scored(bias=half(1, 1, 3, 6).double())": (
        "bias must be float32 or float16 on cuda:-1, as q, got float64 [1, 1, 3, 6] on cuda:-1"
    ),
    "scored(bias=half(1, 1, 1, 1), softcap=1.5)": (
        "bias must be None with softcap or match_kvcache, got a tensor"
    ),
    "scored(bias=half(1, 1, 1, 1), match=True)": (
        "bias must be None with softcap or match_kvcache, got a tensor"
    ),
    "scored(sinks=torch.ones(8)[::2])": (
        "sinks must be contiguous float32 on cuda:-1, got float32 [4] on cuda:-1, not contiguous"
    ),
    "decode(q=Q[..., :12])": "the last dimension of q must be a multiple of 8, at least 8, got 12",
    "decode(lengths=None, new=2)": (
        "cache_seqlens must be a tensor where seqlen_new is more than 0, got None and seqlen_new 2"
    ),
    "decode(lengths=int32(3))": (
        "cache_seqlens must be contiguous int32 [2] on cuda:-1, got int32 [1] on cuda:-1"
    ),
    "decode(table=int32((0,), (1,)), left=int32(0, 0))": (
        "cache_leftpad must be None with block_table, got a tensor"
    ),
    "decode(k=CACHE[:, :16])": "dimension 1 of v_cache must be 16, got shape [4, 32, 2, 16]",
    "decode(slopes=torch.ones(4, 2))": ("alibi_slopes must have shape [4] or [2, 4], got [4, 2]"),
    "append(cos=half(9, 8))": (
        "rotary_cos and rotary_sin must be given together, got only rotary_cos"
    ),
    "append(half(9, 12), half(9, 12))": (
        "rotary_cos must be float16 [positions, rotary_dim / 2] on cuda:-1, positions at least 1 "
        "and rotary_dim a multiple of 16 up to head_dim, 16, got float16 [9, 12] on cuda:-1"
    ),
}


NO_KEYS: Final = """
import json, torch
from ci.dry_run import child
kept = child.use_kernels_of_gpus()
ends = torch.tensor([0, 4], dtype=torch.int32)
found = []
for packed in (None, None, 0, 0), (ends, 0 * ends, 4, 0):
    sinks = torch.arange(8.0)[5:]  # those of the second layer, for example
    axes = () if packed[0] is not None else (1,)
    q, k = (torch.ones(*axes, n, 3, 64, dtype=torch.float16) for n in (4, 0))
    call = q, k, k, None, [0, -1, -1, 1], *packed, 0.25, False, 0.0, None, sinks
    found.append(torch.ops.flash_dist.attention(*call)[1].flatten().tolist())
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the compiled binding."""
    require_compiler()
    made: Path = build_package(tmp_path_factory.mktemp("binding"), (), find_torch())
    return made


def run(folder: Path, program: str) -> str:
    """Return what a program prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "PYTHONSAFEPATH": "1"},
    )
    return done.stdout


@pytest.fixture(scope="module")
def said(folder: Path) -> dict[str, str]:
    """Return the message of each call."""
    return dict(json.loads(run(folder, CALLS.replace("NAMES", repr(list(REFUSED))))))


@pytest.mark.parametrize("call", REFUSED)
def test_a_refusal_has_the_value_and_those_allowed(said: dict[str, str], call: str) -> None:
    assert said[call].endswith(f", {REFUSED[call]}"), said[call]


def test_without_keys_lse_is_the_sinks_wherever_they_begin(folder: Path) -> None:
    lse = [sink for sink in (5.0, 6.0, 7.0) for _ in range(4)]
    assert json.loads(run(folder, NO_KEYS)) == [lse, lse]
