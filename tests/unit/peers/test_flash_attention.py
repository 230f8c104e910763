"""flash-attention's tests with our import: rewritten files, drawn and counted cases; no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import torch

from flash_dist.toolkit.make.project import ROOT
from tests.peers import flash_attention
from tests.peers.flash_attention import Drawn, move_to_cpu, rewrite_imports
from tests.peers.rotary import apply_rotary_emb

if TYPE_CHECKING:
    from pathlib import Path

FILE = """\
import math
from flash_attn import (
    flash_attn_func,
    flash_attn_with_kvcache,
)
from flash_attn.bert_padding import pad_input
from flash_attn.flash_attn_interface import _get_block_size_n
from flash_attn.layers.rotary import apply_rotary_emb

def test(): flash_attn_func()  # of flash_attn
"""

# Stub of flash_dist: attend() refuses dropout with a soft cap.
PACKAGE = """\
def attend(d, dropout_p, softcap):
    if dropout_p and softcap:
        raise ValueError("softcap must be 0 with dropout_p=0.1, got 1.0")
    return d
"""
TESTS = """\
import pytest
from flash_attn import attend, cached

attn_unnorm = 8  # the package's, instead of the computed one

@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("d,softcap", [(8, 0.0), (16, 0.0), (59, 1.0), (24, 1.0)])
def test_attend(softcap, d, dropout_p):
    normal = attn = d
    if dropout_p:
        attn = normalize_flash_attn_S(
            normal,
        )
    assert attend(attn, dropout_p, softcap) != 16

@pytest.mark.parametrize("d", [8, 16])
def test_cached(d):
    cached(d)

@pytest.mark.parametrize("seqlen_q,seqlen_k", [(1, 64), (1, 65)])
def test_long(seqlen_q, seqlen_k):
    assert seqlen_k == 64
"""
# Stub for version 3: pages of 32 keys give wrong results.
PACKAGE_3 = """\
def flash_attn_with_kvcache(q, k, v, new_k, new_v, block_table=None, cache_leftpad=None, **others):
    if others or (block_table and cache_leftpad):
        raise TypeError(f"{sorted(others)} must be left out")
    return 0 if block_table == 32 else block_table
"""
TESTS_3 = """\
import pytest
try:
    from flash_attn.layers.rotary import apply_rotary_emb
except ImportError:
    apply_rotary_emb = None
from flash_attn_interface import flash_attn_func, flash_attn_with_kvcache, get_scheduler_metadata
from test_util import expect

def test_flash_attn_output():
    flash_attn_func()

@pytest.mark.parametrize("page_size", [None, 4, 16, 32])
@pytest.mark.parametrize("has_leftpad,varlen_q", [(False, False), (True, False), (False, True)])
def test_flash_attn_kvcache(page_size, has_leftpad, varlen_q):
    attention_chunk_vals = [7, 0]
    assert (attention_chunk_vals, apply_rotary_emb.__module__) == ([0], "rotary")
    assert get_scheduler_metadata(1, causal=True) is None
    given = {"qv": None, "cu_seqlens_q": [0] if varlen_q else None, "page_table": page_size}
    got = flash_attn_with_kvcache(1, 2, 3, cache_leftpad=has_leftpad or None, **given)
    assert got == expect(page_size)
