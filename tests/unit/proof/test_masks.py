"""Score modifications of selftest cases."""

from __future__ import annotations

from dataclasses import replace

import torch

from flash_dist.kernels.scores import PLAIN
from flash_dist.proof.cases import Case
from flash_dist.proof.masks import SOFTCAP, make_scores

CPU = torch.device("cpu")
SCORES = "softcap alibi sinks"
CASE = Case("", 2, 5, 7, 4, 2, causal=True, scores=SCORES, dtype="bf16", head_dim=64)


def test_words_say_what_becomes_of_scores() -> None:
    scores = make_scores(CASE, CPU)
    assert scores.softcap == SOFTCAP
    assert scores.alibi_slopes is not None
    assert scores.sinks is not None
    assert make_scores(replace(CASE, scores="sinks"), CPU)[:2] == PLAIN[:2]
    assert make_scores(replace(CASE, scores=""), CPU) == PLAIN


def test_each_batch_entry_and_head_has_a_slope_that_every_machine_has() -> None:
    slopes = make_scores(CASE, CPU).alibi_slopes
    assert slopes is not None
    assert slopes.tolist() == [[0.5, 0.25, 0.125, 0.0625], [0.25, 0.125, 0.0625, 0.03125]]


def test_documents_share_the_slopes_of_their_heads() -> None:
    packed = replace(CASE, batch=1, seqlen_k=5, lengths=(2, 3))
    slopes = make_scores(packed, CPU).alibi_slopes
    assert slopes is not None
    assert slopes.tolist() == [0.5, 0.25, 0.125, 0.0625]


def test_sinks_come_from_the_hash() -> None:
    sinks = make_scores(CASE, CPU).sinks
    assert sinks is not None
    assert sinks.dtype == torch.float32
    assert len(set(sinks.tolist())) == CASE.num_heads_q
    assert sinks.abs().max() <= 2.0


def test_a_bias_is_of_heads_or_hides_keys_of_batch_entries() -> None:
    of_heads = make_scores(replace(CASE, scores="bias"), CPU).bias
    assert of_heads is not None
    assert (tuple(of_heads.shape), of_heads.dtype) == ((1, 4, 5, 7), torch.bfloat16)
    assert of_heads.isfinite().all()
    of_entries = make_scores(replace(CASE, scores="alibi bias sinks"), CPU).bias
    assert of_entries is not None
    assert (tuple(of_entries.shape), of_entries.dtype) == ((2, 1, 5, 7), torch.float32)
    assert 0 < of_entries.isneginf().sum() < of_entries.numel() / 2
