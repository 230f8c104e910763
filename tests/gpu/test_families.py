"""Two families of one role on a GPU: the one for this target is tried first, the other remains.

`python -m tests.families.build FOLDER TORCH_HEADERS` makes the folder that FLASH_DIST_TEST_FAMILY
names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, Final

import pytest

FOLDER: Final = os.environ.get("FLASH_DIST_TEST_FAMILY", "")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not FOLDER, reason="FLASH_DIST_TEST_FAMILY names no build"),
]

CODE: Final = """
import hashlib, json, torch
from flash_dist import flash_attn_func, last_variant
from flash_dist.kernels.library import select
def run(seqlen_q):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 4, 64).to("cuda", torch.bfloat16) for n in (seqlen_q, 300, 300))
    out = flash_attn_func(q, k, v, causal=True).cpu()
    bits = out.view(torch.int16).numpy()
    return last_variant()["fwd"]["family"], hashlib.sha256(bits).hexdigest()
(fwd,) = select(0, role="fwd", dtype="bf16", head_dim=64)
print(json.dumps({"even": run(256), "odd": run(255), "chosen": fwd["chosen"]["family"]}))
"""


def run(**environ: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=FOLDER,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_the_family_for_this_target_is_tried_first_and_the_general_one_where_it_refuses() -> None:
    found = run()
    assert found["chosen"] == "fwd_sm90"
    assert found["even"][0] == "fwd_sm90"
    assert found["odd"][0] == "fwd"


def test_the_general_family_serves_where_shared_memory_is_short() -> None:
    assert run(FLASH_DIST_SMEM_LIMIT="65536")["even"][0] == "fwd"


def test_both_compute_the_same_bits() -> None:
    assert run()["even"][1] == run(FLASH_DIST_SMEM_LIMIT="65536")["even"][1]