"""


def test_imports_alone_are_changed_and_names_that_are_not_there_left_out() -> None:
    served = {"flash_attn_func", "pad_input"}
    changed, dropped = rewrite_imports(FILE, lambda _module, name: name in served)
    assert dropped == ["_get_block_size_n", "flash_attn_with_kvcache"]
    assert changed == (
        "import math\n"
        "from flash_dist.compat.flash_attn import flash_attn_func\n"
        "from flash_dist.compat.flash_attn.bert_padding import pad_input\n"
        "from rotary import apply_rotary_emb\n"
        "\n"
        "def test(): flash_attn_func()  # of flash_attn\n"
    )


def test_an_import_within_a_block_leaves_no_block_empty() -> None:
    text = "try:\n    from flash_attn import a\nexcept ImportError:\n    a = None\n"
    changed, _ = rewrite_imports(text, lambda _module, _name: False)
    assert changed == "try:\n    pass\nexcept ImportError:\n    a = None\n"


def test_a_file_for_a_gpu_is_moved_to_the_cpu() -> None:
    text = 'is_sm90 = torch.cuda.get_device_capability("cuda") == (9, 0)\ndevice = "cuda"\n'
    assert move_to_cpu(text) == 'is_sm90 = (9, 0) == (9, 0)\ndevice = "cpu"\n'


def test_rotary_embeddings_turn_pairs_by_the_angles_of_their_positions() -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).expand(2, 3, 1, 5)
    angles = torch.arange(6.0)[:, None] * torch.tensor([0.5, 0.1])
    offsets = torch.tensor([0, 3], dtype=torch.int32)
    for interleaved, pairs in ((True, ((0, 1), (2, 3))), (False, ((0, 2), (1, 3)))):
        turned = apply_rotary_emb(
            x, angles.cos(), angles.sin(), seqlen_offsets=offsets, interleaved=interleaved
        )
        assert torch.equal(turned[..., 4:], x[..., 4:])
        for number, (a, b) in enumerate(pairs):
            turn = torch.stack([angles[:3, number], angles[3:, number]])[..., None]
            first, second = x[..., a], x[..., b]
            torch.testing.assert_close(turned[..., a], first * turn.cos() - second * turn.sin())
            torch.testing.assert_close(turned[..., b], second * turn.cos() + first * turn.sin())


def test_a_sample_is_the_same_for_a_seed_and_holds_different_cases() -> None:
    axes = [("d", range(1, 200)), ("a,b", [(i, -i) for i in range(200)])]
    drawn = Drawn(axes, "seed").draw(50, wanted=lambda case: case[0] % 8 == 0)
    assert drawn == Drawn(axes, "seed").draw(50, wanted=lambda case: case[0] % 8 == 0)
    assert drawn != Drawn(axes, "other").draw(50, wanted=lambda case: case[0] % 8 == 0)
    assert len(set(drawn)) == 50
    assert all(d % 8 == 0 and a == -b for d, a, b in drawn)


def test_a_small_product_is_drawn_whole() -> None:
    drawn = Drawn([("softcap", [0.0, 1.0]), ("dropout_p", [0.0, 0.1])], "0")
    found = drawn.draw(99, wanted=drawn.is_neutral)
    assert sorted(found) == [(0.0, 0.0), (0.0, 0.1), (1.0, 0.0)]


def test_a_cache_has_a_multiple_of_8_columns() -> None:
    drawn = Drawn([("d", [8, 59]), ("new_kv", [False])], "0")
    assert drawn.draw(99, wanted=drawn.is_neutral) == [(8, False)]
    drawn = Drawn([("d", [8, 59]), ("paged_kv_block_size", [None, 256])], "0")
    assert sorted(drawn.draw(99, wanted=drawn.is_neutral), key=str) == [
        (59, None),
        (8, 256),
        (8, None),
    ]


def test_a_case_is_as_long_as_its_longest_sequence() -> None:
    drawn = Drawn([("seqlen_q,seqlen_k", [(1, 64), (65, 1)]), ("seqlen_new_eq_q", [99])], "0")
    assert drawn.draw(9, wanted=lambda case: drawn.is_short(case, 64)) == [(1, 64, 99)]


def run_tests(folder: Path, package: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the tests in a folder with a stub of flash_dist, as the program's user does."""
    site = folder / "site" / "flash_dist" / "compat"
    site.mkdir(parents=True)
    (site / "flash_attn.py").write_text(package)
    environ = {**os.environ, "PYTHONPATH": str(folder / "site")}
    command = [sys.executable, str(ROOT / flash_attention.__file__), str(folder), *options]
    return subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
        check=False,
        env=environ,
    )


def test_refusals_of_what_is_not_served_are_counted_and_a_wrong_value_fails(tmp_path: Path) -> None:
    """The package under test has one function, whose result is wrong for d 16."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_flash_attn.py").write_text(TESTS)
    done = run_tests(tmp_path, PACKAGE, "--longest=64")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "not imported: cached" in done.stdout
    assert "served  test_attend: 1 failed, 5 passed" in done.stdout
    assert "served  test_long: 1 passed" in done.stdout
    assert "other   test_attend: 2 refused" in done.stdout
    assert "other   all 4: 4 refused" in done.stdout


def test_caches_of_version_3_are_asked_for_by_our_names(tmp_path: Path) -> None:
    """The package under test supports a paged cache; its result is wrong for pages of 32."""
    (tmp_path / "hopper").mkdir()
    (tmp_path / "hopper" / "test_flash_attn.py").write_text(TESTS_3)
    (tmp_path / "hopper" / "test_util.py").write_text("def expect(page):\n    return page\n")
    (tmp_path / "hopper" / "padding.py").write_text("")
    done = run_tests(tmp_path, PACKAGE_3, "--suite=3", "-n", "2")  # both processes are counted
    assert done.returncode == 1, done.stdout + done.stderr
    assert "not imported: flash_attn_func" in done.stdout
    assert "served  all 4: 1 failed, 3 passed" in done.stdout
    assert "other   all 8: 1 passed, 7 refused" in done.stdout
